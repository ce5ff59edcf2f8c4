"""Backward kernels of `span_attention`.

With z = scale * q k^T, p = e^(z - lse), out = p v, delta = sum(out * d_out):
d_v = p^T d_out, d_z = p * (d_out v^T - delta), d_q = scale * d_z k, d_k = scale * d_z^T q.

One kernel has a program for each tile of queries and sums over keys, the other one for each tile of
keys and sums over queries. Each gradient has one program that writes it, in one order of summation:
nothing is added atomically, and p is computed twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.span_attention_tiles import Shape, rows_of, seen_by, with_tile


@triton.jit
def _backward_queries(
    q, k, v, spans, d_out, log_sum, delta, d_q, scale, queries,
    q_t, q_h, k_h, k_s, v_h, v_s,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, SPANS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    query, member, real = rows_of(tile, QUERIES, GROUP, PADDED, queries)
    head = kv_head * GROUP + member
    d = tl.arange(0, WIDTH)
    held = real[:, None] & (d < DIM)[None, :]
    place = query.to(tl.int64) * HEADS + head
    flat = place[:, None] * DIM + d[None, :]
    rows = tl.load(
        q + query.to(tl.int64)[:, None] * q_t + head[:, None] * q_h + d[None, :],
        mask=held, other=0.0,
    )  # fmt: skip
    upstream = tl.load(d_out + flat, mask=held, other=0.0)  # [R, D]
    lse = tl.load(log_sum + place, mask=real, other=0.0)  # [R]
    own = tl.load(delta + place, mask=real, other=0.0)
    acc = tl.zeros((QUERIES * PADDED, WIDTH), dtype=tl.float32)
    keys, values = k + kv_head.to(tl.int64) * k_h, v + kv_head.to(tl.int64) * v_h
    for span in tl.static_range(SPANS):
        start, end = seen_by(spans, query, real, span, SPANS)
        low = tl.min(tl.where(end > start, start, 2147483647))
        high = tl.max(tl.where(end > start, end, 0))
        for i in range(tl.cdiv(tl.maximum(high - low, 0), KEYS)):
            key = low + i * KEYS + tl.arange(0, KEYS)
            at, there = key.to(tl.int64), (key < high)[:, None] & (d < DIM)[None, :]
            k_tile = tl.load(keys + at[:, None] * k_s + d[None, :], mask=there, other=0.0)
            v_tile = tl.load(values + at[:, None] * v_s + d[None, :], mask=there, other=0.0)
            z = tl.dot(rows, tl.trans(k_tile), input_precision=PRECISION) * scale
            sees = (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
            # Chosen, not multiplied: of a row that sees no key lse is -inf, and the exp infinite.
            p = tl.where(sees, tl.exp(z - lse[:, None]), 0.0)  # [R, KEYS]
            d_p = tl.dot(upstream, tl.trans(v_tile), input_precision=PRECISION)
            d_z = p * (d_p - own[:, None]) * scale
            acc = tl.dot(d_z.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    tl.store(d_q + flat, acc.to(d_q.dtype.element_ty), mask=held)


@triton.jit
def _backward_keys(
    q, k, v, spans, bounds, d_out, log_sum, delta, d_k, d_v, scale, queries, slots, tiles,
    q_t, q_h, k_h, k_s, v_h, v_s,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, SPANS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of keys against the tiles of queries whose bounds [tiles, 2] reach it."""
    first, kv_head = tl.program_id(0) * KEYS, tl.program_id(1)
    key = first + tl.arange(0, KEYS)
    d = tl.arange(0, WIDTH)
    there = (key < slots)[:, None] & (d < DIM)[None, :]
    at = key.to(tl.int64)[:, None]
    k_tile = tl.load(k + kv_head.to(tl.int64) * k_h + at * k_s + d[None, :], mask=there, other=0.0)
    v_tile = tl.load(v + kv_head.to(tl.int64) * v_h + at * v_s + d[None, :], mask=there, other=0.0)
    k_acc = tl.zeros((KEYS, WIDTH), dtype=tl.float32)
    v_acc = tl.zeros((KEYS, WIDTH), dtype=tl.float32)
    for tile in range(tiles):
        # Most tiles of queries of a packed row are of other sequences and see none of these keys.
        low, high = tl.load(bounds + 2 * tile), tl.load(bounds + 2 * tile + 1)
        if (low < first + KEYS) & (high > first):
            # All heads that share this key head are rows of the tile, so their gradients of its
            # keys and values are summed here too.
            query, member, real = rows_of(tile, QUERIES, GROUP, PADDED, queries)
            head = kv_head * GROUP + member
            held = real[:, None] & (d < DIM)[None, :]
            place = query.to(tl.int64) * HEADS + head
            rows = tl.load(
                q + query.to(tl.int64)[:, None] * q_t + head[:, None] * q_h + d[None, :],
                mask=held, other=0.0,
            )  # fmt: skip
            upstream = tl.load(d_out + place[:, None] * DIM + d[None, :], mask=held, other=0.0)
            lse = tl.load(log_sum + place, mask=real, other=0.0)
            own = tl.load(delta + place, mask=real, other=0.0)
            sees = tl.zeros((QUERIES * PADDED, KEYS), dtype=tl.int1)  # by any of its ranges
            for span in tl.static_range(SPANS):
                start, end = seen_by(spans, query, real, span, SPANS)
                sees |= (key[None, :] >= start[:, None]) & (key[None, :] < end[:, None])
            z = tl.dot(rows, tl.trans(k_tile), input_precision=PRECISION) * scale
            p = tl.where(sees, tl.exp(z - lse[:, None]), 0.0)
            p_cast = p.to(upstream.dtype)
            v_acc = tl.dot(tl.trans(p_cast), upstream, v_acc, input_precision=PRECISION)
            d_p = tl.dot(upstream, tl.trans(v_tile), input_precision=PRECISION)
            d_z = (p * (d_p - own[:, None]) * scale).to(rows.dtype)
            k_acc = tl.dot(tl.trans(d_z), rows, k_acc, input_precision=PRECISION)
    flat = (kv_head.to(tl.int64) * slots + at) * DIM + d[None, :]
    tl.store(d_k + flat, k_acc.to(d_k.dtype.element_ty), mask=there)
    tl.store(d_v + flat, v_acc.to(d_v.dtype.element_ty), mask=there)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Tensor,
    scale: float,
    out: Tensor,
    log_sum: Tensor,
    d_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, contiguous."""
    shape = Shape(q, k, v, spans)
    d_out = d_out.contiguous()
    # Once for each row: d_z needs the same sum for every key that the row sees.
    delta = (out.float() * d_out.float()).sum(-1)  # [T, H]
    d_q = torch.empty_like(out)
    d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    rest = (scale, shape.queries)
    with_tile(shape.keys, lambda keys: _backward_queries[(shape.tiles, shape.kv_heads)](
        q, k, v, spans, d_out, log_sum, delta, d_q, *rest, *shape.strides,
        **shape.sizes, KEYS=keys,
    ))  # fmt: skip
    bounds = _bounds(spans, shape.tile)
    with_tile(shape.keys, lambda keys: _backward_keys[
        (triton.cdiv(shape.slots, keys), shape.kv_heads)
    ](
        q, k, v, spans, bounds, d_out, log_sum, delta, d_k, d_v, *rest, shape.slots, shape.tiles,
        *shape.strides, **shape.sizes, KEYS=keys,
    ))  # fmt: skip
    return d_q, d_k, d_v


def _bounds(spans: Tensor, tile: int) -> Tensor:
    """First and one past the last key that each tile of queries sees, int32 ``[tiles, 2]``."""
    start, end = spans[..., 0], spans[..., 1]  # [T, K]
    seen = end > start
    # Empty ranges may lie anywhere and must not widen the bounds.
    low = torch.where(seen, start, torch.iinfo(torch.int32).max).amin(1)  # [T]
    high = torch.where(seen, end, 0).amax(1)
    # The last tile is filled up with rows that see nothing, so that each tile has as many.
    lacking = -len(low) % tile
    low = torch.nn.functional.pad(low, (0, lacking), value=torch.iinfo(torch.int32).max)
    high = torch.nn.functional.pad(high, (0, lacking))
    return torch.stack((low.view(-1, tile).amin(1), high.view(-1, tile).amax(1)), 1).contiguous()
