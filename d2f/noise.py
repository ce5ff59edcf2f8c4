"""Draw mask noise: the ratio that each response token is masked with, and the masks.

Every draw takes a numpy Generator made by `sample_rng` from seed, sample index and stream, so that
neither the number of processes nor a resume changes it. Ratios are float64 ``[response]``. Training
can also draw recorded states of D2F's pipeline (`PipelineStates`).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Len
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, TypeAdapter, ValidationError

from d2f.checkpoint import read_object
from d2f.config import explain
from d2f.errors import InputError
from d2f.files import write_beside

Ratios = NDArray[np.float64]
State = tuple[float, ...]
_Ratio = Annotated[float, Field(ge=0, le=1)]
GOLDEN = (5**0.5 - 1) / 2  # steps of it fill [0, 1) evenly

# A sample's draws; each has a stream of its own, so that none shifts another.
CONTENT, TAIL, ORDER, RATIOS, MASK, CAUSAL, BLOCKS, HELD_OUT = range(8)


def sample_rng(seed: int, index: int, stream: int = CONTENT) -> np.random.Generator:
    """Make the generator of one of a sample's draws."""
    return np.random.default_rng([seed, stream, index])  # hashed together: all differ


def even_draw(seed: int, index: int) -> float:
    """Return a number in [0, 1) that consecutive sample indexes spread evenly (low discrepancy)."""
    return float((np.random.default_rng(seed).random() + index * GOLDEN) % 1.0)


def monotone_ratios(
    length: int, block_size: int, low: float, high: float, rng: np.random.Generator
) -> Ratios:
    """Draw D2F's noise: one ratio a block, non-decreasing from left to right, all in [low, high].

    p_1 = low + (high - low) u, p_b = p_(b-1) + u_b (high - p_1) / (N - 1), as the official code
    draws it (D2F, section 3; the paper's bounds are 0.3 and 0.7, the code's 0.2 and 0.7). With
    blocks of 2 and a last one of 1, in [0.3, 0.7]: .31 .31 .42 .42 .66.
    """
    blocks = -(-length // block_size)
    ratios = np.empty(blocks)
    ratios[:1] = low + (high - low) * rng.random()
    if blocks > 1:
        steps = rng.random(blocks - 1) * (high - ratios[0]) / (blocks - 1)
        ratios[1:] = ratios[0] + np.cumsum(steps)
    # The sum may pass `high` by a rounding error.
    return np.repeat(np.minimum(ratios, high), block_size)[:length]


def random_ratios(
    length: int, block_size: int, low: float, high: float, rng: np.random.Generator
) -> Ratios:
    """Draw each block's ratio uniformly in [low, high], in no order: D2F's ablation (section 4)."""
    ratios = rng.uniform(low, high, -(-length // block_size))
    return np.repeat(ratios, block_size)[:length]


def uniform_ratios(length: int, ratio: float) -> Ratios:
    """Mask every token of the response with the same ratio: LLaDA's noise."""
    return np.full(length, ratio)


def decoding_ratios(length: int, start: int, end: int, ratio: float) -> Ratios:
    """Return a state of block-wise decoding: revealed (0) before ``[start, end)``, `ratio` in it,
    masked (1) behind it. A length of 6, ``[2, 4)`` and 0.5 give 0 0 .5 .5 1 1."""
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
    """Draw a state of pipelined decoding, which the published training never visits: revealed
    blocks (0), then monotone ratios in [low, high] over at most most_active blocks, then freshly
    appended blocks (1). With blocks of 2, say 0 0 .4 .4 .6 .6 1 1."""
    blocks = -(-length // block_size)
    # Blocks [0, first) are done, [first, first + active) are decoded, the others just appended.
    first = int(rng.integers(blocks))
    active = int(rng.integers(1, min(blocks - first, most_active or blocks) + 1))
    ratios = np.ones(blocks)
    ratios[:first] = 0.0
    ratios[first : first + active] = np.sort(rng.uniform(low, high, active))
    return np.repeat(ratios, block_size)[:length]


def clean_prefix_ratios(
    length: int, block_size: int, low: float, rng: np.random.Generator
) -> tuple[Ratios, int]:
    """Draw a state of block diffusion's training (BD3-LM, arXiv 2503.09573, section 3): a current
    block, all equally likely, with a ratio uniform in [low, 1]; clean before it, masked behind it.

    Returns (ratios, end of the current block). A response of 6 in blocks of 2, whose second is
    drawn with 0.5::

        position    0 1 | 2 3 | 4 5
        ratio       0 0 | .5 .5 | 1 1      the current block ends at 4
    """
    start = block_size * int(rng.integers(-(-length // block_size)))
    end = min(start + block_size, length)
    return decoding_ratios(length, start, end, float(rng.uniform(low, 1.0))), end


def draw_mask(ratios: Ratios, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Mask each token independently with its ratio, ``[response]``."""
    return rng.random(len(ratios)) < ratios


def context_weights(masked: NDArray[np.bool_], prompt: int, p: float) -> NDArray[np.float64]:
    """Weigh each masked token by the revealed tokens around it, revealed ones by 0, ``[response]``:
    Dream's context-adaptive noise rescheduling (CART, arXiv 2508.15487, section 3),

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
    """Mask exactly round(ratio x number) of each block's maskable tokens, drawn uniformly,
    ``[length]``: WeDLM's noise (section 3).

    maskable: ``[length]``. ratios: one a block, blocks counted from position 0.
    """
    masked = np.zeros(len(maskable), dtype=bool)
    for block, ratio in enumerate(ratios):
        start = block * block_size
        places = start + np.flatnonzero(maskable[start : start + block_size])
        masked[rng.permutation(places)[: round(ratio * len(places))]] = True
    return masked


def observed_first(masked: NDArray[np.bool_], block_size: int) -> NDArray[np.int64]:
    """Order a sequence as WeDLM does (section 3): in each block the observed positions, then the
    masked ones, each ascending. Returns positions, int64 ``[length]``::

        masked     0 1 0 | 1 0 0      blocks of 3
        order      0 2 1 | 4 5 3
    """
    # Sorted by block, then observed before masked; equal ones stay in order.
    return np.lexsort((masked, np.arange(len(masked)) // block_size))


def _first_masked(state: Sequence[float]) -> int:
    """Return the number of a state's first block with a mask."""
    return next(block for block, ratio in enumerate(state) if ratio)


class PipelineStates:
    """Hold states of D2F's pipeline as decoding met them, by block size.

    `python -m decode.record_states` records them. Training that draws from them (`noise.states`)
    visits what the decoder feeds as often as decoding does, freshly appended blocks included. A
    state has the mask ratios of the response's blocks, from the first to the last open one, at one
    forward; finished blocks are 0, but never all.
    """

    def __init__(self, by_size: Mapping[int, Sequence[Sequence[float]]]):
        # Sorted, so that the states that fit a response's length come first.
        self.by_size: dict[int, list[State]] = {
            size: sorted(map(tuple, states), key=_first_masked) for size, states in by_size.items()
        }

    def draw(self, length: int, block_size: int, rng: np.random.Generator) -> tuple[Ratios, int]:
        """Draw one of the states that have a mask in `length` positions.

        Returns (ratios ``[length]``, end of the open blocks); beyond them all is masked (1). The
        state (0, .5) of blocks of 2, drawn for a response of 5::

            position    0 1 | 2 3 | 4
            ratio       0 0 | .5 .5 | 1      the open blocks end at 4
        """
        blocks = -(-length // block_size)
        states = self.by_size[block_size]
        fitting = bisect_left(states, blocks, key=_first_masked)
        if not fitting:  # none was recorded so early: take the start of every decoding
            return np.ones(length), min(block_size, length)
        state = states[int(rng.integers(fitting))][:blocks]
        ratios = np.ones(blocks)
        ratios[: len(state)] = state
        return np.repeat(ratios, block_size)[:length], min(len(state) * block_size, length)

    def save(self, path: Path, **about: object) -> None:
        """Write the states; `about` says what they were recorded from."""
        values = {"about": about, "states": {str(k): v for k, v in self.by_size.items()}}
        write_beside(path, json.dumps(values) + "\n")


_States = TypeAdapter(dict[PositiveInt, Annotated[list[list[_Ratio]], Len(1)]])


def read_states(path: str | Path) -> PipelineStates:
    """Read the states in a file that `save` wrote. Raises InputError."""
    values = read_object(path)
    try:
        by_size = _States.validate_python(values.get("states"))
        if by_size and all(any(state) for states in by_size.values() for state in states):
            return PipelineStates(by_size)
        fault = "a state without a mask, or none"
    except ValidationError as error:
        fault = explain(error, values.get("states"), "states")
    raise InputError(
        f"{path}: expected the states that python -m decode.record_states records: {fault}"
    )
