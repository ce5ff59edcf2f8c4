"""What WINO's shadow predicts, by dense masks alone: the truth for `decode.decoders.shadow`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d2f.model import DiffusionModel
from decode.engine.batch import Sampler
from tests.references import d2f
from tests.references.predictions import DensePlan, dense_logits


def shadow_logits(
    model: DiffusionModel,
    x: list[int],
    allowed: Tensor,
    block: range,
    verified: Sequence[int],
) -> Tensor:
    """Logits ``[V, vocabulary]`` that predict the verified positions of a block of x without their
    tokens. allowed: ``[L, L]``, what each position of x sees."""
    if not verified:
        return torch.zeros(0, model.vocab_size)
    if model.logit_shift:
        return _pairs(model, x, allowed, verified)
    return _masks(model, x, allowed, block)[[p - block.start for p in verified]]


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
    return dense_logits(model, tokens, mask, [*range(length), *block])[length:]


def _pairs(model: DiffusionModel, x: list[int], allowed: Tensor, verified: Sequence[int]) -> Tensor:
    """Logits of positions of a shifted family, each of a sequence of its own with nothing but its
    own pair added."""
    assert model.mask_id is not None
    length, count = len(x), len(verified)
    mask = torch.zeros(count, length + 2, length + 2, dtype=torch.bool)
    mask[:, :length, :length] = allowed
    for own, p in zip(mask, verified, strict=True):
        for row, position in ((length, p - 1), (length + 1, p)):
            own[row, :length] = allowed[position]
            own[row, [p - 1, p]] = False
            own[row, length] = allowed[position, p - 1]
            own[row, length + 1] = allowed[position, p]
    tokens = torch.tensor([[*x, x[p - 1], model.mask_id] for p in verified])
    positions = torch.tensor([[*range(length), p - 1, p] for p in verified])
    with torch.inference_mode():
        return model.forward(tokens, DensePlan(mask), positions=positions)[:, length]


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
