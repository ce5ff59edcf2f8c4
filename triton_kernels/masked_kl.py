"""Weighted KL of two sets of hidden states through one frozen output head, a tile of the vocabulary
at a time: the loss of D2F's distillation (arXiv 2508.09192, equation 3) without ``[N, V]``.

    L = sum_n weight[n] * sum_v t[n, v] * (log t[n, v] - log s[n, v]),
    s = softmax(student_hidden @ head.T), t = softmax(teacher_hidden @ head.T)

With z the logits, a running maximum m and running sums over the tiles seen, one pass suffices:

    KL = (sum_v e^(z_t - m_t) * (z_t - z_s)) / (sum_v e^(z_t - m_t)) - lse(z_t) + lse(z_s)

Backward computes each tile's logits again and multiplies ``weight * (s - t)`` with its part of the
head. Where a tile can hold the whole vocabulary for enough rows, the rows are taken a part at a
time instead, and a part's gradient is computed while its logits are there: three products of the
logits' size, not five. Two equal inputs give 0, and a gradient of 0, exactly.

The matrix products are the library's on every device; on a GPU a kernel does everything between
them in one pass over a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from triton_kernels.dispatch import (
    check_alike,
    compare,
    jit,
    random_inputs,
    self_check,
    tl,
    triton,
    use_kernel,
)

TILE_BYTES = 768 << 20  # of one tile's fp32 logits on an accelerator, at most
_TILE_SHARE = 32  # of its memory: one part in so many
CPU_TILE_BYTES = 16 << 20  # results computed from it are held beside it
_LEAST_COLUMNS = 128
# With fewer rows at a time, reading the head for each part would take the time.
_LEAST_ROWS = 512
_CPU_LEAST_ROWS = 32
_BLOCK = 1024  # columns of a kernel's step


def masked_linear_kl(
    student_hidden: Tensor,
    teacher_hidden: Tensor,
    head: Tensor,
    weight: Tensor,
    *,
    columns: int | None = None,
    kernel: bool | None = None,
) -> Tensor:
    """Sum weight x KL(teacher || student) over the rows; a scalar of at least fp32.

    student_hidden, teacher_hidden: ``[N, C]``, N may be 0. head: ``[V, C]``, frozen. weight:
    ``[N]``. columns: tokens of the vocabulary in a tile; by default `tile_shape` decides.
    kernel: compute between the matrix products by Triton, as in `use_kernel`. Only student_hidden
    gets a gradient. Raises ValueError for shapes, devices or dtypes that do not fit, and for a head
    that wants a gradient.
    """
    _check(student_hidden, teacher_hidden, head, weight, columns)
    rows = len(weight)
    if columns is None:
        rows, columns = tile_shape(rows, len(head), head.device)
    # Autocast is applied once, here; within the function it is off, so that forward and backward
    # compute in the same dtype.
    kind = student_hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        student_hidden, teacher_hidden = student_hidden.to(dtype), teacher_hidden.to(dtype)
    return _MaskedLinearKL.apply(
        student_hidden,
        teacher_hidden.detach(),
        head,
        weight,
        rows,
        columns,
        (kernel or student_hidden.is_cuda) and use_kernel("masked_kl", student_hidden, kernel),
    )


def masked_linear_kl_reference(
    student_hidden: Tensor, teacher_hidden: Tensor, head: Tensor, weight: Tensor
) -> Tensor:
    """Compute `masked_linear_kl` with all logits at once, in plain PyTorch."""
    student, teacher = (
        _wide(F.linear(hidden, head)).log_softmax(-1)
        for hidden in (student_hidden, teacher_hidden.detach())
    )
    return (F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1) * weight).sum()


def tile_shape(rows: int, vocabulary: int, device: torch.device) -> tuple[int, int]:
    """Choose a tile's rows and tokens of the vocabulary. Its fp32 logits of student and teacher
    stay within `tile_bytes`. It has the whole vocabulary wherever that fits for enough rows,
    because that takes 6 N C V operations (C the width of a hidden state), a part of it 10."""
    cpu = device.type == "cpu"
    logits = tile_bytes(device) // 4 // 2  # of student and teacher each
    part = logits // vocabulary
    if part >= min(rows, _CPU_LEAST_ROWS if cpu else _LEAST_ROWS):
        return max(1, min(rows, part)), vocabulary
    return rows, min(vocabulary, max(_LEAST_COLUMNS, logits // max(1, rows)))


def tile_bytes(device: torch.device) -> int:
    """Return the bytes of one tile's fp32 logits: a part of a GPU's memory, 768 MiB from 24 GiB on.
    Not of its free memory: a run sums in the same order whatever else is on the GPU."""
    if device.type == "cpu":
        return CPU_TILE_BYTES
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return min(TILE_BYTES, total // _TILE_SHARE)
    return TILE_BYTES


class _MaskedLinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        head: Tensor,
        weight: Tensor,
        rows: int,
        columns: int,
        kernel: bool,
    ) -> Tensor:
        ctx.columns, ctx.kernel, ctx.dtype = columns, kernel, student.dtype
        with torch.autocast(student.device.type, enabled=False):
            # All rows against a tile of the vocabulary at a time: its logits are gone before the
            # sums over all tiles are complete, so backward computes them again.
            if len(head) > columns:
                hidden = torch.cat((student, teacher))  # [2N, C]
                totals = Statistics.empty(hidden)
                for part in _tiles(head, columns):
                    totals.add(F.linear(hidden, part.to(hidden.dtype)), kernel)
                ctx.save_for_backward(weight, hidden, head, totals.log_sum())
                return (totals.divergence() * weight).sum()
            # A part of the rows against the whole vocabulary: its sums are complete at once, and so
            # is its gradient [rows, C], which backward only has to scale.
            head = head.to(student.dtype)
            loss = _wide(weight).new_zeros(())
            slopes = [_wide(student[:0])] if ctx.needs_input_grad[0] else []
            for s, t, w in zip(*(x.split(rows) for x in (student, teacher, weight)), strict=True):
                logits = F.linear(torch.cat((s, t)), head)  # [2 rows, V]
                totals = Statistics.empty(logits)
                shares = totals.add(logits, kernel)
                loss = loss + (totals.divergence() * w).sum()
                if not slopes:
                    continue
                # Without the weight, which fp16 may not hold.
                if shares is None:
                    ones = torch.ones_like(_wide(w))
                    slope = difference(logits, totals.log_sum(), ones, kernel)
                else:
                    learnt, taught = shares.div_(totals.total[:, None]).chunk(2)
                    slope = learnt.sub_(taught).to(logits.dtype)
                slopes.append(_wide(slope @ head))
            ctx.save_for_backward(weight, torch.cat(slopes) if slopes else None)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        rest = (None,) * 6
        scale = _wide(weight) * grads[0]  # [N]
        with torch.autocast(weight.device.type, enabled=False):
            if len(saved) == 1:
                return (saved[0] * scale[:, None]).to(ctx.dtype), *rest
            hidden, head, log_sum = saved
            gradient = torch.zeros_like(_wide(hidden[: len(weight)]))  # [N, C]
            for part in _tiles(head, ctx.columns):
                part = part.to(hidden.dtype)  # a tile at a time: no second head in memory
                logits = F.linear(hidden, part)
                _add_product(gradient, difference(logits, log_sum, scale, ctx.kernel), part)
            return gradient.to(hidden.dtype), *rest


def _tiles(head: Tensor, columns: int) -> Iterator[Tensor]:
    for first in range(0, len(head), columns):
        yield head[first : first + columns]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute ``total += a @ b`` in total's fp32 or fp64. Rounding each tile's product to a's dtype
    before adding it would bias the gradient over many tiles."""
    if a.is_cuda and a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@dataclass
class Statistics:
    """Sum up the tiles seen so far, in at least fp32. The first N rows are the student's, the
    next N the teacher's.

    largest: ``[2N]``, the running maximum of each row's logits. total: ``[2N]``, the sum of
    e^(z - largest). cross: ``[N]``, the sum of e^(z_t - largest) * (z_t - z_s) of each teacher row.
    """

    largest: Tensor
    total: Tensor
    cross: Tensor

    @staticmethod
    def empty(hidden: Tensor) -> Statistics:
        zeros = torch.zeros_like(_wide(hidden[:, 0]))
        return Statistics(zeros - torch.inf, zeros, zeros[len(zeros) // 2 :].clone())

    def add(self, logits: Tensor, kernel: bool) -> Tensor | None:
        """Add a tile of logits ``[2N, columns]``, which may be overwritten. Returns e^(z - largest)
        of the tile, or None with the kernel."""
        if kernel:
            add_tile(logits, self.largest, self.total, self.cross)
            return None
        logits, before = _wide(logits), self.largest  # [2N, columns], [2N]
        # The streaming softmax: sums are kept relative to the largest logit so far, and shrunk when
        # a larger one comes. Before the first tile it is -inf, and shrink 0.
        self.largest = torch.maximum(before, logits.amax(-1))
        shrink = (before - self.largest).exp()
        student, teacher = logits.chunk(2)
        n, gap = len(teacher), teacher - student
        # In place: on a CPU a new tensor of this size costs more than the computation.
        shares = logits.sub_(self.largest[:, None]).exp_()
        self.total = self.total * shrink + shares.sum(-1)
        self.cross = self.cross * shrink[n:] + gap.mul_(shares[n:]).sum(-1)
        return shares

    def log_sum(self) -> Tensor:
        """Return the logarithm of the sum of e^z, ``[2N]``."""
        return self.largest + self.total.log()

    def divergence(self) -> Tensor:
        """Return KL(teacher || student) of each row, ``[N]``."""
        student, teacher = self.log_sum().chunk(2)  # [N] each
        return self.cross / self.total.chunk(2)[1] - teacher + student


def difference(logits: Tensor, log_sum: Tensor, scale: Tensor, kernel: bool) -> Tensor:
    """Compute ``scale * (softmax(student) - softmax(teacher))`` ``[N, columns]``.

    logits: a tile ``[2N, columns]``, which may be overwritten; the result has its dtype. log_sum
    ``[2N]`` and scale ``[N]`` in at least fp32.
    """
    if kernel:
        logits = logits.contiguous()
        rows, columns = len(scale), logits.shape[1]
        out = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
        if rows:
            grid = (rows, triton.cdiv(columns, _BLOCK))
            _difference[grid](logits, log_sum, scale, out, rows, columns, BLOCK=_BLOCK)
        return out
    student, teacher = _wide(logits).sub_(log_sum[:, None]).exp_().chunk(2)
    return student.sub_(teacher).mul_(scale[:, None]).to(logits.dtype)


@jit
def _add_tile(logits, largest, total, cross, rows, columns, BLOCK: tl.constexpr):
    """Update the running statistics of one row's student and teacher over [2 * rows, columns]."""
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
        # Sums are relative to the largest so far, shrunk when a larger one comes: `Statistics.add`.
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


@jit
def _difference(logits, log_sum, scale, out, rows, columns, BLOCK: tl.constexpr):
    """Store scale * (softmax(student) - softmax(teacher)) of one row's part of a tile."""
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
    """Add a tile of logits ``[2N, columns]`` to the statistics (fp32, in place)."""
    logits = logits.contiguous()
    if len(cross):
        _add_tile[(len(cross),)](
            logits, largest, total, cross, len(cross), logits.shape[1], BLOCK=_BLOCK
        )


def _check(
    student: Tensor, teacher: Tensor, head: Tensor, weight: Tensor, columns: int | None
) -> None:
    if student.dim() != 2 or student.shape != teacher.shape:
        raise ValueError(
            "student_hidden and teacher_hidden must both be [N, C], "
            f"got {list(student.shape)} and {list(teacher.shape)}"
        )
    if head.dim() != 2 or head.shape[1] != student.shape[1] or not len(head):
        raise ValueError(f"head must be [V, {student.shape[1]}], got {list(head.shape)}")
    if weight.shape != student.shape[:1]:
        raise ValueError(f"weight must be [{len(student)}], got {list(weight.shape)}")
    check_alike("hidden states and head", (student, teacher, head), (weight,))
    if head.requires_grad and torch.is_grad_enabled():
        raise ValueError("head must be frozen: no gradient is computed for it")
    if columns is not None and columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")


@self_check("masked_kl")
def _check_masked_kl(dtype: torch.dtype, device: torch.device, dim: int) -> None:
    """Compare the loss and its gradient, over several tiles."""
    inputs = random_inputs(((9, 64), (9, 64), (700, 64)), dtype, device)

    def compute(given: Sequence[Tensor], kernel: bool) -> list[Tensor]:
        student, teacher, head = given
        student = student.detach().requires_grad_()
        weight = torch.linspace(0, 1, 9, device=device)
        loss = masked_linear_kl(student, teacher, head, weight, columns=256, kernel=kernel)
        return [loss.detach()[None], *torch.autograd.grad(loss, [student])]

    compare("the masked KL", inputs, compute)
