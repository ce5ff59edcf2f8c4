"""Feed a packed step and compute its loss: what the training objectives share.

A step's rows become a `Batch`: `draw` hides tokens of each sample and weighs them, `sample_spans`
says what its tokens see, `normalizer` what the loss is divided by. `forward` reads the rows of the
batch (the last layer computes those alone) and sums their losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from d2f import noise, spans
from d2f.errors import InputError
from distill.config import Options, TrainConfig
from distill.data.samples import Placed, Sample
from distill.data.stream import Stream, hold_out

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from d2f.attention import Way
    from d2f.model import DiffusionModel

Rows = list[list[Placed]]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Hold one process's part of a step.

    input_ids, positions: int64 ``[R, L]``, packed rows (`distill.data.stream`). spans: int32
    ``[R, L, 1, 2]``; teacher_spans: the same for a teacher. rows: int64 ``[N]``, which of the
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

    def to(self, device: torch.device) -> Self:
        """Copy it to a device, without waiting for a GPU that is still at the step before."""
        cuda = device.type == "cuda"  # it copies by itself from pinned memory alone
        parts = {
            name: (value.pin_memory() if cuda else value).to(device, non_blocking=cuda)
            for name, value in vars(self).items()
            if value is not None
        }
        return replace(self, **parts)


@dataclass(frozen=True)
class Fed:
    """Hold a sample as it is fed, and what the loss reads of it.

    ids, positions: ``[length]``. rows: ``[N]``, which of them are read. targets: ``[N]``, the clean
    ids that they predict. weight: ``[N, losses]``. total: ``[losses]``, what it adds to each loss's
    denominator.
    """

    ids: Ints
    positions: Ints
    rows: Ints
    targets: Ints
    weight: np.ndarray
    total: np.ndarray


class Objective:
    """Hide tokens of samples, feed them and compute a loss; each objective is a subclass.

    A step goes from top to bottom of this class: `draw` (by default from the ratios of `state`)
    hides tokens and weighs them, `sample_spans` says what each token sees, `fed` lays a sample out,
    `batch` packs a step, `forward` reads it and returns its loss. An objective's file imports torch
    where it computes, so that a wrong option is told at once.

    section: the class of the configuration's section `objective`. copies: how often a sample is fed
    in its row, one after the other.
    """

    section: type[Options]
    copies = 1

    def __init__(self, model: DiffusionModel, config: TrainConfig):
        from d2f.attention import read_rows_only

        self.model, self.mask_id, self.logit_shift = model, model.mask_id, model.logit_shift
        read_rows_only(model.backbone)
        self.network = model.adapter or model.backbone
        self.config, self.tail = config, config.objective.has_tail
        self.options: Any = config.objective
        self.block_shares: dict[int, float] = self.options.block_shares
        self.attention: Way | None = None  # None: as decoding chooses
        self.mask_ratio: float | None = None  # of a held-out loss; None: its own noise
        self.reads_teacher = config.objective.has_teacher

    @classmethod
    def check_model(cls, model: DiffusionModel, config: TrainConfig) -> None:
        """Raise InputError for a model that it cannot train."""
        if not model.is_diffusion:
            raise InputError(
                f"objective {config.objective.name} needs a family with a mask, got causal"
            )

    @classmethod
    def doubt(cls, config: TrainConfig) -> str | None:
        """Return a warning to print before the run begins, None where there is nothing to doubt."""
        return None

    def stream(self) -> Stream:
        """Return the samples that it trains on, with those that are held out. Raises InputError."""
        model, config = self.model, self.config
        assert model.tokenizer is not None
        stream = Stream(
            config.data, model.tokenizer, model.end_ids, config.seed, self.tail, model.mask_id
        )
        stream.held_out = hold_out(config, stream)
        return stream

    # A sample's noise, from (seed, sample index) and nothing else.

    def state(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """Return (mask ratio, loss weight if masked) of each response token, ``[response]``."""
        raise NotImplementedError

    def draw(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """Return which response tokens are hidden from the model, and each one's loss weight, 0
        where the loss does not read it, ``[response]``."""
        if self.mask_ratio is None:
            ratios, weight = self.state(sample)
        else:
            weight = np.ones(len(sample.response))
            ratios = self.mask_ratio * weight
        rng = noise.sample_rng(self.config.seed, sample.index, noise.MASK)
        masked = noise.draw_mask(ratios, rng)
        return masked, np.where(masked, weight * self.importance(sample), 0.0)

    def importance(self, sample: Sample) -> np.ndarray:
        """Return 1 for answer tokens, `data.tail_weight` for the tail of end tokens."""
        place = np.arange(len(sample.response))
        return np.where(place < sample.answer, 1.0, self.config.data.tail_weight)

    def normalizer(self, sample: Sample, read: np.ndarray) -> float:
        """Return the importance-weighted token count, whose sum over a step divides the loss.

        read: bool ``[response]``, the tokens that the loss reads; here all tokens count.
        """
        return float(self.importance(sample).sum())

    def rng(self, sample: Sample) -> np.random.Generator:
        """Return the generator of a sample's ratios."""
        return noise.sample_rng(self.config.seed, sample.index, noise.RATIOS)

    def block_size(self, sample: Sample) -> int:
        """Draw the size of a sample's blocks by the configured shares."""
        shares = self.block_shares
        if len(shares) == 1:
            return next(iter(shares))
        rng = noise.sample_rng(self.config.seed, sample.index, noise.BLOCKS)
        return int(rng.choice(list(shares), p=list(shares.values())))

    # A step's rows as tensors.

    def sample_spans(self, sample: Sample) -> Tensor:
        """Return the spans ``[len(sample), 1, 2]`` that the trained model sees."""
        return spans.bidirectional(len(sample))

    def fed(self, sample: Sample) -> Fed:
        """Lay a sample out as it is fed; `sample_spans` says what its rows see."""
        masked, weight = self.draw(sample)
        clean, prompt = np.array(sample.prompt + sample.response), len(sample.prompt)
        ids, read = clean.copy(), weight > 0
        ids[prompt + np.flatnonzero(masked)] = self.mask_id or 0  # without one none is masked
        targets = prompt + np.flatnonzero(read)
        return Fed(
            ids=ids,
            positions=np.arange(len(ids)),
            # The row that predicts position p is p - 1 in shifted families.
            rows=targets - self.logit_shift,
            targets=clean[targets],
            weight=weight[read, None],
            total=np.array([self.normalizer(sample, read)]),
        )

    @property
    def shares(self) -> np.ndarray:
        """Return each loss's share of the whole, ``[losses]``."""
        return np.ones(1)

    def batch(self, rows: Rows, mine: slice) -> Batch:
        """Build what this process feeds in a step.

        rows: those of all processes, over which the loss is normalised: drawing the others' masks
            again gives each process the step's denominator without asking.
        mine: which of them are this process's.
        """
        import torch

        length, first = self.copies * self.config.data.row_length, range(len(rows))[mine].start
        ids = np.zeros((len(rows[mine]), length), dtype=np.int64)
        positions, total = np.zeros_like(ids), np.zeros(len(self.shares))
        nothing = np.zeros(0, dtype=np.int64)
        reads, targets, weights = [nothing], [nothing], [np.zeros((0, len(total)))]
        for r, row in enumerate(rows, -first):
            for placed in row:
                fed = self.fed(placed.sample)
                total += fed.total
                if not 0 <= r < len(ids):  # another process's row
                    continue
                start = self.copies * placed.start
                part = slice(start, start + len(fed.ids))
                ids[r, part], positions[r, part] = fed.ids, fed.positions
                reads.append(r * length + start + fed.rows)
                targets.append(fed.targets)
                weights.append(fed.weight)
        weight = (np.concatenate(weights) / np.maximum(total, 1e-9)) @ self.shares

        def packed(spans_of: Callable[[Sample], Tensor]) -> Tensor:  # int32 [R, length, K, 2]
            each = [[spans_of(placed.sample) for placed in row] for row in rows[mine]]
            return torch.stack([spans.pack(row, length) for row in each])

        def everything(sample: Sample) -> Tensor:
            return spans.bidirectional(len(sample))

        return Batch(
            input_ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            spans=packed(self.sample_spans),
            teacher_spans=packed(everything) if self.reads_teacher else None,
            rows=torch.from_numpy(np.concatenate(reads)),
            targets=torch.from_numpy(np.concatenate(targets)),
            weight=torch.from_numpy(weight).float(),
        )

    # The loss of a batch.

    def forward(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, a scalar; here the cross-entropy of what is read."""
        logits = self.model.head(self.read(batch, batch.spans))
        return weighted_cross_entropy(logits, batch.targets, batch.weight)

    def read(self, batch: Batch, which: Tensor) -> Tensor:
        """Return hidden states ``[N, C]`` of the rows that the loss reads: only these meet the
        head, whose logits are the largest tensor. which: the student's or the teacher's spans."""
        from d2f.attention import TrainingPlan

        read = self.model.backbone.model(
            input_ids=batch.input_ids,
            position_ids=batch.positions,
            spans=TrainingPlan(which, batch.rows, self.attention),
            use_cache=False,
        )
        return read.last_hidden_state[0]  # of [1, N, C]

    def read_teacher(self, batch: Batch) -> Tensor:
        """Return the same rows by the weights without the adapter, under the teacher's spans.

        Called before the student's graph is built: no wrapper that shards weights then sees the
        adapter go off and on in between.
        """
        import torch

        assert batch.teacher_spans is not None
        training = self.network.training
        self.network.eval()  # no dropout in the teacher
        with torch.no_grad(), self.model.adapter_disabled():
            teacher = self.read(batch, batch.teacher_spans)
        self.network.train(training)
        return teacher

    # A held-out loss.

    def for_held_out(self, ratio: float | None, row_length: int) -> Self:
        """Return the same on the same modules, as a held-out loss reads it: each response token
        masked with probability `ratio` (None: as in training), rows of another length, and no
        weight on the tail of end tokens."""
        config, changed = self.config, copy.copy(self)
        data = config.data.model_copy(update={"row_length": row_length, "tail_weight": 0.0})
        changed.mask_ratio, changed.config = ratio, config.model_copy(update={"data": data})
        return changed

    def held_out_shares(
        self, batch: Batch, student: Tensor, teacher: Tensor | None
    ) -> dict[str, tuple[float, float]]:
        """Return what else a held-out loss measures of the rows that it reads, by name: how many,
        and of how many."""
        return {}

    def counted(self, batch: Batch) -> Tensor:
        """Tell which rows that the loss reads a held-out loss counts, bool ``[N]``."""
        return batch.weight > 0


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Sum over rows of weight x cross-entropy of logits ``[N, V]`` with target ids ``[N]``, in fp32
    at least."""
    import torch

    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (torch.nn.functional.cross_entropy(wide, targets, reduction="none") * weight).sum()


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor whole and without gradient, where a wrapper holds a shard of it (FSDP2:
    DTensor; ZeRO-3: partitioned); any other tensor as it is. All processes call this."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor


LOGITS_BYTES = 64 << 20  # of the fp32 logits that are there at a time


def rows_at_a_time(vocab_size: int) -> int:
    """Return how many rows' logits fit into `LOGITS_BYTES`, at least one."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def sum_in_parts(loss: Callable[..., Tensor], columns: Sequence[Tensor], rows: int) -> Tensor:
    """Sum loss(*part) over the columns ``[N, ...]`` cut into parts of `rows`; N may be 0. A part's
    logits are made again for its gradient, so only one part's are there at a time."""
    import torch
    from torch.utils.checkpoint import checkpoint

    total = columns[0].new_zeros((), dtype=torch.float32)
    for part in zip(*(column.split(rows) for column in columns), strict=True):
        total = total + checkpoint(loss, *part, use_reentrant=False, preserve_rng_state=False)
    return total
