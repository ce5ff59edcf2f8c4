"""Losses on the rows that predict masked tokens; every row carries its weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """Sum over rows of weight x cross-entropy of logits ``[N, V]`` with target ids ``[N]``."""
    return (F.cross_entropy(_wide(logits), targets, reduction="none") * weight).sum()


def _wide(logits: Tensor) -> Tensor:
    """At least fp32."""
    return logits if logits.dtype == torch.float64 else logits.float()
