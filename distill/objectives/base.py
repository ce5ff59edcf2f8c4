"""What the training objectives have in common: what a packed step feeds, which rows it reads, and
its loss."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d2f import noise, spans
from d2f.attention import Way
from d2f.errors import InputError
from d2f.model import DiffusionModel
from distill.config import TrainConfig
from distill.data import Placed, Sample, Stream, hold_out, lay_out, make_stream
from distill.objectives.last_layer import read_rows_only
from distill.objectives.training_plan import TrainingPlan

Rows = list[list[Placed]]


@dataclass(frozen=True)
class Batch:
    """One process's part of a step.

    input_ids, positions: int64 ``[R, L]``, packed rows (`distill.data.packing`). spans: int32
    ``[R, L, 1, 2]``; teacher_spans: the same for the D2F teacher. rows: int64 ``[N]``, which of the
    R x L places the loss reads; targets: int64 ``[N]``, the clean ids they predict; weight: fp32
    ``[N]``, normalised over the whole step.
    """

    input_ids: Tensor
    positions: Tensor
    spans: Tensor
    teacher_spans: Tensor | None
    rows: Tensor
    targets: Tensor
    weight: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device. A GPU that is still at the step before is not waited for."""
        cuda = device.type == "cuda"  # it copies by itself from pinned memory alone
        parts = {
            name: (value.pin_memory() if cuda else value).to(device, non_blocking=cuda)
            for name, value in vars(self).items()
            if value is not None
        }
        return replace(self, **parts)


class Objective(nn.Module):
    """Base of the objectives: a step's batch, and the loss of a batch. What a configuration must
    know of one before torch is there is its `distill.objectives.kinds.Kind`."""

    def __init__(self, model: DiffusionModel, config: TrainConfig):
        super().__init__()
        self.model = model
        read_rows_only(model.backbone)
        self.network = model.adapter or model.backbone
        self._no_split_modules = model.backbone._no_split_modules  # what FSDP shards one by one
        self.config = config
        self.tail = config.kind.tail
        self.attention: Way | None = None  # None: as decoding chooses
        self.mask_ratio: float | None = None  # of a held-out loss; None: its own noise

    @classmethod
    def check_model(cls, model: DiffusionModel, config: TrainConfig) -> None:
        """Raise InputError for a model that it cannot train."""
        if not model.is_diffusion:
            raise InputError(f"objective {config.objective} needs a family with a mask, got causal")

    @classmethod
    def doubt(cls, config: TrainConfig) -> str | None:
        """A warning to print before the run begins, None where there is nothing to doubt."""
        return None

    @classmethod
    def loss_bytes(cls, model: DiffusionModel, config: TrainConfig, reads: int) -> int:
        """Memory of the loss on `reads` rows: logits as the head gives them, in fp32, and one fp32
        tensor computed of them."""
        return reads * model.vocab_size * (logit_bytes(config) + 8)

    def stream(self) -> Stream:
        """The samples that it trains on, with those that are held out. Raises InputError."""
        stream = make_stream(self.config, self.model, tail=self.tail)
        stream.held_out = hold_out(self.config, stream)
        return stream

    def for_held_out(self, ratio: float | None, row_length: int) -> Self:
        """The same on the same modules, as a held-out loss reads it: each response token masked
        with probability `ratio` (None: as in training), rows of another length, and no weight on
        what is not counted (the tail of end tokens)."""
        config, changed = self.config, copy.copy(self)
        data = config.data.model_copy(update={"row_length": row_length, "tail_weight": 0.0})
        changed.mask_ratio, changed.config = ratio, config.model_copy(update={"data": data})
        return changed

    def counted(self, batch: Batch) -> Tensor:
        """Which rows that the loss reads a held-out loss counts, bool ``[N]``."""
        return batch.weight > 0

    def state(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """(mask ratio, loss weight if masked) of each response token, both ``[response]``."""
        raise NotImplementedError

    def importance(self, sample: Sample) -> np.ndarray:
        """1 for answer tokens, `data.tail_weight` for the tail of end tokens, ``[response]``."""
        place = np.arange(len(sample.response))
        return np.where(place < sample.answer, 1.0, self.config.data.tail_weight)

    def is_causal(self, sample: Sample) -> bool:
        """Whether a sample is read as next-token prediction: nothing hidden, causal spans."""
        return False

    def sample_spans(self, sample: Sample) -> Tensor:
        """Spans ``[len(sample), 1, 2]`` that the trained model sees."""
        causal = self.is_causal(sample)
        return spans.causal(len(sample)) if causal else spans.bidirectional(len(sample))

    def share(self, sample: Sample, read: np.ndarray) -> float:
        """What a sample adds to the sum that the step's loss is divided by: here all of its tokens,
        by importance, whether the loss reads them (bool ``[response]``) or not."""
        return float(self.importance(sample).sum())

    def draw(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """(masked, loss weight) of a sample's response: from (seed, sample index) and nothing
        else."""
        if self.mask_ratio is None:
            ratios, weight = self.state(sample)
        else:
            weight = np.ones(len(sample.response))
            ratios = self.mask_ratio * weight
        rng = noise.sample_rng(self.config.seed, sample.index, noise.MASK)
        return noise.draw_mask(ratios, rng), weight * self.importance(sample)

    def next_decided(self, sample: Sample) -> np.ndarray:
        """Which masked tokens the decoder decides next, where a sample is a recorded state of it,
        bool ``[response]``."""
        return np.zeros(len(sample.response), dtype=bool)

    def rng(self, sample: Sample) -> np.random.Generator:
        """The generator of a sample's ratios."""
        return noise.sample_rng(self.config.seed, sample.index, noise.RATIOS)

    def block_size(self, sample: Sample) -> int:
        """The size of a sample's blocks, drawn by the configured shares."""
        shares = self.config.block_shares
        sizes = list(shares)
        if len(sizes) == 1:
            return sizes[0]
        rng = noise.sample_rng(self.config.seed, sample.index, noise.BLOCKS)
        return int(rng.choice(sizes, p=list(shares.values())))

    def batch(self, rows: Rows, mine: slice) -> Batch:
        """What this process feeds in a step. rows: those of all processes, over which the loss is
        normalised. mine: which of them are this process's."""
        length = self.config.data.row_length
        ids, positions = lay_out(rows[mine], length)
        flat = ids.view(-1)
        reads: list[np.ndarray] = []
        weights: list[np.ndarray] = []
        total = 0.0
        first = range(len(rows))[mine].start
        # The targets, kept before masks are written into the ids.
        clean = flat.clone()
        # Over all rows, also those of other processes: drawing their masks again gives each process
        # the step's normaliser without asking the others.
        for r, placed in samples_of(rows):
            sample = placed.sample
            masked, weight = self.draw(sample)
            # A masked token without weight is hidden from the model, but nothing is learnt of it.
            read = masked & (weight > 0)
            total += self.share(sample, read)
            if not 0 <= r - first < len(ids):
                continue
            # The response's first place in the R x L places of this process.
            start = (r - first) * length + placed.start + len(sample.prompt)
            reads.append(start + np.flatnonzero(read))
            weights.append(weight[read])
            if not self.is_causal(sample):
                assert self.model.mask_id is not None
                flat[start + torch.from_numpy(np.flatnonzero(masked))] = self.model.mask_id
        targets = torch.from_numpy(np.concatenate(reads)) if reads else torch.zeros(0).long()
        scaled = np.concatenate(weights) / max(total, 1e-9) if weights else np.zeros(0)
        own, teacher = self.spans(rows[mine], length)
        return Batch(
            input_ids=ids,
            positions=positions,
            spans=own,
            teacher_spans=teacher,
            # The row that predicts position p is p - 1 in shifted families.
            rows=targets - self.model.logit_shift,
            targets=clean[targets],
            weight=torch.from_numpy(scaled).float(),
        )

    def spans(self, rows: Rows, length: int) -> tuple[Tensor, Tensor | None]:
        """Spans of packed rows, for the trained model and for a teacher."""
        own = [spans.pack([self.sample_spans(p.sample) for p in row], length) for row in rows]
        return torch.stack(own), None

    def read(self, batch: Batch, which: Tensor) -> Tensor:
        """Hidden states ``[N, C]`` of the rows that the loss reads. which: the spans to read them
        under, the student's or the teacher's."""
        # Only these rows reach the head, whose logits are the largest tensor.
        plan = TrainingPlan(which, batch.rows, self.attention)
        return self.model.hidden(batch.input_ids, plan, batch.positions)[0]  # of [1, N, C]

    def read_teacher(self, batch: Batch) -> Tensor:
        """The same rows by the weights without the adapter under the teacher's spans. To be called
        before the student's graph is built: no wrapper that shards weights then sees the adapter
        go off and on in between."""
        assert batch.teacher_spans is not None
        training = self.network.training
        # No dropout in the teacher.
        self.network.eval()
        with torch.no_grad(), self.model.adapter_disabled():
            teacher = self.read(batch, batch.teacher_spans)
        self.network.train(training)
        return teacher

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch, a scalar."""
        logits = self.model.head(self.read(batch, batch.spans))
        return weighted_cross_entropy(logits, batch.targets, batch.weight)


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Sum over rows of weight x cross-entropy of logits ``[N, V]`` with target ids ``[N]``, in fp32
    at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (F.cross_entropy(wide, targets, reduction="none") * weight).sum()


def full_spans(rows: Rows, length: int) -> Tensor:
    """Spans ``[R, length, 1, 2]`` of packed rows whose samples are read bidirectionally."""
    own = [spans.pack([spans.bidirectional(len(p.sample)) for p in row], length) for row in rows]
    return torch.stack(own)


def samples_of(rows: Rows) -> Iterator[tuple[int, Placed]]:
    """Each sample with the row it is in."""
    for r, row in enumerate(rows):
        for placed in row:
            yield r, placed


def logit_bytes(config: TrainConfig) -> int:
    """Of a logit as the head gives it."""
    return 4 if config.mixed_precision == "no" else 2
