"""The training objectives: what a packed step feeds, which rows it reads, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from d2f import noise, spans
from d2f.attention import SpanPlan, Way
from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.pipeline_states import read_states
from distill.config import TrainConfig
from distill.data import Placed, Sample, Stream, lay_out, make_stream
from distill.objectives.losses import weighted_cross_entropy
from distill.run.sharding import gathered
from triton_kernels.masked_kl import masked_linear_kl

Rows = list[list[Placed]]


@dataclass(frozen=True)
class Batch:
    """One process's part of a step.

    input_ids, positions: int64 ``[R, L]``. spans: int32 ``[R, L, 1, 2]``; teacher_spans: the same
    for the D2F teacher. rows: int64 ``[N]``, flat places of the rows that are read; targets: int64
    ``[N]``, the clean ids they predict; weight: fp32 ``[N]``, normalised over the whole step.
    """

    input_ids: Tensor
    positions: Tensor
    spans: Tensor
    teacher_spans: Tensor | None
    rows: Tensor
    targets: Tensor
    weight: Tensor

    def to(self, device: torch.device) -> Batch:
        parts = {k: None if v is None else v.to(device) for k, v in vars(self).items()}
        return replace(self, **parts)  # type: ignore[arg-type]


class Objective(nn.Module):
    """Base of the objectives: a step's batch, and the loss of a batch."""

    tail = True  # whether samples carry end tokens after the first

    def __init__(self, model: DiffusionModel, config: TrainConfig):
        super().__init__()
        self.model = model
        self.network = model.adapter or model.backbone
        self._no_split_modules = model.backbone._no_split_modules  # what FSDP shards one by one
        self.config = config
        self.attention: Way | None = None  # None: as decoding chooses

    def stream(self) -> Stream:
        """The samples that it trains on. Raises InputError."""
        return make_stream(self.config, self.model, tail=self.tail)

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

    def share(self, sample: Sample, masked: np.ndarray) -> float:
        """What a sample adds to the step's normaliser."""
        return float(self.importance(sample).sum())

    def draw(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """(masked, loss weight) of a sample's response: from (seed, sample index) and nothing
        else."""
        ratios, weight = self.state(sample)
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
        """This process's rows of a step; the loss is normalised over all of them."""
        length = self.config.data.row_length
        ids, positions = lay_out(rows[mine], length)
        flat = ids.view(-1)
        reads: list[np.ndarray] = []
        weights: list[np.ndarray] = []
        total = 0.0
        first = range(len(rows))[mine].start
        clean = flat.clone()
        for r, placed in samples_of(rows):
            sample = placed.sample
            masked, weight = self.draw(sample)
            total += self.share(sample, masked)
            if not 0 <= r - first < len(ids):
                continue
            start = (r - first) * length + placed.start + len(sample.prompt)
            places = start + np.flatnonzero(masked)
            reads.append(places)
            weights.append(weight[masked])
            if not self.is_causal(sample):
                assert self.model.mask_id is not None
                flat[torch.from_numpy(places)] = self.model.mask_id
        targets = torch.from_numpy(np.concatenate(reads)) if reads else torch.zeros(0).long()
        scaled = np.concatenate(weights) / max(total, 1e-9) if weights else np.zeros(0)
        own, teacher = self.spans(rows[mine], length)
        return Batch(
            input_ids=ids,
            positions=positions,
            spans=own,
            teacher_spans=teacher,
            rows=targets - self.model.logit_shift,
            targets=clean[targets],
            weight=torch.from_numpy(scaled).float(),
        )

    def spans(self, rows: Rows, length: int) -> tuple[Tensor, Tensor | None]:
        """Spans of packed rows, for the trained model and for a teacher."""
        own = [spans.pack([self.sample_spans(p.sample) for p in row], length) for row in rows]
        return torch.stack(own), None

    def read(self, batch: Batch, which: Tensor) -> Tensor:
        """Hidden states ``[N, C]`` of the rows that are read."""
        hidden = self.model.hidden(
            batch.input_ids, SpanPlan(which, way=self.attention), batch.positions
        )
        return hidden.flatten(0, 1).index_select(0, batch.rows)

    def read_teacher(self, batch: Batch) -> Tensor:
        """The same rows by the weights without the adapter under the teacher's spans. To be called
        before the student's graph is built: no wrapper that shards weights then sees the adapter
        go off and on in between."""
        assert batch.teacher_spans is not None
        training = self.network.training
        self.network.eval()
        with torch.no_grad(), self.model.adapter_disabled():
            teacher = self.read(batch, batch.teacher_spans)
        self.network.train(training)
        return teacher

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch, a scalar."""
        logits = self.model.head(self.read(batch, batch.spans))
        return weighted_cross_entropy(logits, batch.targets, batch.weight)


class NextToken(Objective):
    """Autoregressive cross-entropy on the response and its first end token."""

    tail = False

    def is_causal(self, sample: Sample) -> bool:
        return True

    def state(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(len(sample.response)), np.ones(len(sample.response))


class MaskedDiffusion(Objective):
    """LLaDA's objective: cross-entropy on masked tokens, weight 1 / ratio, over all tokens.

    A share of the samples follows the states of block-wise decoding instead of one ratio: the
    answer's blocks on the left revealed, one block partly masked, all on its right masked. Its
    block counts for all of them (weight: their number / ratio), what is on its right little.
    Another share stays next-token prediction under causal spans, so that a model that starts from
    autoregressive weights does not forget what they can do; for shifted families only.
    """

    def is_causal(self, sample: Sample) -> bool:
        draw = noise.sample_rng(self.config.seed, sample.index, noise.CAUSAL).random()
        return bool(draw < self.config.noise.causal_share)

    def state(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        settings, length = self.config.noise, len(sample.response)
        if self.is_causal(sample):
            read = (np.arange(length) < sample.answer).astype(float)
            return read, read
        rng = self.rng(sample)
        even = noise.even_draw(self.config.seed, sample.index)
        if rng.random() < settings.uniform_share:
            ratio = settings.min_ratio + (settings.max_ratio - settings.min_ratio) * even
            return noise.uniform_ratios(length, ratio), np.full(length, 1 / ratio)
        ratio = settings.min_ratio + (1 - settings.min_ratio) * even
        size = int(rng.choice(settings.block_sizes))
        blocks = -(-sample.answer // size)
        start = size * int(rng.integers(blocks))
        ratios = noise.decoding_ratios(length, start, start + size, ratio)
        far = np.arange(length) >= start + size
        return ratios, np.where(far, settings.far_weight, blocks / ratio)


class D2F(Objective):
    """Discrete diffusion forcing: the block-causal student learns the distribution that the same
    weights without the adapter give bidirectionally on the same noisy input (D2F, section 3)."""

    def __init__(self, model: DiffusionModel, config: TrainConfig):
        super().__init__(model, config)
        path = config.noise.states
        self.states = None if path is None else read_states(path)
        lacking = set(config.block_shares) - set(self.states.by_size if self.states else ())
        if self.states is not None and lacking:
            raise InputError(
                f"{path}: expected states of the block sizes {list(config.block_shares)}, "
                f"got {list(self.states.by_size)}"
            )

    def state(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        settings, size = self.config.noise, self.block_size(sample)
        rng, length = self.rng(sample), len(sample.response)
        if rng.random() < settings.monotone_share:
            draw = noise.random_ratios if settings.schedule == "random" else noise.monotone_ratios
            ratios = draw(length, size, settings.low, settings.high, rng)
            return ratios, 1 / np.where(ratios > 0, ratios, 1.0)
        if self.states is not None:
            ratios, end = self.states.draw(length, size, rng)
        else:
            low, most = settings.min_ratio, settings.most_active
            ratios = noise.pipeline_ratios(length, size, low, 1.0, rng, most)
            fresh = int(np.argmax(np.append(ratios, 1.0) == 1.0))  # where appended blocks begin
            end = fresh + size
        far = np.arange(length) >= end
        weight = 1 / np.where(ratios > 0, ratios, 1.0)
        return ratios, np.where(far, settings.far_weight, weight)

    def share(self, sample: Sample, masked: np.ndarray) -> float:
        return float(self.importance(sample)[masked].sum())

    def sample_spans(self, sample: Sample) -> Tensor:
        return spans.block_causal(len(sample), len(sample.prompt), self.block_size(sample))

    def spans(self, rows: Rows, length: int) -> tuple[Tensor, Tensor | None]:
        own, _ = super().spans(rows, length)
        return own, full_spans(rows, length)

    def forward(self, batch: Batch) -> Tensor:
        if self.config.distill_target == "hard":
            student = self.read(batch, batch.spans)
            return weighted_cross_entropy(self.model.head(student), batch.targets, batch.weight)
        teacher = self.read_teacher(batch)
        student = self.read(batch, batch.spans)
        head = gathered(self.model.backbone.lm_head.weight)
        return masked_linear_kl(student, teacher, head, batch.weight)


def _wino_plus(model: DiffusionModel, config: TrainConfig) -> Objective:
    from distill.objectives.wino_plus import WinoPlusObjective  # which builds on this file

    return WinoPlusObjective(model, config)


def _wedlm(model: DiffusionModel, config: TrainConfig) -> Objective:
    from distill.objectives.wedlm import WeDLM  # which builds on this file

    return WeDLM(model, config)


OBJECTIVES: dict[str, Callable[[DiffusionModel, TrainConfig], Objective]] = {
    "next_token": NextToken,
    "masked_diffusion": MaskedDiffusion,
    "d2f": D2F,
    "wino_plus": _wino_plus,
    "wedlm": _wedlm,
}


def full_spans(rows: Rows, length: int) -> Tensor:
    """Spans ``[R, length, 1, 2]`` of packed rows whose samples are read bidirectionally."""
    own = [spans.pack([spans.bidirectional(len(p.sample)) for p in row], length) for row in rows]
    return torch.stack(own)


def samples_of(rows: Rows) -> Iterator[tuple[int, Placed]]:
    """Each sample with the row it is in."""
    for r, row in enumerate(rows):
        for placed in row:
            yield r, placed
