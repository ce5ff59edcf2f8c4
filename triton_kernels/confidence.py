"""Choose a token from a row of logits and measure the model's confidence in it.

With z the logits of a row and p = softmax(z) over the whole vocabulary:

    token        argmax of z without the mask id; drawn where `draws.Draws` says how
    probability  p[token]
    entropy      -sum_v p[v] log p[v], in nats
    margin       difference of the two largest p without the mask id
    named        p[named], of a token that the caller names
    named_log    log p[named], also where p[named] is 0 in fp32

All in fp32, whatever the logits' dtype. Of equal logits the lowest id is chosen. The kernels find
statistics of each tile of the vocabulary, then join the tiles of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triton_kernels.dispatch import jit, random_inputs, self_check, tl, triton, use_kernel
from triton_kernels.draws import Draws

_FACTS = 7  # statistics of a row in a tile, see `_store_tile`
_COLUMNS = 1024  # of a tile


@dataclass(frozen=True)
class Confidence:
    """Hold each row's figures ``[N]``: token int64, the others fp32; named and named_log None where
    no token was named."""

    token: Tensor
    probability: Tensor
    entropy: Tensor
    margin: Tensor
    named: Tensor | None
    named_log: Tensor | None


def confidence_of_logits(
    logits: Tensor,
    *,
    mask_id: int | None = None,
    named: Tensor | None = None,
    draws: Draws | None = None,
    kernel: bool | None = None,
) -> Confidence:
    """Find token and confidence of each row of logits ``[N, V]``.

    named: int64 ``[N]``. draws: how tokens are drawn; None takes the most likely ones. kernel: as
    in `use_kernel`. Raises ValueError.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits must be [N, V], got {list(logits.shape)}")
    if not use_kernel("confidence", logits, kernel) or not len(logits):
        return confidence_reference(logits, mask_id=mask_id, named=named, draws=draws)
    _check(len(logits), logits.shape[1], mask_id, named, draws)

    floor = None
    if draws is not None and draws.is_filtered:
        floor = draws.floor(without(logits.float(), mask_id))
    return launch(logits, mask_id, named, draws, floor)


def confidence_reference(
    logits: Tensor,
    *,
    mask_id: int | None = None,
    named: Tensor | None = None,
    draws: Draws | None = None,
) -> Confidence:
    """Compute `confidence_of_logits` in plain PyTorch."""
    _check(logits.shape[0], logits.shape[-1], mask_id, named, draws)
    wide = logits.float()  # [N, V]
    allowed = without(wide, mask_id)
    token = allowed.argmax(-1) if draws is None else draws.choose(allowed)
    # Confidence is the model's: without temperature and noise, whichever token was chosen.
    p = wide.softmax(-1)
    log_p = wide.log_softmax(-1)
    best = allowed.topk(min(2, allowed.shape[-1]), dim=-1).values
    lse = wide.logsumexp(-1, keepdim=True)
    # A vocabulary of one token besides the mask has no second: its probability is 0.
    top = torch.cat(((best - lse).exp(), torch.zeros_like(lse)), -1)  # [N, 2 or 3]
    return Confidence(
        token,
        p.gather(-1, token[:, None])[:, 0],
        # 0 log 0 is 0 here; multiplied out, 0 times -inf would be NaN.
        -torch.where(p > 0, p * log_p, 0.0).sum(-1),
        top[:, 0] - top[:, 1],
        None if named is None else p.gather(-1, named[:, None])[:, 0],
        None if named is None else log_p.gather(-1, named[:, None])[:, 0],
    )


def without(logits: Tensor, mask_id: int | None) -> Tensor:
    """Put -inf into the mask's column of logits ``[N, V]``. The mask id is never chosen but keeps
    its part of the probability: p is over the whole vocabulary, as in the official code, or
    thresholds would mean something else."""
    if mask_id is None:
        return logits
    allowed = logits.clone()
    allowed[:, mask_id] = -torch.inf
    return allowed


@jit
def _store_tile(
    z, row, column, rows, columns, facts, tokens, named_logit, named, mask_id, seeds, counters,
    temperatures, floors, HAS_MASK: tl.constexpr, HAS_NAMED: tl.constexpr, SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
):  # fmt: skip
    """Store the statistics of a tile: z [ROWS, COLUMNS] in fp32 of the rows `row` and columns
    `column`, -inf outside. Of each row's logits z and of the scores that choose the token::

        0 largest z    1 sum e^(z - largest)    2 sum (z - largest) * e^(z - largest)
        3 largest z that may be chosen    4 the second largest of those
        5 best score    6 z of the token with the best score
    """
    tile = tl.program_id(0)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    z = tl.where(inside, z, -float("inf"))  # [ROWS, COLUMNS]
    largest = tl.max(z, axis=1)
    safe = tl.where(largest == -float("inf"), 0.0, largest)  # a row beyond the last
    below = z - safe[:, None]
    share = tl.where(inside, tl.exp(below), 0.0)
    total = tl.sum(share, axis=1)
    mixed = tl.sum(share * tl.where(share > 0, below, 0.0), axis=1)
    # The sums above are over all tokens; any but the mask id may be chosen.
    allowed = z
    if HAS_MASK:
        allowed = tl.where(column[None, :] == mask_id, -float("inf"), z)
    first = tl.max(allowed, axis=1)
    first_at = tl.argmax(allowed, axis=1, tie_break_left=True)
    here = tl.arange(0, z.shape[1])[None, :]
    # Only the place of the first is left out: an equal logit elsewhere is a second, margin 0.
    second = tl.max(tl.where(here == first_at[:, None], -float("inf"), allowed), axis=1)
    best, best_at, best_z = first, first_at, first
    if SAMPLED:
        # `draws.Draws.choose`: four numbers of each counter, of four tokens that lie together.
        there = row < rows
        seed = tl.load(seeds + row, mask=there, other=0)
        counter = tl.load(counters + row, mask=there, other=0).to(tl.int64) << 32
        four = (tile * z.shape[1] // 4 + tl.arange(0, z.shape[1] // 4)).to(tl.int64)
        a, b, c, d = tl.rand4x(seed[:, None], counter[:, None] + four[None, :])
        noise = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))  # a b c d, a b c d, ...
        if FILTERED:
            floor = tl.load(floors + row, mask=there, other=-float("inf"))
            allowed = tl.where(z < floor[:, None], -float("inf"), allowed)
        temperature = tl.load(temperatures + row, mask=there, other=0.0)
        warm = temperature > 0
        drawn = allowed / tl.where(warm, temperature, 1.0)[:, None] - tl.log(-tl.log(noise))
        score = tl.where(inside, tl.where(warm[:, None], drawn, allowed), -float("inf"))
        best = tl.max(score, axis=1)
        best_at = tl.argmax(score, axis=1, tie_break_left=True)
        # The chosen token's logit: its probability is without the noise.
        best_z = tl.max(tl.where(here == best_at[:, None], allowed, -float("inf")), axis=1)
    if HAS_NAMED:
        # Only the tile with the named token writes the row's logit, to a place of the row.
        wanted = tl.load(named + row, mask=row < rows, other=-1)
        hit = column[None, :] == wanted[:, None]
        found = tl.sum(tl.where(hit & inside, z, 0.0), axis=1)
        is_here = tl.sum((hit & inside).to(tl.int32), axis=1) > 0
        tl.store(named_logit + row, found, mask=is_here)
    kept = row < rows
    place = facts + (tile * rows + row) * 7  # [tiles, rows, 7]
    tl.store(place, largest, mask=kept)
    tl.store(place + 1, total, mask=kept)
    tl.store(place + 2, mixed, mask=kept)
    tl.store(place + 3, first, mask=kept)
    tl.store(place + 4, second, mask=kept)
    tl.store(place + 5, best, mask=kept)
    tl.store(place + 6, best_z, mask=kept)
    tl.store(tokens + tile * rows + row, tile * column.shape[0] + best_at, mask=kept)


@jit
def _logits_tile(
    logits, rows, columns, facts, tokens, named_logit, named, mask_id, seeds, counters,
    temperatures, floors, HAS_MASK: tl.constexpr, HAS_NAMED: tl.constexpr, SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Load one row's tile of the logits."""
    row = tl.program_id(1) + tl.arange(0, 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # int64: rows x vocabulary passes 2**31 from some 17,000 rows on.
    place = logits + row.to(tl.int64)[:, None] * columns + column[None, :]
    z = tl.load(place, mask=(column < columns)[None, :], other=-float("inf")).to(tl.float32)
    _store_tile(
        z, row, column, rows, columns, facts, tokens, named_logit, named, mask_id, seeds, counters,
        temperatures, floors, HAS_MASK, HAS_NAMED, SAMPLED, FILTERED,
    )  # fmt: skip


@jit
def _join_tiles(
    facts, tokens, named_logit, rows, tiles, out, token, HAS_NAMED: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Join the statistics of one row's tiles. out [5, rows]."""
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    there = tile < tiles
    place = facts + (tile * rows + row) * 7
    nothing = -float("inf")
    largest = tl.load(place, mask=there, other=nothing)
    most = tl.max(largest, axis=0)
    shrink = tl.exp(largest - most)  # each tile's sums are to its own largest: bring them to one
    part = tl.load(place + 1, mask=there, other=0.0)
    mixed = tl.load(place + 2, mask=there, other=0.0)
    # sum (z - most) e^(z - largest) = what the tile has + (largest - most) * sum e^(z - largest)
    mixed += tl.where(part > 0, part * tl.where(there, largest - most, 0.0), 0.0)
    mixed = tl.sum(mixed * shrink, axis=0)
    total = tl.sum(part * shrink, axis=0)
    log_sum = most + tl.log(total)
    first = tl.load(place + 3, mask=there, other=nothing)
    top = tl.max(first, axis=0)
    top_at = tl.argmax(first, axis=0, tie_break_left=True)
    second = tl.max(tl.load(place + 4, mask=there, other=nothing), axis=0)
    # The second of all is a tile's second, or the first of a tile that does not have the first.
    second = tl.maximum(second, tl.max(tl.where(tile == top_at, nothing, first), axis=0))
    best = tl.load(place + 5, mask=there, other=nothing)
    best_at = tl.argmax(best, axis=0, tie_break_left=True)
    z = tl.load(facts + (best_at * rows + row) * 7 + 6)
    tl.store(token + row, tl.load(tokens + best_at * rows + row).to(tl.int64))
    tl.store(out + row, tl.exp(z - log_sum))
    # With p = e^(z - most) / total: -sum p log p = log total - sum p (z - most).
    tl.store(out + rows + row, tl.log(total) - mixed / total)
    tl.store(out + 2 * rows + row, tl.exp(top - log_sum) - tl.exp(second - log_sum))
    if HAS_NAMED:
        named_log = tl.load(named_logit + row) - log_sum
        tl.store(out + 3 * rows + row, tl.exp(named_log))
        tl.store(out + 4 * rows + row, named_log)


def launch(
    logits: Tensor,
    mask_id: int | None,
    named: Tensor | None,
    draws: Draws | None,
    floor: Tensor | None,
) -> Confidence:
    """Launch the kernels; arguments checked, N at least 1. floor: that of the draws, if they have
    one."""
    logits, device = logits.contiguous(), logits.device
    rows, columns = logits.shape
    tiles = triton.cdiv(columns, _COLUMNS)
    facts = torch.empty((tiles, rows, _FACTS), dtype=torch.float32, device=device)
    tokens = torch.empty((tiles, rows), dtype=torch.int32, device=device)
    named_logit = torch.empty(rows, dtype=torch.float32, device=device)
    unused = tokens  # a kernel takes a pointer also for what its switches leave out
    drawn = (unused,) * 3
    if draws is not None:
        drawn = (draws.seed.contiguous(), draws.row.contiguous(), draws.temperature)
    _logits_tile[(tiles, rows)](
        logits, rows, columns, facts, tokens, named_logit,
        unused if named is None else named.contiguous(), -1 if mask_id is None else mask_id,
        *drawn, facts if floor is None else floor, HAS_MASK=mask_id is not None,
        HAS_NAMED=named is not None, SAMPLED=draws is not None, FILTERED=floor is not None,
        COLUMNS=_COLUMNS,
    )  # fmt: skip
    out = torch.empty((5, rows), dtype=torch.float32, device=device)
    token = torch.empty(rows, dtype=torch.int64, device=device)
    _join_tiles[(rows,)](
        facts, tokens, named_logit, rows, tiles, out, token,
        HAS_NAMED=named is not None, TILES=triton.next_power_of_2(tiles),
    )  # fmt: skip
    of_named = (None, None) if named is None else (out[3], out[4])
    return Confidence(token, out[0], out[1], out[2], *of_named)


def _check(
    rows: int, vocabulary: int, mask_id: int | None, named: Tensor | None, draws: Draws | None
) -> None:
    if vocabulary < 1:
        raise ValueError("expected at least one token in the vocabulary, got 0")
    if mask_id is not None and not 0 <= mask_id < vocabulary:
        raise ValueError(f"mask_id must lie in [0, {vocabulary}), got {mask_id}")
    wanted: dict[str, tuple[Tensor | None, torch.dtype]] = {"named": (named, torch.int64)}
    if draws is not None:
        wanted |= {"seed": (draws.seed, torch.int64), "row": (draws.row, torch.int64)}
        wanted |= {"temperature": (draws.temperature, torch.float32)}
    for name, (given, dtype) in wanted.items():
        if given is not None and (given.shape != (rows,) or given.dtype != dtype):
            raise ValueError(
                f"{name} must be {str(dtype).removeprefix('torch.')} [{rows}], got {given.dtype} "
                f"{list(given.shape)}"
            )


@self_check("confidence")
def _check_confidence(dtype: torch.dtype, device: torch.device, dim: int) -> None:
    """Raise unless tokens, ties and drawn ones included, and probabilities are the plain ones."""
    logits = 3 * random_inputs(((6, 5000),), dtype, device)[0]
    # Equal largest logits in two tiles: the lower id must win.
    logits[0, 30] = logits[0, 4000] = logits.max() + 1
    named = torch.arange(6, device=device)
    warm = Draws(named, named, torch.where(named > 2, 0.7, 0.0))  # half of the rows are drawn
    for draws in (warm, None):
        ours, plain = (
            confidence_of_logits(logits, mask_id=7, named=named, draws=draws, kernel=kernel)
            for kernel in (True, False)
        )
        if not torch.equal(ours.token, plain.token):
            raise AssertionError("it chooses other tokens than the plain computation")
    for name in ("probability", "entropy", "margin", "named", "named_log"):
        difference = (getattr(ours, name) - getattr(plain, name)).abs().max().item()
        if not difference < 1e-4:
            raise AssertionError(f"its {name} differs by {difference:.2g} from the plain one")
