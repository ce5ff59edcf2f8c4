"""Attention masks as data: per query, a union of at most three contiguous key spans.

``spans`` is an int32 tensor ``[..., queries, K, 2]`` of half-open key ranges ``[start, end)``,
K = 1, 2 or 3. A range with ``start == end`` is empty; the ranges of one query do not overlap;
a query with only empty ranges sees nothing. Every function below returns spans ``[queries, K, 2]``
for one sequence; `shift` and `pack` put several sequences in one row or one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from d2f.span_makers import at_least, block_ends
from triton_kernels.span_attention import MAX_SPANS as MAX_SPANS
from triton_kernels.span_attention import validate_spans as validate  # noqa: F401


def bidirectional(length: int) -> Tensor:
    """Every query sees ``[0, length)`` (LLaDA, Dream, the D2F teacher)."""
    q = _queries(length)
    return _stack((torch.zeros_like(q), torch.full_like(q, length)))


def causal(length: int) -> Tensor:
    """Query q sees ``[0, q + 1)`` (autoregressive models)."""
    q = _queries(length)
    return _stack((torch.zeros_like(q), q + 1))


def block_causal(length: int, prompt_length: int, block_size: int) -> Tensor:
    """Query q sees ``[0, end of q's block)``; the prompt is one bidirectional block (D2F student).

    With ``prompt_length=0`` these are blocks on absolute positions (SDAR, BD3-LM decoding).
    """
    ends = torch.from_numpy(block_ends(length, prompt_length, block_size))
    return _stack((torch.zeros_like(ends), ends))


def block_diffusion_training(length: int, block_size: int) -> Tensor:
    """Spans ``[2 * length, 2, 2]`` on ``[noisy; clean]`` (SDAR, BD3-LM training).

    A noisy query sees its own noisy block and the clean blocks before it; a clean query sees the
    clean blocks up to and with its own.
    """
    ends = torch.from_numpy(block_ends(length, 0, block_size))
    starts = _queries(length) // block_size * block_size
    zeros, offset = torch.zeros_like(starts), torch.full_like(starts, length)
    noisy = _stack((starts, ends), (offset, offset + starts))
    clean = _stack((offset, offset + ends), (zeros, zeros))
    return torch.cat((noisy, clean))


def wedlm_training(length: int, block_size: int) -> Tensor:
    """Spans ``[2 * length, 2, 2]`` on ``[clean; reordered]`` (WeDLM, section 3).

    A clean query is plain causal; a reordered query sees the clean blocks before its own and its
    own block, causally in the physical order.
    """
    at_least(1, block_size=block_size)
    q = _queries(length)
    starts = q // block_size * block_size
    zeros = torch.zeros_like(q)
    clean = _stack((zeros, q + 1), (zeros, zeros))
    reordered = _stack((zeros, starts), (length + starts, length + q + 1))
    return torch.cat((clean, reordered))


def wino_shadow(length: int, block_start: int, block_length: int) -> Tensor:
    """Spans ``[length + block_length, 2, 2]``: a sequence and the shadow of one block (WINO).

    Sequence rows see the sequence; shadow row l sees everything but its counterpart
    ``block_start + l``, the shadow included.
    """
    at_least(1, block_length=block_length)
    if not 0 <= block_start <= length - block_length:
        raise ValueError(
            f"a block of {block_length} must start in [0, {length - block_length}], "
            f"got {block_start}"
        )
    q = _queries(length)
    zeros = torch.zeros_like(q)
    own = block_start + _queries(block_length)
    sequence = _stack((zeros, torch.full_like(q, length)), (zeros, zeros))
    total = torch.full_like(own, length + block_length)
    shadow = _stack((torch.zeros_like(own), own), (own + 1, total))
    return torch.cat((sequence, shadow))


def d2f_shadow(length: int, prompt_length: int, block_size: int, blocks: Sequence[int]) -> Tensor:
    """Block-causal spans of a sequence, then one shadow for each block number in `blocks`.

    ``[length + shadow rows, 3, 2]``. Blocks count from 0 after the prompt. Shadow row l of a block
    ``[s, e)`` sees ``[0, s + l)``, ``[s + l + 1, e)`` and its own shadow block; no sequence row
    sees a shadow (WINO's check inside the D2F pipeline).
    """
    ends = torch.from_numpy(block_ends(length, prompt_length, block_size))
    zeros = torch.zeros_like(ends)
    parts = [_stack((zeros, ends), (zeros, zeros), (zeros, zeros))]
    first = length
    for block in blocks:
        start = prompt_length + block * block_size
        if block < 0 or start >= length:
            raise ValueError(f"block {block} does not lie in a sequence of {length} positions")
        end = min(start + block_size, length)
        own = start + _queries(end - start)
        low, high = torch.full_like(own, first), torch.full_like(own, first + end - start)
        ends_ = torch.full_like(own, end)
        parts.append(_stack((torch.zeros_like(own), own), (own + 1, ends_), (low, high)))
        first += end - start
    return torch.cat(parts)


def candidate_branches(prefix: int, branches: int, branch_length: int) -> Tensor:
    """Spans ``[branches * branch_length, 2, 2]`` of candidate branches after a shared prefix.

    A row of branch j sees ``[0, prefix)`` and its own branch (FreeDave's tree drafting).
    """
    at_least(0, prefix=prefix)
    at_least(1, branches=branches, branch_length=branch_length)
    q = _queries(branches * branch_length)
    starts = prefix + q // branch_length * branch_length
    shared = (torch.zeros_like(q), torch.full_like(q, prefix))
    return _stack(shared, (starts, starts + branch_length))


def shift(spans: Tensor, offset: int) -> Tensor:
    """The same spans over keys that start at `offset`; empty ranges stay empty."""
    return spans + offset


def widen(spans: Tensor, k: int) -> Tensor:
    """The same spans with K = k ranges a query, the added ones empty."""
    have = spans.shape[-2]
    if have > k:
        raise ValueError(f"spans have {have} ranges a query, which does not fit in {k}")
    return torch.nn.functional.pad(spans, (0, 0, 0, k - have))


def pack(parts: Sequence[Tensor], length: int) -> Tensor:
    """Spans of several sequences laid one after the other in a row of `length` positions.

    No sequence sees another; positions after the last one see nothing (empty spans).
    """
    k = max((part.shape[-2] for part in parts), default=1)
    rows, offset = [], 0
    for part in parts:
        rows.append(shift(widen(part, k), offset))
        offset += part.shape[0]
    if offset > length:
        raise ValueError(f"sequences of {offset} positions do not fit in a row of {length}")
    rows.append(torch.zeros(length - offset, k, 2, dtype=torch.int32))
    return torch.cat(rows)


def _queries(length: int) -> Tensor:
    at_least(0, length=length)
    return torch.arange(length, dtype=torch.int32)


def _stack(*ranges: tuple[Tensor, Tensor]) -> Tensor:
    """Ranges of (starts [Q], ends [Q]) to spans [Q, K, 2]."""
    return torch.stack([torch.stack(pair, dim=-1) for pair in ranges], dim=1).to(torch.int32)
