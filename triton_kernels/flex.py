"""Span attention by PyTorch's flex_attention, the strongest general alternative to the kernel."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


class FlexSpans:
    """Attention over spans int32 ``[B, T, K, 2]`` of S keys; its block mask is made once.

    Called with q ``[B, H, T, D]`` and k, v ``[B, H_kv, S, D]`` it gives ``[B, H, T, D]``. It has no
    backward on a CPU, and compiles anew for each shape.
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
        out: Tensor = _compiled()(q, k, v, block_mask=self.mask, scale=scale, enable_gqa=grouped)
        return out
