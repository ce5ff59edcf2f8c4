"""States of D2F's pipeline as decoding met them: the mask ratio of each open block at each forward.

`python -m decode.record_states` records them; training draws from them (`noise.states`), so that it
visits what the decoder feeds, freshly appended blocks included, and as often.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from d2f.errors import InputError
from d2f.files import write_beside
from d2f.json_file import read_object
from d2f.noise import Ratios

State = tuple[float, ...]


class PipelineStates:
    """Recorded states by block size. A state is the mask ratios of the blocks that were open at one
    forward, from the response's first block on, the finished ones (0) included.

    Raises InputError for a ratio outside [0, 1] or a state without a mask.
    """

    def __init__(self, by_size: Mapping[int, Sequence[Sequence[float]]]):
        self.by_size: dict[int, list[State]] = {}
        self._first: dict[int, np.ndarray] = {}
        if not by_size:
            raise InputError("expected states of at least one block size, got none")
        for size, states in by_size.items():
            if size < 1 or not states:
                raise InputError(f"block size {size}: expected at least 1 and at least one state")
            for state in states:
                if not (any(state) and all(0 <= ratio <= 1 for ratio in state)):
                    raise InputError(
                        f"block size {size}: a state must be ratios in [0, 1], not all 0, "
                        f"got {list(state)}"
                    )
            # Sorted by their first block with a mask: the states that a response of some length can
            # be in are then the first ones of the list, and `draw` finds how many by bisection.
            first = [next(i for i, ratio in enumerate(state) if ratio) for state in states]
            order = np.argsort(first, kind="stable")
            self.by_size[size] = [tuple(states[i]) for i in order]
            self._first[size] = np.array(first)[order]

    def draw(self, length: int, block_size: int, rng: np.random.Generator) -> tuple[Ratios, int]:
        """(ratios ``[length]``, where the state's open blocks end) of one of the states that have
        a mask in `length` positions. What is beyond the open blocks is masked (1). The state
        (0, .5) of blocks of 2, drawn for a response of 5::

            position    0 1 | 2 3 | 4
            ratio       0 0 | .5 .5 | 1      the open blocks end at 4
        """
        blocks = -(-length // block_size)
        fitting = int(np.searchsorted(self._first[block_size], blocks))
        if not fitting:  # none was recorded so early: the start of every decoding
            return np.ones(length), min(block_size, length)
        state = self.by_size[block_size][int(rng.integers(fitting))][:blocks]
        ratios = np.ones(blocks)
        ratios[: len(state)] = state
        return np.repeat(ratios, block_size)[:length], min(len(state) * block_size, length)

    def save(self, path: Path, **about: object) -> None:
        """Write the states, with what they were recorded from."""
        values = {"about": about, "states": {str(k): v for k, v in self.by_size.items()}}
        write_beside(path, json.dumps(values) + "\n")


def read_states(path: str | Path) -> PipelineStates:
    """The states in a file that `save` wrote. Raises InputError."""
    values = read_object(path)
    try:
        by_size = {
            int(size): [[float(ratio) for ratio in state] for state in states]
            for size, states in values["states"].items()
        }
        return PipelineStates(by_size)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: expected the states that python -m decode.record_states records, "
            f"got {error!r:.200}"
        ) from error
