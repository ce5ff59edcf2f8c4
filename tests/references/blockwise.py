"""The plain reference of blockwise decoding: static, threshold, factor and entropy-bounded, with
Fast-dLLM's approximate caches.

One request, every mask a dense boolean matrix. A cached forward is written as what it means: the
keys and values that a whole forward computed at the block's start are kept for some positions, all
other rows are fed and see both. Written to be read, not to be fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from d2f.model import DiffusionModel
from decode import EntropyBounded, Factor, Static, Threshold
from decode.decoders.blockwise import Blockwise
from decode.engine.batch import Sampler
from decode.step import Revealed
from tests.references.predictions import DensePlan, allowed_pairs, scored


@dataclass(frozen=True)
class Guess:
    """The prediction of one masked position of the current block."""

    position: int
    token: int
    confidence: float
    entropy: float
    margin: float


@torch.inference_mode()
def whole_forward(
    model: DiffusionModel, x: list[int], allowed: Tensor
) -> tuple[Tensor, DynamicCache]:
    """Logits ``[L, V]`` of the whole sequence and the keys and values of all its positions."""
    kept: Any = DynamicCache()
    hidden = model.backbone.model(
        input_ids=torch.tensor([x]),
        position_ids=torch.arange(len(x))[None],
        spans=DensePlan(allowed),
        past_key_values=kept,
        use_cache=True,
    ).last_hidden_state[0]
    return model.head(hidden), kept


@torch.inference_mode()
def cached_forward(
    model: DiffusionModel, x: list[int], allowed: Tensor, kept: DynamicCache, fed: range
) -> Tensor:
    """Logits ``[L, V]`` of a forward that feeds the positions `fed` and keeps the keys and values
    of all others; rows that it did not compute are NaN.

    The row before fed is computed too, because in a shifted family it predicts fed's first
    position. It sees what it always sees, with the keys and values that were kept, its own among
    them, and no row sees the ones that it computes now.
    """
    old = [p for p in range(len(x)) if p not in fed]
    again = [fed.start - 1] if fed.start else []
    rows = again + list(fed)
    sees = allowed[rows][:, old + rows].clone()  # [rows, keys]
    sees[:, len(old) : len(old) + len(again)] = False
    mixed: Any = DynamicCache()
    for layer, part in enumerate(kept.layers):
        mixed.update(part.keys[:, :, old], part.values[:, :, old], layer)
    hidden = model.backbone.model(
        input_ids=torch.tensor([[x[p] for p in rows]]),
        position_ids=torch.tensor([rows]),
        spans=DensePlan(sees),
        past_key_values=mixed,
        use_cache=True,
    ).last_hidden_state[0]
    logits = torch.full((len(x), model.vocab_size), torch.nan, dtype=hidden.dtype)
    logits[rows] = model.head(hidden)
    return logits


def decode_blockwise(
    model: DiffusionModel, prompt: list[int], options: Blockwise
) -> list[list[Revealed]]:
    """What each forward reveals, until all is decoded or early exit stops."""
    contract, start, total = model.contract, len(prompt), options.length
    assert contract.mask_id is not None
    length, size = start + total, options.block_size or total
    x = prompt + [contract.mask_id] * total
    allowed = allowed_pairs(contract, start, length)
    sampler = Sampler(options, contract.mask_id)
    choose = RULES[type(options)]
    forwards: list[list[Revealed]] = []
    masked = set(range(start, length))

    def ended() -> bool:
        settled = x[start : min(masked, default=length)]
        return options.early_exit and any(token in contract.end_ids for token in settled)

    for low in range(start, length, size):
        high = min(low + size, length)
        kept: DynamicCache | None = None
        step = 0
        while masked & set(range(low, high)) and not ended():
            if options.cache == "none" or kept is None:
                logits, kept = whole_forward(model, x, allowed)
            else:
                fed = range(low, length if options.cache == "prefix" else high)
                logits = cached_forward(model, x, allowed, kept, fed)
            wanted = sorted(masked & set(range(low, high)))
            guesses = _guesses(logits, wanted, contract.logit_shift, sampler)
            chosen = choose(guesses, options, step, high - low)
            for guess in chosen:
                x[guess.position] = guess.token
                masked.remove(guess.position)
            forwards.append([Revealed(g.position - start, g.token, g.confidence) for g in chosen])
            step += 1
    return forwards


def _guesses(logits: Tensor, wanted: list[int], shift: int, sampler: Sampler) -> list[Guess]:
    found = scored(logits[[p - shift for p in wanted]], sampler)
    assert found.entropy is not None and found.margin is not None
    columns = (found.token, found.confidence, found.entropy, found.margin)
    return [Guess(*values) for values in zip(wanted, *(c.tolist() for c in columns), strict=True)]


def _surest_first(guesses: list[Guess]) -> list[Guess]:
    return sorted(guesses, key=lambda g: -g.confidence)  # stable: the first of equals first


def _static(guesses: list[Guess], options: Static, step: int, size: int) -> list[Guess]:
    blocks = -(-options.length // (options.block_size or options.length))
    steps = options.steps // blocks if options.steps else size
    count = size // steps + (step < size % steps)
    return _surest_first(guesses)[:count]


def _threshold(guesses: list[Guess], options: Threshold, step: int, size: int) -> list[Guess]:
    first, *others = _surest_first(guesses)
    return [first] + [g for g in others if g.confidence >= options.tau]


def _factor(guesses: list[Guess], options: Factor, step: int, size: int) -> list[Guess]:
    ranked = _surest_first(guesses)
    chosen = ranked[:1]
    for n, guess in enumerate(ranked[1:], 2):
        if guess.confidence < 1 - options.factor / (n + 1):
            break
        chosen.append(guess)
    return chosen


def _entropy(guesses: list[Guess], options: EntropyBounded, step: int, size: int) -> list[Guess]:
    error: Callable[[Guess], float] = {
        "entropy": lambda g: g.entropy,
        "confidence": lambda g: -g.confidence,
        "margin": lambda g: -g.margin,
    }[options.proxy]
    chosen: list[Guess] = []
    for guess in sorted(guesses, key=error):
        entropies = [max(g.entropy, 0.0) for g in [*chosen, guess]]
        *_, total = accumulate(entropies)  # one after the other: `sum` compensates from 3.12 on
        if total - max(entropies) > options.gamma:
            break
        chosen.append(guess)
    return chosen


RULES: dict[type[Blockwise], Callable[[list[Guess], Any, int, int], list[Guess]]] = {
    Static: _static,
    Threshold: _threshold,
    Factor: _factor,
    EntropyBounded: _entropy,
}
