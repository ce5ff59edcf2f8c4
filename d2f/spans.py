"""Attention masks as data: per query, a union of at most three contiguous key spans.

``spans`` is an int32 tensor ``[..., queries, K, 2]`` of half-open key ranges ``[start, end)``,
K = 1, 2 or 3. A range with ``start == end`` is empty; the ranges of one query do not overlap;
a query with only empty ranges sees nothing. A prompt of 2 and two blocks of 2 under D2F's mask::

    block_causal(6, prompt_length=2, block_size=2)

    query    spans       sees keys
    0 1      [[0, 2]]    x x . . . .
    2 3      [[0, 4]]    x x x x . .
    4 5      [[0, 6]]    x x x x x x

A decoder's step makes its spans as numpy arrays, int64 ``[Q, K, 2]``; the masks of whole sequences
are built on these, as tensors for training, and `pack` puts several sequences in one row. Importing
this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Ints = NDArray[np.int64]

# In numpy, for a decoder's step. Arguments are one number for all queries or one a query, ``[Q]``.


def block_ends(length: int, prompt_length: int, block_size: int) -> Ints:
    """Return the end of each position's D2F block, ``[length]``. The prompt is block 0; blocks of
    `block_size` follow, the last one possibly short (D2F, section 3)::

        block_ends(9, prompt_length=2, block_size=4)

        position    0 1 | 2 3 4 5 | 6 7 8
        end         2 2 | 6 6 6 6 | 9 9 9
    """
    position = np.arange(length)
    after = position - prompt_length  # below 0 in the prompt
    ends = np.minimum(prompt_length + (after // block_size + 1) * block_size, length)
    return np.where(after < 0, prompt_length, ends)


def prefix(ends: Ints) -> Ints:
    """Let query q see ``[0, ends[q])``: every causal, bidirectional and block-causal mask."""
    spans = np.zeros((len(ends), 1, 2), dtype=np.int64)
    spans[:, 0, 1] = ends
    return spans


def shadow_spans(
    hidden_start: Ints, hidden_end: Ints, ends: Ints, start: Ints | int, end: Ints | int
) -> Ints:
    """Let WINO's shadow rows see ``[0, ends)`` without ``[hidden_start, hidden_end)``, and the
    shadow's slots ``[start, end)``::

        sequence of 7 slots, the shadow of its block [2, 5) in the slots 7 8 9

        row    hides    ranges
        0      2        [0, 2)  [3, 7)  [7, 10)
        1      3        [0, 3)  [4, 7)  [7, 10)
        2      4        [0, 4)  [5, 7)  [7, 10)
    """
    return stack((0, hidden_start), (hidden_end, ends), (start, end))


def branch_spans(ends: Ints, shared: int, stop: int, scratch: int) -> Ints:
    """Let rows of a candidate branch (FreeDave) see the positions ``[0, ends)``. The branch's
    positions ``[shared, stop)`` lie in the slots from `scratch` on, all others in the slot of
    their number::

        shared = 2, stop = 6, scratch = 9: the branch's positions 2 3 4 5 in the slots 9 10 11 12

        ends    ranges
        2       [0, 2)  [9, 9)
        6       [0, 2)  [9, 13)
        8       [0, 2)  [9, 13)  [6, 8)
    """
    # Three ranges: the slots shared with the request, the branch's own, and behind them the
    # request's again.
    own_end = scratch + np.clip(ends, shared, stop) - shared
    behind = ends > stop
    last = np.where(behind, stop, 0), np.where(behind, ends, 0)
    return stack((0, np.minimum(shared, ends)), (scratch, own_end), last)


def stack(*ranges: tuple[Ints | int, Ints | int]) -> Ints:
    """Build spans from K ranges, each (starts, ends)."""
    columns = np.broadcast_arrays(*(bound for pair in ranges for bound in pair))
    return np.stack(columns, axis=-1).reshape(-1, len(ranges), 2).astype(np.int64, copy=False)


def widened(spans: Ints, width: int) -> Ints:
    """Add empty ranges to spans ``[Q, K, 2]`` up to ``[Q, width, 2]``."""
    lacking = width - spans.shape[1]
    return np.pad(spans, ((0, 0), (0, lacking), (0, 0))) if lacking else spans


# Spans of whole sequences, as tensors ``[queries, K, 2]``.


def bidirectional(length: int) -> Tensor:
    """Let every query see ``[0, length)`` (LLaDA, Dream, the D2F teacher)."""
    return _tensor(prefix(np.full(length, length)))


def causal(length: int) -> Tensor:
    """Let query q see ``[0, q + 1)`` (autoregressive models)."""
    return _tensor(prefix(np.arange(length) + 1))


def block_causal(length: int, prompt_length: int, block_size: int) -> Tensor:
    """Let query q see ``[0, end of q's block)``; the prompt is one bidirectional block (D2F
    student).

    With ``prompt_length=0`` these are blocks on absolute positions (SDAR, BD3-LM decoding).
    """
    return _tensor(prefix(block_ends(length, prompt_length, block_size)))


def wedlm_training(length: int, block_size: int, *, bidirectional: bool = False) -> Tensor:
    """Build WeDLM's training spans ``[2 * length, 2, 2]`` on ``[clean; reordered]`` (section 3).

    A clean query is causal. A reordered query sees the clean blocks before its own, and its own
    block causally in the physical order, or all of that block where it is bidirectional::

        wedlm_training(4, block_size=2)    keys 0 1 2 3 are clean, 4 5 6 7 reordered

        query    spans               query    spans
        0        [0, 1)              4        [0, 0) [4, 5)
        1        [0, 2)              5        [0, 0) [4, 6)
        2        [0, 3)              6        [0, 2) [6, 7)
        3        [0, 4)              7        [0, 2) [6, 8)
    """
    q = np.arange(length)
    starts = q // block_size * block_size  # of each position's block
    clean = stack((0, q + 1), (0, np.zeros_like(q)))
    ends = np.minimum(starts + block_size, length) if bidirectional else q + 1
    reordered = stack((0, starts), (length + starts, length + ends))
    return _tensor(np.concatenate((clean, reordered)))


def shift(spans: Tensor, offset: int) -> Tensor:
    """Move spans to keys that start at `offset`; empty ranges stay empty."""
    return spans + offset


def pack(parts: Sequence[Tensor], length: int) -> Tensor:
    """Lay the spans of several sequences one after the other in a row of `length` positions.

    No sequence sees another; positions after the last one see nothing (empty spans)::

        pack([bidirectional(2), causal(3)], length=6)

        position    0       1       2       3       4       5
        span        [0, 2)  [0, 2)  [2, 3)  [2, 4)  [2, 5)  [0, 0)
    """
    import torch
    from torch.nn.functional import pad

    k = max((part.shape[-2] for part in parts), default=1)
    rows, offset = [], 0
    for part in parts:
        rows.append(shift(pad(part, (0, 0, 0, k - part.shape[-2])), offset))
        offset += part.shape[0]
    if offset > length:
        raise ValueError(f"sequences of {offset} positions do not fit in a row of {length}")
    # Padding sees nothing and nobody sees it.
    rows.append(torch.zeros(length - offset, k, 2, dtype=torch.int32))
    return torch.cat(rows)


def _tensor(spans: Ints) -> Tensor:
    import torch

    return torch.from_numpy(spans).to(torch.int32)
