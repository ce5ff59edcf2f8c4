"""Mask noise: which ratio each response token is masked with, and the draw itself.

Every draw takes a numpy Generator made by `sample_rng` from seed, sample index and stream, so that
neither the number of processes nor a resume changes it. Ratios are float64 ``[response]``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ratios = NDArray[np.float64]
GOLDEN = (5**0.5 - 1) / 2  # steps of it fill [0, 1) evenly


# What a sample draws; each has a stream of its own, so that none shifts another.
CONTENT, TAIL, ORDER, RATIOS, MASK, CAUSAL, BLOCKS, HELD_OUT = range(8)


def sample_rng(seed: int, index: int, stream: int = CONTENT) -> np.random.Generator:
    """The generator of one of a sample's draws."""
    return np.random.default_rng([seed, stream, index])  # hashed together: all differ


def even_draw(seed: int, index: int) -> float:
    """A number in [0, 1) that consecutive sample indexes spread evenly (low discrepancy)."""
    return float((np.random.default_rng(seed).random() + index * GOLDEN) % 1.0)


def monotone_ratios(
    length: int, block_size: int, low: float, high: float, rng: np.random.Generator
) -> Ratios:
    """D2F's noise: one ratio a block, non-decreasing from left to right, all in [low, high].

    p_1 = low + (high - low) u, p_b = p_(b-1) + u_b (high - p_1) / (N - 1), as the official code
    draws it (D2F, section 3; the paper's bounds are 0.3 and 0.7, the code's 0.2 and 0.7). With
    blocks of 2 and a last one of 1, in [0.3, 0.7]: .31 .31 .42 .42 .66.
    """
    check_bounds(low, high)
    blocks = -(-length // block_size)
    ratios = np.empty(blocks)
    ratios[:1] = low + (high - low) * rng.random()
    if blocks > 1:
        steps = rng.random(blocks - 1) * (high - ratios[0]) / (blocks - 1)
        ratios[1:] = ratios[0] + np.cumsum(steps)
    # Their sum may pass `high` by a rounding error. A short last block takes its part.
    return np.repeat(np.minimum(ratios, high), block_size)[:length]


def random_ratios(
    length: int, block_size: int, low: float, high: float, rng: np.random.Generator
) -> Ratios:
    """The ablation of D2F's noise: each block's ratio drawn uniformly in [low, high], in no order
    (D2F, section 4)."""
    check_bounds(low, high)
    ratios = rng.uniform(low, high, -(-length // block_size))
    return np.repeat(ratios, block_size)[:length]


def uniform_ratios(length: int, ratio: float) -> Ratios:
    """LLaDA's noise: every token of the response is masked with the same ratio."""
    return np.full(length, ratio)


def decoding_ratios(length: int, start: int, end: int, ratio: float) -> Ratios:
    """A state of block-wise decoding: what is left of ``[start, end)`` revealed (0), the block
    masked with `ratio`, all on its right masked (1): of 6, ``[2, 4)``, 0.5: 0 0 .5 .5 1 1."""
    position = np.arange(length)
    return np.where(position < start, 0.0, np.where(position < end, ratio, 1.0))


def pipeline_ratios(
    length: int,
    block_size: int,
    low: float,
    high: float,
    rng: np.random.Generator,
    most_active: int | None = None,
) -> Ratios:
    """The states of pipelined decoding, which the published training never visits: blocks on the
    left revealed, then monotone ratios in [low, high] over a few blocks, at most most_active, then
    freshly appended blocks (1). With blocks of 2, say 0 0 .4 .4 .6 .6 1 1."""
    check_bounds(low, high)
    blocks = -(-length // block_size)
    # Blocks [0, first) are done, [first, first + active) in work, the others just appended.
    first = int(rng.integers(blocks))
    active = int(rng.integers(1, min(blocks - first, most_active or blocks) + 1))
    ratios = np.ones(blocks)
    ratios[:first] = 0.0
    ratios[first : first + active] = np.sort(rng.uniform(low, high, active))
    return np.repeat(ratios, block_size)[:length]


def clean_prefix_ratios(
    length: int, block_size: int, low: float, rng: np.random.Generator
) -> tuple[Ratios, int]:
    """A state of block diffusion's training (BD3-LM, arXiv 2503.09573, section 3): one block, each
    as often, is the current one, with a ratio drawn uniformly in [low, 1]; all before it is clean,
    all after it masked. (ratios, where the current block ends); a response of 6 in blocks of 2,
    the second of which is drawn, with 0.5::

        position    0 1 | 2 3 | 4 5
        ratio       0 0 | .5 .5 | 1 1      the current block ends at 4
    """
    check_bounds(low, 1.0)
    start = block_size * int(rng.integers(-(-length // block_size)))
    end = min(start + block_size, length)
    return decoding_ratios(length, start, end, float(rng.uniform(low, 1.0))), end


def draw_mask(ratios: Ratios, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Each token masked on its own with its ratio, ``[response]``."""
    return rng.random(len(ratios)) < ratios


def context_weights(masked: NDArray[np.bool_], prompt: int, p: float) -> NDArray[np.float64]:
    """Dream's weight of each masked token by what is revealed around it (context-adaptive noise
    rescheduling, CART, arXiv 2508.15487, section 3), 0 for revealed ones, ``[response]``:

        1/2 x sum over revealed tokens at distance d of p (1 - p)^(d - 1)

    masked: ``[response]``. prompt: number of tokens before the response, all revealed. p: in
    (0, 1]; 0.1 in Dream's code, which sums so over prompt and response.
    """
    sums = np.zeros(len(masked))
    for places, before in ((range(len(masked)), prompt), (reversed(range(len(masked))), 0)):
        seen = 1.0 - (1.0 - p) ** before  # the same sum over `before` tokens
        for place in places:
            sums[place] += seen
            seen = (1.0 - p) * seen + p * (not masked[place])
    return np.where(masked, sums / 2, 0.0)


def draw_counts(
    maskable: NDArray[np.bool_], block_size: int, ratios: Ratios, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """WeDLM's noise (section 3): of the maskable tokens of each block exactly
    round(ratio x their number), drawn uniformly, ``[length]``.

    maskable: ``[length]``. ratios: one a block, blocks counted from position 0.
    """
    masked = np.zeros(len(maskable), dtype=bool)
    for block, ratio in enumerate(ratios):
        start = block * block_size
        places = start + np.flatnonzero(maskable[start : start + block_size])
        masked[rng.permutation(places)[: round(ratio * len(places))]] = True
    return masked


def observed_first(masked: NDArray[np.bool_], block_size: int) -> NDArray[np.int64]:
    """WeDLM's order of a sequence (section 3): in each block of `block_size` the observed
    positions, then the masked ones, each ascending. Positions in that order, int64 ``[length]``::

        masked     0 1 0 | 1 0 0      blocks of 3
        order      0 2 1 | 4 5 3
    """
    # Sorted by block, then observed before masked; equal ones stay in order.
    return np.lexsort((masked, np.arange(len(masked)) // block_size))


def check_bounds(low: float, high: float) -> None:
    """Raise ValueError unless 0 <= low <= high <= 1."""
    if not 0.0 <= low <= high <= 1.0:
        raise ValueError(f"noise bounds must satisfy 0 <= low <= high <= 1, got [{low}, {high}]")
