"""Left-to-right likelihoods, plainly: one forward a token under a dense mask."""

from __future__ import annotations

import torch

from d2f.model import DiffusionModel
from tests.references.predictions import dense_logits, seen_blocks


def likelihoods(
    model: DiffusionModel, ids: list[int], given: int, size: int | None, absolute: bool
) -> list[tuple[int, float, int]]:
    """(position, log-probability, likeliest token) of each token after the first `given`. size: of
    the model's blocks, None where it is causal; absolute: whether they begin at 0, or at given."""
    found = []
    for p in range(given, len(ids)):
        shift = model.contract.logit_shift if size else 1
        if p < shift:
            continue  # no row predicts it
        x, block = ids[:p], list(range(p))
        if size:
            first = 0 if absolute else given
            start = first + (p - first) // size * size
            x = x + [model.mask_id] * (start + size - p)
            block = [max(-1, (i - first) // size) for i in range(len(x))]
        logits = dense_logits(model, x, seen_blocks(block))[p - shift]
        logprob = float(logits.float().log_softmax(-1)[ids[p]])
        if model.mask_id is not None:
            logits = logits.index_fill(0, torch.tensor([model.mask_id]), -torch.inf)
        found.append((p, logprob, int(logits.argmax())))
    return found
