"""Spans made on the host, in numpy: the one place where a decoder's step and a training mask get
theirs (`d2f.spans` has the latter as tensors). Importing it does not import torch.

All are int64 ``[Q, K, 2]``: each query's K half-open ranges ``[start, end)`` of the keys it sees.
Every argument is one number for all queries or one a query, ``[Q]``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def block_ends(length: int, prompt_length: int, block_size: int) -> Ints:
    """End of each position's D2F block, ``[length]``: the prompt is block 0, then blocks of
    `block_size` from the prompt's end, the last one possibly short (D2F, section 3)::

        block_ends(9, prompt_length=2, block_size=4)

        position    0 1 | 2 3 4 5 | 6 7 8
        end         2 2 | 6 6 6 6 | 9 9 9
    """
    at_least(1, block_size=block_size)
    if not 0 <= prompt_length <= length:
        raise ValueError(f"prompt_length must lie in [0, {length}], got {prompt_length}")
    position = np.arange(length)
    after = position - prompt_length  # below 0 in the prompt, which the last line sets apart
    ends = np.minimum(prompt_length + (after // block_size + 1) * block_size, length)
    return np.where(after < 0, prompt_length, ends)


def prefix(ends: Ints) -> Ints:
    """Query q sees ``[0, ends[q])``: every causal, bidirectional and block-causal mask."""
    spans = np.zeros((len(ends), 1, 2), dtype=np.int64)
    spans[:, 0, 1] = ends
    return spans


def shadow_spans(
    hidden_start: Ints, hidden_end: Ints, ends: Ints, start: Ints | int, end: Ints | int
) -> Ints:
    """WINO's shadow rows: a query sees ``[0, ends)`` but for ``[hidden_start, hidden_end)``, and
    the slots ``[start, end)`` of the shadow::

        sequence of 7 slots, the shadow of its block [2, 5) in the slots 7 8 9

        row    hides    ranges
        0      2        [0, 2)  [3, 7)  [7, 10)
        1      3        [0, 3)  [4, 7)  [7, 10)
        2      4        [0, 4)  [5, 7)  [7, 10)
    """
    return stack((0, hidden_start), (hidden_end, ends), (start, end))


def branch_spans(ends: Ints, shared: int, stop: int, scratch: int) -> Ints:
    """Rows of a candidate branch (FreeDave): positions ``[shared, stop)`` of the branch lie in the
    slots from `scratch` on, all others in the slot of their number; a query sees the positions
    ``[0, ends)``::

        shared = 2, stop = 6, scratch = 9: the branch's positions 2 3 4 5 in the slots 9 10 11 12

        ends    ranges
        2       [0, 2)  [9, 9)
        6       [0, 2)  [9, 13)
        8       [0, 2)  [9, 13)  [6, 8)
    """
    # Three ranges: what the branch shares with the request, its own copy, and behind that the
    # request's slots again.
    own_end = scratch + np.clip(ends, shared, stop) - shared
    behind = ends > stop
    last = np.where(behind, stop, 0), np.where(behind, ends, 0)
    return stack((0, np.minimum(shared, ends)), (scratch, own_end), last)


def stack(*ranges: tuple[Ints | int, Ints | int]) -> Ints:
    """K ranges, each of (starts, ends)."""
    columns = np.broadcast_arrays(*(bound for pair in ranges for bound in pair))
    return np.stack(columns, axis=-1).reshape(-1, len(ranges), 2).astype(np.int64, copy=False)


def widened(spans: Ints, width: int) -> Ints:
    """Spans ``[Q, K, 2]`` as ``[Q, width, 2]``, the ranges that were lacking empty."""
    lacking = width - spans.shape[1]
    return np.pad(spans, ((0, 0), (0, lacking), (0, 0))) if lacking else spans


def at_least(least: int, **values: int) -> None:
    """Raise ValueError, which names the value, for one below `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
