"""Losses on the rows that predict masked tokens; every row carries its weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _WeightedKL(torch.autograd.Function):
    """Its gradient is written out, so that it is exactly 0 where student and teacher coincide."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)  # [N, V]
        target = log_t.exp()
        ctx.save_for_backward((log_s.exp() - target) * weight[:, None])
        return ((target * (log_t - log_s)).sum(-1) * weight).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None


def weighted_kl(student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """Sum over rows of weight x KL(teacher || student), from logits ``[N, V]`` and weight ``[N]``;
    gradient for the student only (D2F, equation 3, with the official code's direction)."""
    return _WeightedKL.apply(_wide(student), _wide(teacher), weight)


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Sum over rows of weight x cross-entropy of logits ``[N, V]`` with target ids ``[N]``."""
    return (F.cross_entropy(_wide(logits), targets, reduction="none") * weight).sum()


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of each row of logits ``[N, V]``: what KL lacks to the official code's soft
    cross-entropy."""
    log_p = _wide(logits).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def _wide(logits: Tensor) -> Tensor:
    """At least fp32."""
    return logits if logits.dtype == torch.float64 else logits.float()
