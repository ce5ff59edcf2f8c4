"""What WINO's shadow predicts, by dense masks alone: the truth for `decode.decoders.shadow`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d2f.model import DiffusionModel
from decode.engine.batch import Sampler
from tests.references import d2f
from tests.references.d2f import DensePlan


def dense_logits(
    model: DiffusionModel, tokens: list[int], positions: list[int], allowed: Tensor
) -> Tensor:
    """Logits ``[L, V]`` of tokens at positions under a boolean mask ``[L, L]``."""
    with torch.inference_mode():
        return model.forward(
            torch.tensor([tokens]), DensePlan(allowed), positions=torch.tensor([positions])
        )[0]


def shadow_logits(
    model: DiffusionModel,
    x: list[int],
    allowed: Tensor,
    block: range,
    verified: Sequence[int],
) -> Tensor:
    """Logits ``[V, vocabulary]`` that predict the verified positions of a block of x without their
    tokens. allowed: ``[L, L]``, what each position of x sees."""
    rows = [_pair(model, x, allowed, p) for p in verified] if model.logit_shift else []
    if not model.logit_shift and verified:
        rows = list(_masks(model, x, allowed, block)[[p - block.start for p in verified]])
    return torch.stack(rows) if rows else torch.zeros(0, model.vocab_size)


def _masks(model: DiffusionModel, x: list[int], allowed: Tensor, block: range) -> Tensor:
    """Logits of the shadow of a whole block, one forward of the sequence and the shadow."""
    assert model.mask_id is not None
    length, total = len(x), len(x) + len(block)
    mask = torch.zeros(total, total, dtype=torch.bool)
    mask[:length, :length] = allowed
    for i, p in enumerate(block):
        mask[length + i, :length] = allowed[p]
        mask[length + i, p] = False
        for j, q in enumerate(block):
            mask[length + i, length + j] = allowed[p, q]
    tokens = x + [model.mask_id] * len(block)
    return dense_logits(model, tokens, [*range(length), *block], mask)[length:]


def _pair(model: DiffusionModel, x: list[int], allowed: Tensor, p: int) -> Tensor:
    """Logits of one position of a shifted family, a forward with nothing but its own pair added."""
    assert model.mask_id is not None
    length = len(x)
    mask = torch.zeros(length + 2, length + 2, dtype=torch.bool)
    mask[:length, :length] = allowed
    for row, position in ((length, p - 1), (length + 1, p)):
        mask[row, :length] = allowed[position]
        mask[row, [p - 1, p]] = False
        mask[row, length] = allowed[position, p - 1]
        mask[row, length + 1] = allowed[position, p]
    tokens = [*x, x[p - 1], model.mask_id]
    return dense_logits(model, tokens, [*range(length), p - 1, p], mask)[length]


def predict_rows(
    logits: Tensor,
    shadows: Tensor,
    tokens: list[int],
    sampler: Sampler,
    pick: str = "confidence",
) -> tuple[list[tuple[int, float, float]], list[float]]:
    """What `tests.references.d2f.predict_rows` says of each wanted row, and the probability of each
    verified token in its shadow."""
    found = d2f.predict_rows(torch.cat([logits, shadows]), sampler, pick)
    probability = shadows.float().softmax(-1)[range(len(tokens)), tokens]
    return found[: len(logits)], probability.tolist()
