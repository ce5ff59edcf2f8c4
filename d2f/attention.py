"""Register span attention as an attention implementation of transformers, ``"span"``.

A model loaded with ``attn_implementation="span"`` takes ``spans=SpanPlan(...)`` in its forward
instead of an attention mask. Training computes only what its loss reads (`TrainingPlan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from d2f.quiet import quiet
from triton_kernels.dispatch import use_kernel
from triton_kernels.flex import FlexSpans
from triton_kernels.span_attention import can_run, masked_attention, span_attention, span_mask

with quiet():  # transformers imports torchao where it is installed, which has much to say
    from transformers import AttentionInterface, PreTrainedModel

NAME = "span"
Way = Literal["sdpa", "flex", "kernel"]


@dataclass(frozen=True)
class Segment:
    """Locate one request's rows in a flat batch and the slots that they may see.

    whole: every row sees all of the slots, so no mask is needed. Two requests in one batch, the
    slots of the second begin at 6::

        spans of the batch                         segments
        [0, 4) [0, 4)   [6, 7) [6, 8) [6, 9)       rows 0 1: slots 0 to 3, whole
                                                   rows 2 3 4: slots 6 to 8, a mask of 3 x 3
    """

    rows: slice
    slots: slice
    whole: bool = False


class SpanPlan:
    """Describe the attention of one forward to all of its layers.

    spans: int32 ``[B or 1, T, K, 2]`` over the keys, which in decoding are the slots of the cache.
    segments: rows and slots of each request in a flat batch. Plain attention then builds a mask of
    rows x own slots for each; without segments one of T x S.
    way: how it is computed. ``sdpa`` is scaled_dot_product_attention with a mask; ``flex`` is
    flex_attention, which takes no segments; ``kernel`` is ours; None takes it on a GPU where
    `use_kernel` says so and no gradient is needed, else ``sdpa``.
    """

    def __init__(
        self, spans: Tensor, segments: list[Segment] | None = None, way: Way | None = None
    ):
        if spans.dim() == 3:
            spans = spans[None]
        self.spans = spans
        self.segments = segments
        self.way = way
        self._flex: FlexSpans | None = None
        # Built by the first layer and kept for the others; a plan lasts one forward.
        self._masks: dict[int, Tensor] = {}  # by segment, -1 for the whole batch
        self._flat: Tensor | None = None

    def mask(self, keys: int) -> Tensor:
        """Return the mask ``[B or 1, T, keys]``."""
        if -1 not in self._masks:
            self._masks[-1] = span_mask(self.spans, keys)
        return self._masks[-1]

    def segment_mask(self, i: int) -> Tensor | None:
        """Return the mask ``[1, rows, slots]`` of segment i, or None where it is whole."""
        assert self.segments is not None
        part = self.segments[i]
        if part.whole:
            return None
        if i not in self._masks:
            first, stop = part.slots.start, part.slots.stop
            self._masks[i] = span_mask(self.spans[:, part.rows], stop - first, first)
        return self._masks[i]

    def attend(
        self,
        layer: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
    ) -> Tensor:
        """Compute one layer's attention: query ``[B, H, T, D]``, keys and values ``[B, H_kv, S,
        D]`` to ``[B, T, H, D]`` in the values' dtype."""
        query, key = query.to(value.dtype), key.to(value.dtype)  # RoPE may have run in fp32
        if self.way == "flex":
            if self._flex is None:
                self._flex = FlexSpans(self.spans.expand(len(query), -1, -1, -1), key.shape[2])
            return self._flex(query, key, value, scale).transpose(1, 2)
        chosen = self.way is None and query.is_cuda and can_run(query, key, value)
        if self.way == "kernel" or (chosen and use_kernel("span_attention", query)):
            return self._by_kernel(query, key, value, scale)
        if self.segments is None:
            out = masked_attention(query, key, value, self.mask(key.shape[2]), scale=scale)
        else:
            # Request by request: a mask over the whole batch and cache would be mostly False, and
            # its cost would grow with the square of the number of requests.
            parts = [
                masked_attention(
                    query[:, :, part.rows],
                    key[:, :, part.slots],
                    value[:, :, part.slots],
                    self.segment_mask(i),
                    scale=scale,
                )
                for i, part in enumerate(self.segments)
            ]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return out.transpose(1, 2)

    def _by_kernel(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Lay the batch's rows one after the other, and its keys: the kernel knows no batch."""
        batch, heads, rows, dim = query.shape
        kv_heads, slots = key.shape[1:3]
        # Decoding has a batch of 1, of which these are views: the cache is not copied.
        q = query.transpose(1, 2).reshape(batch * rows, heads, dim)  # [B * T, H, D]
        k, v = (x.transpose(0, 1).reshape(kv_heads, batch * slots, dim) for x in (key, value))
        spans = self._flat_spans(batch, slots)
        # Not checked here: looking into the spans would wait for the GPU in every layer.
        out = span_attention(q, k, v, spans, scale=scale, kernel=True, check=False)
        return out.view(batch, rows, heads, dim)

    def _flat_spans(self, batch: int, slots: int) -> Tensor:
        """Return spans ``[B * T, K, 2]`` over the batch's keys laid one after the other. Two
        sequences of 3 causal rows::

            over each one's keys     [0, 1) [0, 2) [0, 3)    [0, 1) [0, 2) [0, 3)
            over 6 keys in a row     [0, 1) [0, 2) [0, 3)    [3, 4) [3, 5) [3, 6)
        """
        if self._flat is None:
            first = torch.arange(batch, dtype=torch.int32, device=self.spans.device) * slots
            spans = self.spans.expand(batch, -1, -1, -1) + first[:, None, None, None]
            self._flat = spans.flatten(0, 1).contiguous()  # as the kernel reads them
        return self._flat


def span_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    spans: SpanPlan | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend in a layer of transformers: query ``[B, H, T, D]`` to output ``[B, T, H, D]``. The
    plan comes from the model's forward, by the keyword ``spans``. Raises ValueError without it."""
    if spans is None:
        raise ValueError("span attention needs spans=SpanPlan(...) in the model's forward")
    return spans.attend(module, query, key, value, scaling), None


# Without a mask function beside it transformers builds no mask and does not look into the positions
# for packed samples, which on a GPU would wait for it in every forward.
AttentionInterface.register(NAME, span_attention_forward)


class TrainingPlan(SpanPlan):
    """Plan the attention of a packed step. Compiled layers leave it out of their graphs, which so
    hold for any spans and each way to compute them.

    read: int64 ``[N]``, which of the R x L places the loss reads; None: the last layer computes
    all of them.
    """

    def __init__(self, spans: Tensor, read: Tensor | None, way: Way | None = None):
        # Reading spans would wait for a GPU, whose kernels skip keys by themselves.
        segments = parts_of(spans) if spans.device.type == "cpu" else None
        super().__init__(spans, segments, way)
        self.read = read

    attend = torch.compiler.disable(SpanPlan.attend)


class PartPlan(TrainingPlan):
    """Plan the attention of a forward that feeds some rows of each sequence. Those that it does not
    feed have the keys and values of an earlier forward, without its gradient.

    spans: int32 ``[B, T, K, 2]`` of the rows fed, over all rows of the sequence. places: int64
    ``[B, T]``, where among them the rows fed stand. length: of the sequence. earlier: the plan of
    the earlier forward; without one no row may see what is not fed.
    """

    def __init__(
        self,
        spans: Tensor,
        places: Tensor,
        length: int,
        way: Way | None = None,
        earlier: PartPlan | None = None,
    ):
        super().__init__(spans, None, way)
        self.places, self.length, self.earlier = places, length, earlier
        self.known: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer

    @torch.compiler.disable
    def attend(
        self,
        layer: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
    ) -> Tensor:
        assert layer is not None
        number, (batch, heads, _, dim) = cast(int, layer.layer_idx), key.shape
        if self.earlier is None:
            before = (key.new_zeros(1), value.new_zeros(1))
        else:
            before = self.earlier.known[number]
        places = self.places[:, None, :, None].expand_as(key)
        key, value = (
            old.expand(batch, heads, self.length, dim).scatter(2, places, new)
            for old, new in zip(before, (key, value), strict=True)
        )
        if self.earlier is None:
            self.known[number] = key, value
        return super().attend(layer, query, key, value, scale)


ROWS = 256  # queries of a part: fewer reach fewer keys in vain, and are more calls


def parts_of(spans: Tensor, rows: int = ROWS) -> list[Segment]:
    """Cut queries into parts of `rows`, each with the keys from the first to the last that any of
    them sees in any sequence of the batch; spans int32 ``[B, T, K, 2]`` on the CPU. Block-causal,
    blocks of 2, in parts of 3 queries::

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


def read_rows_only(backbone: PreTrainedModel) -> None:
    """Let the last layer, and the norm behind it, compute only what a `TrainingPlan` reads; under
    any other plan forwards stay as they are. In place; a second call changes nothing.

    Its keys and values come from all places; behind its attention only the places that the loss
    reads are of use, about a third of a step's. That saves a tenth of a step of four layers::

        hidden [R, L, C] -> norm, attention, sum -> index [1, N, C] -> norm, MLP, sum -> [1, N, C]
    """
    layer: Any = backbone.model.layers[-1]
    # Give it a class of its own, as FSDP does, with the layer's weights and names.
    layer.__class__ = _reading(layer.__class__)


@cache
def _reading(kind: Any) -> Any:
    """Return the class of a last layer, for layers of Llama's structure (Qwen2's and 3's too)."""
    if getattr(kind, "reads", False):
        return kind

    class Reading(kind):
        reads = True

        def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
            plan = given.get("spans")
            if not isinstance(plan, TrainingPlan) or plan.read is None:
                out: Tensor = super().forward(hidden_states, **given)
                return out
            normed = self.input_layernorm(hidden_states)
            attended, _ = self.self_attn(hidden_states=normed, **given)
            read = (hidden_states + attended).flatten(0, 1).index_select(0, plan.read)[None]
            return read + self.mlp(self.post_attention_layernorm(read))

    Reading.__name__ = kind.__name__  # by which FSDP finds the layers
    return Reading
