"""What `masked_kl` does between its matrix products, in one pass over a tile of logits each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _add_tile(logits, largest, total, cross, rows, columns, BLOCK: tl.constexpr):
    """One row: its student's and its teacher's running statistics over [2 * rows, columns]."""
    row = tl.program_id(0)
    other = rows + row
    # [2 * rows, columns]: a student's row, and its teacher's `rows` further down
    student = logits + row.to(tl.int64) * columns
    teacher = logits + other.to(tl.int64) * columns
    most_s, most_t = tl.load(largest + row), tl.load(largest + other)
    sum_s, sum_t, mixed = tl.load(total + row), tl.load(total + other), tl.load(cross + row)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        z_s = tl.load(student + column, mask=inside, other=-float("inf")).to(tl.float32)
        z_t = tl.load(teacher + column, mask=inside, other=-float("inf")).to(tl.float32)
        # As `Statistics.add`: relative to the largest so far, shrunk when a larger one comes.
        now_s, now_t = tl.maximum(most_s, tl.max(z_s)), tl.maximum(most_t, tl.max(z_t))
        shrink = tl.exp(most_t - now_t)
        share = tl.exp(z_t - now_t)
        sum_s = sum_s * tl.exp(most_s - now_s) + tl.sum(tl.exp(z_s - now_s))
        sum_t = sum_t * shrink + tl.sum(share)
        # Outside both are -inf, and their difference NaN.
        mixed = mixed * shrink + tl.sum(tl.where(inside, share * (z_t - z_s), 0.0))
        most_s, most_t = now_s, now_t
    tl.store(largest + row, most_s)
    tl.store(largest + other, most_t)
    tl.store(total + row, sum_s)
    tl.store(total + other, sum_t)
    tl.store(cross + row, mixed)


@triton.jit
def _difference(logits, log_sum, scale, out, rows, columns, BLOCK: tl.constexpr):
    """scale * (softmax(student) - softmax(teacher)) of one row's part of a tile."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    student = logits + row.to(tl.int64) * columns
    teacher = logits + (rows + row).to(tl.int64) * columns
    z_s = tl.load(student + column, mask=inside, other=0.0).to(tl.float32)
    z_t = tl.load(teacher + column, mask=inside, other=0.0).to(tl.float32)
    p_s = tl.exp(z_s - tl.load(log_sum + row))
    p_t = tl.exp(z_t - tl.load(log_sum + rows + row))
    value = (p_s - p_t) * tl.load(scale + row)
    place = out + row.to(tl.int64) * columns + column
    tl.store(place, value.to(out.dtype.element_ty), mask=inside)


def add_tile(logits: Tensor, largest: Tensor, total: Tensor, cross: Tensor) -> None:
    """Take a tile of logits ``[2N, columns]`` into the statistics (fp32, in place)."""
    logits = logits.contiguous()
    if len(cross):
        _add_tile[(len(cross),)](
            logits, largest, total, cross, len(cross), logits.shape[1], BLOCK=_BLOCK
        )


def difference(logits: Tensor, log_sum: Tensor, scale: Tensor) -> Tensor:
    """``scale * (softmax(student) - softmax(teacher))`` ``[N, columns]`` of a tile of logits
    ``[2N, columns]`` in its dtype; log_sum ``[2N]`` and scale ``[N]`` in fp32."""
    logits = logits.contiguous()
    rows, columns = len(scale), logits.shape[1]
    out = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    if rows:
        grid = (rows, triton.cdiv(columns, _BLOCK))
        _difference[grid](logits, log_sum, scale, out, rows, columns, BLOCK=_BLOCK)
    return out
