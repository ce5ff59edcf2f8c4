"""Compute span attention by PyTorch's flex_attention, for training on a GPU. In the benchmarks it
is the strongest general alternative to the decoding kernel."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

_SHAPES = 64  # that a process may compile


@cache
def _compiled() -> Any:
    # Beyond its limit of 8 shapes dynamo would silently run flex_attention uncompiled: slow, all
    # scores in memory. `fullgraph` makes the limit an error.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _SHAPES)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


class FlexSpans:
    """Attend over spans int32 ``[B, T, K, 2]`` of S keys, with one block mask for all calls.

    A call takes q ``[B, H, T, D]`` and k, v ``[B, H_kv, S, D]`` and returns ``[B, H, T, D]``. It
    has no backward on a CPU, and compiles anew for each shape.
    """

    def __init__(self, spans: Tensor, keys: int):
        batch, rows, ranges = spans.shape[:3]

        def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            inside = (key >= spans[b, row, 0, 0]) & (key < spans[b, row, 0, 1])
            for i in range(1, ranges):  # unrolled when it is traced
                inside = inside | ((key >= spans[b, row, i, 0]) & (key < spans[b, row, i, 1]))
            return inside

        self.mask = create_block_mask(sees, batch, None, rows, keys, device=spans.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        # Within a layer that is being compiled it becomes part of that graph.
        attend = flex_attention if torch.compiler.is_compiling() else _compiled()
        # Below 128 rows PyTorch would take its kernel for decoding, which has no tile for fp32
        # (seen on an H100 with torch 2.11).
        out: Tensor = attend(
            q, k, v, block_mask=self.mask, scale=scale, enable_gqa=grouped,
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )  # fmt: skip
        return out
