"""How a training step attends: in plain PyTorch a part of the queries at a time, each over only the
keys that its spans reach."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from d2f.attention import Segment, SpanPlan, Way

ROWS = 256  # queries of a part: fewer reach fewer keys in vain, and are more calls


class TrainingPlan(SpanPlan):
    """A `SpanPlan` of a packed step. Compiled layers (`distill.run.compiled_layers`) leave it out
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
