"""Losses on logits, of which only a part of the rows is there at a time: each part's logits are
made again for its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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
