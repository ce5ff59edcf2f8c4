"""Attention over spans: each query sees a union of at most three key ranges.

    out[t, h] = softmax(scale * q[t, h] . k[h // group, j] for j in spans[t]) @ v[h // group, j]

`span_attention` is made for decoding: it runs the kernel where `use_kernel` says so, else
`span_attention_reference`, which is the path of the CPU and what the kernel is tested against. The
kernel has no backward; training takes `triton_kernels.flex` or the reference.

A program of the kernel computes a few queries with all heads that share one key head (their rows
share the loads of keys and values) over the tiles of keys that one of its rows sees. With few
queries and many keys the tiles are split over programs, whose parts are joined afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor

from triton_kernels.dispatch import (
    check_alike,
    compare,
    jit,
    random_inputs,
    self_check,
    tl,
    triton,
    use_kernel,
)

MAX_SPANS = 3  # every mask of this field is a union of at most three ranges (`d2f.spans`)
HEAD_DIMS = (32, 64, 80, 96, 128, 256)
_LEAST_TILE = 16  # keys
_FILLS_A_GPU = 256  # programs
_JOIN_SHARE = 0.15  # of the bytes of keys and values that a split reads, at most for joining it


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor,
    *,
    scale: float | None = None,
    kernel: bool | None = None,
    check: bool = True,
) -> Tensor:
    """Attention of rows of many requests in one flat batch over a flat cache.

    q ``[T, H, D]``; k, v ``[H_kv, S, D]`` with H a multiple of H_kv; spans int32 ``[T, K, 2]``,
    absolute slots, K at most 3, the ranges of a row disjoint; scale defaults to ``D ** -0.5``.
    Returns ``[T, H, D]`` in q's dtype; a row that sees no key gives 0.

    kernel: as in `use_kernel`; without it, calls in fp64 or with a gradient are the reference's.
    check: look into the spans, which on a GPU waits for them.

    Raises ValueError for shapes, dtypes, devices or spans that do not fit, and where the kernel is
    asked for a gradient or a head dimension that is not in `HEAD_DIMS`.
    """
    _check(q, k, v, spans)
    if check:
        validate_spans(spans, k.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    use = (kernel is True or can_run(q, k, v)) and use_kernel("span_attention", q, kernel)
    if not use or not len(q) or not k.shape[1]:  # without rows or keys there is nothing to launch
        rows = q.transpose(0, 1)[None]  # [1, H, T, D]
        plain = span_attention_reference(rows, k[None], v[None], spans[None], scale=scale)
        return plain[0].transpose(0, 1)
    if q.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"the head dimension must be one of {HEAD_DIMS}, got {q.shape[-1]}")
    if wants_gradient(q, k, v):
        raise ValueError("the span attention kernel has no backward, and a gradient is wanted")

    # The kernel takes the strides of rows and heads but not within a head: it reads a transposed
    # tensor without a copy.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return forward(q, k, v, spans.contiguous(), scale)


def write_slots(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    kernel: bool | None = None,
) -> None:
    """Write keys and values ``[H_kv, T, D]`` to slots int64 ``[T]`` of k and v ``[H_kv, S, D]``."""
    if (kernel or k.is_cuda) and use_kernel("write_slots", k, kernel):
        keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
        heads, rows, dim = keys.shape
        if rows:
            strides = [s for x in (keys, values, k, v) for s in x.stride()[:2]]
            _write[(rows, heads)](
                keys, values, slots, k, v, *strides, DIM=dim, WIDTH=triton.next_power_of_2(dim)
            )
        return
    # In the cache's dtype: RoPE in fp32 gives keys in fp32.
    k.index_copy_(1, slots, keys.to(k.dtype))
    v.index_copy_(1, slots, values.to(v.dtype))


def span_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, *, scale: float | None = None
) -> Tensor:
    """Compute span attention in plain PyTorch, heads grouped, for a batch.

    q ``[B, H, T, D]``; k, v ``[B, H_kv, S, D]`` with H a multiple of H_kv; spans int32
    ``[B or 1, T, K, 2]`` over the S keys; scale defaults to ``D ** -0.5``. Returns
    ``[B, H, T, D]`` in q's dtype; a query that sees no key gives 0.
    """
    return masked_attention(q, k, v, span_mask(spans, k.shape[2]), scale=scale)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None = None
) -> Tensor:
    """Compute `span_attention_reference` with the mask ``[B or 1, T, S]`` already built, so that
    the layers of one forward share it; None where every query sees every key."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} key heads evenly")
    if heads != kv_heads:  # [B, H, S, D], head h reads key head h // (H / H_kv)
        k, v = (repeat(x, "b h s d -> b (h g) s d", g=heads // kv_heads) for x in (k, v))
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    # mask [B or 1, 1, T, S]: the same for all heads
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale)
    if q.device.type == "cpu":  # gives 0 for a query that sees no key already
        return out
    return torch.where(mask.any(dim=-1)[:, None, :, None], out, 0.0)


def span_mask(spans: Tensor, keys: int, first_key: int = 0) -> Tensor:
    """Build a boolean mask ``[..., queries, keys]``, True where the query sees the key.

    spans: ``[..., queries, K, 2]``, of which the keys ``[first_key, first_key + keys)`` are looked
    at.
    """
    key = torch.arange(first_key, first_key + keys, dtype=spans.dtype, device=spans.device)
    starts, ends = spans[..., None, 0], spans[..., None, 1]  # [..., queries, K, 1]
    inside = [
        (key >= starts[..., i, :]) & (key < ends[..., i, :]) for i in range(spans.shape[-2])
    ]  # K x [..., queries, keys]
    mask = inside[0]
    for part in inside[1:]:
        mask = mask | part
    return mask


def can_run(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Say whether the kernel can compute these: a head dimension that it is compiled for, and no
    gradient."""
    return q.shape[-1] in HEAD_DIMS and not wants_gradient(q, k, v)


def wants_gradient(*given: Tensor) -> bool:
    """Say whether a result of these will be differentiated."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


@jit
def rows_of(tile, QUERIES: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, queries):
    """Return each row's query, its head within the group, and whether there is such a row. Sizes
    of a tile are powers of two and a group need not be; two queries, a group of 3::

        row       0 1 2 3   4 5 6 7      QUERIES = 2, GROUP = 3, PADDED = 4
        query     0 0 0 0   1 1 1 1
        member    0 1 2 .   0 1 2 .      . is no row
    """
    row = tl.arange(0, QUERIES * PADDED)
    query = tile * QUERIES + row // PADDED
    member = row % PADDED
    return query, member, (query < queries) & (member < GROUP)


@jit
def seen_by(spans, query, real, span, SPANS: tl.constexpr):
    """Load the bounds of one span of each row; 0, 0 where there is no row."""
    place = spans + (query * SPANS + span) * 2
    return tl.load(place, mask=real, other=0), tl.load(place + 1, mask=real, other=0)


@jit
def reach_of(start, end):
    """Return the first and the last key that any row of the tile sees by this span; keys outside
    are not loaded. Empty spans may lie anywhere and do not count."""
    low = tl.min(tl.where(end > start, start, 2147483647))
    high = tl.max(tl.where(end > start, end, 0))
    return low, tl.maximum(low, high)


@jit
def unseen_tiles(
    spans, tile, queries, low, span, SPANS: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Find the gap before each query of a tile: the keys between those that the queries before it
    see and those that it and the queries behind it see. Returns where the gap begins, in tiles of
    keys from `low` on without the tiles of earlier gaps, and its number of tiles. Two requests,
    KEYS = 2::

        key           0 1   2 3   4 5   6 7   8 9
        query 0       x x   x .   . .   . .   . .    begins at 0, 0 tiles
        query 1       . .   . .   . .   . x   x x    begins at 2, 1 tile
        the i-th tile to visit, i = 0 1 2 3, is the tile 0 1 3 4

    Every such gap is left out for queries in the order of the keys they see, fewer in others.
    """
    query = tile * QUERIES + tl.arange(0, QUERIES)
    start, end = seen_by(spans, query, query < queries, span, SPANS)
    some = end > start
    earlier = query[:, None] < query[None, :]
    before = tl.max(tl.where(earlier & some[:, None], end[:, None], low), axis=0)
    behind = tl.min(tl.where(~earlier & some[:, None], start[:, None], 2147483647), axis=0)
    first = tl.cdiv(before - low, KEYS)
    count = tl.where(some, tl.maximum((behind - low) // KEYS - first, 0), 0)
    return first - tl.sum(tl.where(earlier, count[:, None], 0), axis=0), count


@jit
def _forward(
    q, k, v, spans, out, part, part_most, part_total, used, scale, queries,
    q_t, q_h, k_h, k_s, v_h, v_s,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, SPANS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query, member, real = rows_of(tile, QUERIES, GROUP, PADDED, queries)
    splits = 1
    if SPLITS > 1:
        # Sizes alone fix the grid, as a CUDA graph needs it. The keys that these rows see decide
        # here how many of the splits compute; the others return.
        reach = 0
        for span in tl.static_range(SPANS):
            start, end = seen_by(spans, query, real, span, SPANS)
            low, high = reach_of(start, end)
            _, unseen = unseen_tiles(spans, tile, queries, low, span, SPANS, QUERIES, KEYS)
            reach += high - low - tl.sum(unseen) * KEYS
        splits = tl.maximum(1, tl.minimum(reach // LEAST, SPLITS))
        if split >= splits:
            return
        if (split == 0) & (kv_head == 0):
            tl.store(used + tile, splits)
    head = kv_head * GROUP + member
    d = tl.arange(0, WIDTH)  # DIM rounded up to a power of two; R below is QUERIES * PADDED
    held = real[:, None] & (d < DIM)[None, :]
    rows = tl.load(
        q + query.to(tl.int64)[:, None] * q_t + head[:, None] * q_h + d[None, :],
        mask=held, other=0.0,
    )  # fmt: skip  # [R, D]
    most = tl.full((QUERIES * PADDED,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES * PADDED,), dtype=tl.float32)  # [R]
    acc = tl.zeros((QUERIES * PADDED, WIDTH), dtype=tl.float32)
    keys, values = k + kv_head.to(tl.int64) * k_h, v + kv_head.to(tl.int64) * v_h
    for span in range(SPANS):
        start, end = seen_by(spans, query, real, span, SPANS)
        low, high = reach_of(start, end)
        gap, unseen = unseen_tiles(spans, tile, queries, low, span, SPANS, QUERIES, KEYS)
        tiles = tl.cdiv(high - low, KEYS) - tl.sum(unseen)
        for i in range(split, tiles, splits):  # the splits take turns at the tiles
            # Not an `if` around the body, which would keep the loads from running ahead.
            key_tile = i + tl.sum(tl.where(i >= gap, unseen, 0))
            key = low + key_tile * KEYS + tl.arange(0, KEYS)
            inside = key < high
            at = key.to(tl.int64)
            k_tile = tl.load(
                keys + at[None, :] * k_s + d[:, None],
                mask=inside[None, :] & (d < DIM)[:, None], other=0.0,
            )  # fmt: skip  # [D, S]
            z = tl.dot(rows, k_tile, input_precision=PRECISION) * scale
            # A row's own bounds: the tile's reach is wider.
            sees = (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
            z = tl.where(sees, z, -float("inf"))
            now = tl.maximum(most, tl.max(z, axis=1))
            # The streaming softmax. A row that has seen no key yet is at -inf, and -inf - -inf NaN.
            safe = tl.where(now == -float("inf"), 0.0, now)
            p = tl.exp2(z - safe[:, None])
            shrink = tl.exp2(most - safe)
            v_tile = tl.load(
                values + at[:, None] * v_s + d[None, :],
                mask=inside[:, None] & (d < DIM)[None, :], other=0.0,
            )  # fmt: skip  # [S, D]
            total = total * shrink + tl.sum(p, axis=1)
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
            most = now
    place = query.to(tl.int64) * HEADS + head
    if splits == 1:
        some = total > 0  # a row without keys gives 0
        result = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
        tl.store(
            out + place[:, None] * DIM + d[None, :], result.to(out.dtype.element_ty), mask=held
        )
    else:
        # part [SPLITS, T, H, D], not divided by its total: `_join` does it once for all
        place += split.to(tl.int64) * queries * HEADS
        tl.store(part + place[:, None] * DIM + d[None, :], acc, mask=held)
        tl.store(part_most + place, most, mask=real)
        tl.store(part_total + place, total, mask=real)


@jit
def _join(
    part, part_most, part_total, used, out, rows,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Join one row of one head from the splits that computed; a single one has written the row."""
    row = tl.program_id(0).to(tl.int64)
    splits = tl.load(used + row // HEADS // QUERIES)
    if splits == 1:
        return
    split = tl.arange(0, SPLITS)
    there = split < splits
    d = tl.arange(0, WIDTH)
    place = split * rows + row
    most = tl.load(part_most + place, mask=there, other=-float("inf"))
    largest = tl.max(most, axis=0)
    safe = tl.where(largest == -float("inf"), 0.0, largest)
    weight = tl.exp2(most - safe)  # [SPLITS]; 0 for a split whose keys the row does not see
    total = tl.sum(tl.load(part_total + place, mask=there, other=0.0) * weight, axis=0)
    acc = tl.load(
        part + place[:, None] * DIM + d[None, :],
        mask=there[:, None] & (d < DIM)[None, :], other=0.0,
    )  # fmt: skip
    acc = tl.sum(acc * weight[:, None], axis=0)
    result = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(out + row * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)


@jit
def _write(
    keys, values, slots, k, v, i_h, i_t, j_h, j_t, k_h, k_s, v_h, v_s,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    d = tl.arange(0, WIDTH)
    inside = d < DIM
    x = tl.load(keys + head * i_h + row * i_t + d, mask=inside)
    y = tl.load(values + head * j_h + row * j_t + d, mask=inside)
    tl.store(k + head * k_h + slot * k_s + d, x.to(k.dtype.element_ty), mask=inside)
    tl.store(v + head * v_h + slot * v_s + d, y.to(v.dtype.element_ty), mask=inside)


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, scale: float) -> Tensor:
    """Launch the kernels; arguments checked, T at least 1. Returns ``[T, H, D]``."""
    shape = Shape(q, k, v, spans)
    out = torch.empty((shape.queries, shape.heads, shape.dim), dtype=q.dtype, device=q.device)
    splits = shape.splits()
    parts = (out, out, out, spans)  # unused without splits
    if splits > 1:
        rows = (splits, shape.queries, shape.heads)
        part = torch.empty((*rows, shape.dim), dtype=torch.float32, device=q.device)
        most, total = (torch.empty(rows, dtype=torch.float32, device=q.device) for _ in range(2))
        used = torch.empty(shape.tiles, dtype=torch.int32, device=q.device)
        parts = (part, most, total, used)
    grid = (shape.tiles, shape.kv_heads, splits)
    scale *= math.log2(math.e)  # the kernel's exponentials are to the base 2
    with_tile(shape.keys, lambda keys: _forward[grid](
        q, k, v, spans, out, *parts, scale, shape.queries, *shape.strides,
        **shape.sizes, KEYS=keys, SPLITS=splits, LEAST=shape.least_keys(),
    ))  # fmt: skip
    if splits > 1:
        count = shape.queries * shape.heads
        _join[(count,)](
            *parts, out, count, HEADS=shape.heads, QUERIES=shape.tile, DIM=shape.dim,
            WIDTH=shape.width, SPLITS=splits,
        )  # fmt: skip
    return out


def with_tile(keys: int, launch: Callable[[int], object]) -> None:
    """Launch with tiles of `keys` keys, or of fewer where the GPU has too little shared memory."""
    from triton.runtime.errors import OutOfResources

    while True:
        try:
            launch(keys)
            return
        except OutOfResources:
            if keys <= _LEAST_TILE:
                raise
            keys //= 2


class Shape:
    """Derive the sizes, strides and tiles of a call for the kernels."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spans: Tensor):
        self.queries, self.heads, self.dim = q.shape
        self.kv_heads, self.slots = k.shape[:2]
        self.group = self.heads // self.kv_heads
        # Dream has 28 heads over 4: a group of 7 in rows for 8.
        self.padded = triton.next_power_of_2(self.group)
        # tl.dot takes at least 16 a side, here and in the rows of a tile.
        self.width = max(16, triton.next_power_of_2(self.dim))
        self.strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        # Tiles whose registers suffice (`benchmarks.compiled_kernels`); fp32 has no tensor cores.
        self.element_bytes = q.element_size()
        wide = self.element_bytes == 4
        wanted = 64 if self.queries > 16 and not wide else 16  # rows
        self.tile = max(1, wanted // self.padded, -(-16 // self.padded))  # queries
        self.tiles = triton.cdiv(self.queries, self.tile)
        self.keys = (16 if wide else 32) if self.width > 128 else 32 if wide else 64
        self.sizes = {
            "HEADS": self.heads,
            "GROUP": self.group,
            "PADDED": self.padded,
            "DIM": self.dim,
            "WIDTH": self.width,
            "SPANS": spans.shape[1],
            "QUERIES": self.tile,
            "PRECISION": "ieee",
            # Four warps of 64 rows multiply 64 x 128 at once, and two blocks fit on an SM.
            "num_warps": 8 if wanted == 64 and self.width > 128 else 4,
        }
        if wanted == 64 and self.splits() > 1:  # what the parts need would spill
            self.keys = min(self.keys, 32)

    def least_keys(self) -> int:
        """Return the fewest keys that a split may read. Each split writes an fp32 row with its
        maximum and total for every row of the tile, and the join reads it; that traffic must stay
        within `_JOIN_SHARE` of the keys' and values'."""
        rows = min(self.tile, self.queries) * self.group
        joined = 2 * 4 * rows * (self.dim + 2)  # bytes a split
        return math.ceil(joined / (_JOIN_SHARE * 2 * self.dim * self.element_bytes))

    def splits(self) -> int:
        """Return how many programs may share the keys of a tile of queries; a power of two."""
        # A decoding step has few rows on a long cache: one program a tile would leave most of the
        # GPU idle. Only sizes count here: the spans are on the GPU, where `_forward` uses as many
        # of these splits as pay.
        programs = self.tiles * self.kv_heads
        wanted = min(_FILLS_A_GPU // max(1, programs), self.slots // self.least_keys(), 64)
        return 1 << (max(1, wanted).bit_length() - 1)  # rounded down to a power of two


def _check(q: Tensor, k: Tensor, v: Tensor, spans: Tensor) -> None:
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "expected q [T, H, D] and k, v [H_kv, S, D], got "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if not k.shape[0] or q.shape[1] % k.shape[0]:
        raise ValueError(f"{q.shape[1]} query heads do not share {k.shape[0]} key heads evenly")
    if spans.dtype != torch.int32 or spans.dim() != 3 or spans.shape[0] != len(q):
        raise ValueError(
            f"spans must be int32 [{len(q)}, K, 2], got {spans.dtype} {list(spans.shape)}"
        )
    check_alike("q, k and v", (q, k, v), (spans,))


def validate_spans(spans: Tensor, keys: int) -> None:
    """Raise ValueError unless spans ``[..., queries, K, 2]`` are well formed over `keys` keys."""
    if spans.dtype != torch.int32 or spans.dim() < 3 or spans.shape[-1] != 2:
        raise ValueError(
            f"spans must be int32 [..., queries, K, 2], got {spans.dtype} {list(spans.shape)}"
        )
    if not 1 <= spans.shape[-2] <= MAX_SPANS:
        raise ValueError(f"spans must have 1 to {MAX_SPANS} ranges a query, got {spans.shape[-2]}")
    starts, ends = spans.unbind(-1)
    if bool((starts > ends).any()):
        raise ValueError("a span starts after its end")
    filled = ends > starts  # an empty range may lie anywhere: padding has [0, 0), a shift moves it
    if bool((filled & ((starts < 0) | (ends > keys))).any()):
        raise ValueError(f"a span reaches outside the keys [0, {keys})")
    for i in range(spans.shape[-2]):
        for j in range(i):
            both = filled[..., i] & filled[..., j]
            apart = (ends[..., i] <= starts[..., j]) | (ends[..., j] <= starts[..., i])
            if bool((both & ~apart).any()):
                # A kernel goes range by range and would count the shared keys twice.
                raise ValueError("two spans of one query overlap")


@self_check("span_attention")
def _check_span_attention(dtype: torch.dtype, device: torch.device, dim: int) -> None:
    """Compare with two heads to a key head: few rows on many keys and the other way round."""
    if dim not in HEAD_DIMS:
        raise AssertionError(f"its head dimension must be one of {HEAD_DIMS}, got {dim}")
    for queries, slots in ((5, 300), (70, 70)):
        ends = torch.arange(1, queries + 1) * slots // queries
        spans = torch.stack((ends // 3, ends), -1)[:, None].to(device, torch.int32)
        shapes = ((queries, 4, dim), (2, slots, dim), (2, slots, dim))
        inputs = random_inputs(shapes, dtype, device)

        def compute(given: Sequence[Tensor], kernel: bool, where: Tensor = spans) -> list[Tensor]:
            q, k, v = given
            return [span_attention(q, k, v, where, kernel=kernel)]

        compare("span attention", inputs, compute)


@self_check("write_slots")
def _check_write_slots(dtype: torch.dtype, device: torch.device, dim: int) -> None:
    """Raise unless the rows are in their slots and nothing else has changed."""
    shapes = ((2, 3, dim), (2, 3, dim), (2, 9, dim), (2, 9, dim))
    keys, values, k, v = random_inputs(shapes, dtype, device)
    slots = torch.tensor([7, 0, 4], device=device)
    found = []
    for kernel in (True, False):
        own_k, own_v = k.clone(), v.clone()
        write_slots(own_k, own_v, slots, keys, values, kernel=kernel)
        found.append(torch.stack((own_k, own_v)))
    if not torch.equal(*found):
        raise AssertionError("the slots hold something else than was written")
