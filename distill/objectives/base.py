"""What the training objectives have in common: what a packed step feeds, which rows it reads, and
its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from d2f import noise, spans
from d2f.attention import Segment, SpanPlan, Way
from d2f.errors import InputError
from d2f.model import DiffusionModel
from distill.config import Options, TrainConfig
from distill.data import Placed, Sample, Stream, hold_out, lay_out, make_stream

# How a training step attends: in plain PyTorch a part of the queries at a time, each over only the
# keys that its spans reach.

ROWS = 256  # queries of a part: fewer reach fewer keys in vain, and are more calls


class TrainingPlan(SpanPlan):
    """A `SpanPlan` of a packed step. Compiled layers (`distill.sharding`) leave it out
    of their graphs, so that these hold for any spans and for each way to compute them.

    read: int64 ``[N]``, which of the R x L places the loss reads (`last_layer`).
    """

    def __init__(self, spans: Tensor, read: Tensor, way: Way | None = None):
        # Reading spans would wait for a GPU, whose kernels skip keys by themselves.
        segments = parts_of(spans) if spans.device.type == "cpu" else None
        super().__init__(spans, segments, way)
        self.read = read

    @torch.compiler.disable
    def attend(
        self,
        layer: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
    ) -> Tensor:
        return super().attend(layer, query, key, value, scale)


def parts_of(spans: Tensor, rows: int = ROWS) -> list[Segment]:
    """Queries in parts of `rows`, each with the keys from the first to the last that any of them
    sees in any sequence of the batch; spans int32 ``[B, T, K, 2]`` on the CPU. Block-causal, blocks
    of 2, in parts of 3 queries::

        query    0      1      2      3      4      5
        sees     [0,2)  [0,2)  [0,4)  [0,4)  [0,6)  [0,6)
        part     keys 0 to 3          keys 0 to 5
    """
    parts = []
    for first in range(0, spans.shape[1], rows):
        queries = slice(first, min(first + rows, spans.shape[1]))
        starts, ends = spans[:, queries].unbind(-1)  # [B, rows, K]
        filled = ends > starts
        if not filled.any():  # rows that pad: a key is masked for all of them
            parts.append(Segment(queries, slice(0, 1)))
            continue
        low, high = int(starts[filled].min()), int(ends[filled].max())
        seen = (ends - starts).clamp(min=0).sum(-1)  # [B, rows]; the ranges of a row are apart
        parts.append(Segment(queries, slice(low, high), whole=bool((seen == high - low).all())))
    return parts


# The last decoder layer of a training step, computed only as far as the loss reads it.
#
# Its keys and values come from all places; behind its attention nothing but the places that the
# loss
# reads is of use: about a third of a step's, and of the layer mostly the MLP::
#
#     hidden [R, L, C] -> norm, attention, sum -> index [1, N, C] -> norm, MLP, sum -> [1, N, C]
#
# By its operations that is about a tenth of a step of four layers and a hundredth of one of 32.


def read_rows_only(backbone: PreTrainedModel) -> None:
    """Have the last layer, and the norm behind it, compute what a `TrainingPlan` says is read;
    forwards under any other plan stay as they are. In place; a second call changes nothing."""
    layer: Any = backbone.model.layers[-1]
    # As FSDP does: a class of its own, with the layer's weights and names.
    layer.__class__ = _reading(layer.__class__)


@cache
def _reading(kind: Any) -> Any:
    """The class of a last layer, for layers of Llama's structure (Qwen2's and Qwen3's too)."""
    if getattr(kind, "reads", False):
        return kind

    class Reading(kind):
        reads = True

        def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
            plan = given.get("spans")
            if not isinstance(plan, TrainingPlan):
                out: Tensor = super().forward(hidden_states, **given)
                return out
            normed = self.input_layernorm(hidden_states)
            attended, _ = self.self_attn(hidden_states=normed, **given)
            read = (hidden_states + attended).flatten(0, 1).index_select(0, plan.read)[None]
            return read + self.mlp(self.post_attention_layernorm(read))

    Reading.__name__ = kind.__name__  # by which FSDP finds the layers
    return Reading


Rows = list[list[Placed]]


@dataclass(frozen=True)
class Batch:
    """One process's part of a step.

    input_ids, positions: int64 ``[R, L]``, packed rows (`distill.data.stream`). spans: int32
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
    """Base of the objectives: a step's batch, and the loss of a batch.

    section: the class of the configuration's section `objective`.
    """

    section: type[Options]

    def __init__(self, model: DiffusionModel, config: TrainConfig):
        super().__init__()
        self.model = model
        read_rows_only(model.backbone)
        self.network = model.adapter or model.backbone
        self._no_split_modules = model.backbone._no_split_modules  # what FSDP shards one by one
        self.config = config
        self.tail = config.objective.has_tail
        self.attention: Way | None = None  # None: as decoding chooses
        self.mask_ratio: float | None = None  # of a held-out loss; None: its own noise

    @classmethod
    def check_model(cls, model: DiffusionModel, config: TrainConfig) -> None:
        """Raise InputError for a model that it cannot train."""
        if not model.is_diffusion:
            raise InputError(
                f"objective {config.objective.name} needs a family with a mask, got causal"
            )

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
        shares = self.config.objective.block_shares
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


# Losses on logits, of which only a part of the rows is there at a time: each part's logits are
# made again for its gradient.

LOGITS_BYTES = 64 << 20  # of the fp32 logits that are there at a time


def rows_at_a_time(vocab_size: int) -> int:
    """How many rows' logits fit into `LOGITS_BYTES`, at least one."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def sum_in_parts(loss: Callable[..., Tensor], columns: Sequence[Tensor], rows: int) -> Tensor:
    """Sum of loss(*part), a scalar, over the columns ``[N, ...]`` cut into parts of `rows`; N may
    be 0."""
    total = columns[0].new_zeros((), dtype=torch.float32)
    for part in zip(*(column.split(rows) for column in columns), strict=True):
        total = total + checkpoint(loss, *part, use_reentrant=False, preserve_rng_state=False)
    return total


def linear_reverse_kl(
    student_hidden: Tensor, teacher_hidden: Tensor, head: Tensor, weight: Tensor
) -> Tensor:
    """Sum over rows of weight x KL(student || teacher), D2F's equation 3 (arXiv 2508.09192), in
    fp32: with s and t the softmax of student and teacher, sum_v s_v (log s_v - log t_v).

    student_hidden, teacher_hidden: ``[N, C]``, the latter without gradient. head: ``[V, C]``,
    frozen. weight: ``[N]``. The other direction is `triton_kernels.masked_kl`.
    """

    def of_part(student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        log_s, log_t = (
            F.linear(hidden, head).log_softmax(-1, dtype=torch.float32)  # [n, V]
            for hidden in (student, teacher)
        )
        return ((log_s.exp() * (log_s - log_t)).sum(-1) * weight).sum()

    # Two models' logits share the bound.
    rows = max(1, rows_at_a_time(len(head)) // 2)
    return sum_in_parts(of_part, (student_hidden, teacher_hidden.detach(), weight), rows)
