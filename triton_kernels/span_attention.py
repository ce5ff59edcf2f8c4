"""Attention over spans: each query sees a union of at most three key ranges.

    out[t, h] = softmax(scale * q[t, h] . k[h // group, j] for j in spans[t]) @ v[h // group, j]

`span_attention_reference` is the plain PyTorch computation: the path of the CPU and the truth
that the kernel is tested against. `span_attention` runs the kernel where `use_kernel` says so. It
is made for decoding and has no backward: training takes `triton_kernels.flex` or the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor

from triton_kernels.choice import use_kernel
from triton_kernels.self_check import compare, random_inputs, self_check

MAX_SPANS = 3  # every mask of this field is a union of at most three ranges (`d2f.spans`)
HEAD_DIMS = (32, 64, 80, 96, 128, 256)


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
    absolute slots, K at most 3, the ranges of a row apart; scale defaults to ``D ** -0.5``.
    Returns ``[T, H, D]`` in q's dtype; a row that sees no key gives 0. kernel: as `use_kernel`
    says; fp64 is the reference's, and so is a call that wants a gradient. check: look into the
    spans, which on a GPU waits for them.

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
    from triton_kernels import span_attention_tiles as tiles

    # The kernel takes the strides of rows and heads, never that within a head: a transposed tensor
    # is read as it lies.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return tiles.forward(q, k, v, spans.contiguous(), scale)


def can_run(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel can compute these: a head dimension that it is compiled for, and no
    gradient."""
    return q.shape[-1] in HEAD_DIMS and not wants_gradient(q, k, v)


def wants_gradient(*given: Tensor) -> bool:
    """Whether what is computed of these is to be differentiated."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


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
    if use_kernel("write_slots", k, kernel):
        from triton_kernels import span_attention_tiles as tiles

        keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
        tiles.write_slots(k, v, slots, keys, values)
        return
    # The cache's dtype: RoPE in fp32 gives keys in fp32.
    k.index_copy_(1, slots, keys.to(k.dtype))
    v.index_copy_(1, slots, values.to(v.dtype))


def span_mask(spans: Tensor, keys: int, first_key: int = 0) -> Tensor:
    """Boolean mask ``[..., queries, keys]`` of spans ``[..., queries, K, 2]`` over the keys
    ``[first_key, first_key + keys)``: True where the query sees the key."""
    key = torch.arange(first_key, first_key + keys, dtype=spans.dtype, device=spans.device)
    starts, ends = spans[..., None, 0], spans[..., None, 1]  # [..., queries, K, 1]
    inside = [
        (key >= starts[..., i, :]) & (key < ends[..., i, :]) for i in range(spans.shape[-2])
    ]  # K x [..., queries, keys]
    mask = inside[0]
    for part in inside[1:]:
        mask = mask | part
    return mask


def span_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor, *, scale: float | None = None
) -> Tensor:
    """Span attention in plain PyTorch, heads grouped, for a batch.

    q ``[B, H, T, D]``; k, v ``[B, H_kv, S, D]`` with H a multiple of H_kv; spans int32
    ``[B or 1, T, K, 2]`` over the S keys; scale defaults to ``D ** -0.5``. Returns
    ``[B, H, T, D]`` in q's dtype; a query that sees no key gives 0.
    """
    return masked_attention(q, k, v, span_mask(spans, k.shape[2]), scale=scale)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float | None = None
) -> Tensor:
    """`span_attention_reference` with the mask ``[B or 1, T, S]`` already built, so that the
    layers of one forward share it; None where every query sees every key."""
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not share {kv_heads} key heads evenly")
    if heads != kv_heads:  # [B, H, S, D], head h reads key head h // (H / H_kv)
        k, v = (repeat(x, "b h s d -> b (h g) s d", g=heads // kv_heads) for x in (k, v))
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    # mask [B or 1, 1, T, S]: the same for all heads
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale)
    if q.device.type == "cpu":  # gives 0 for a query that sees no key, of itself
        return out
    return torch.where(mask.any(dim=-1)[:, None, :, None], out, 0.0)


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
    if len({x.dtype for x in (q, k, v)}) > 1 or not q.is_floating_point():
        raise ValueError(f"q, k and v must share a floating dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    devices = {str(x.device) for x in (q, k, v, spans)}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {', '.join(sorted(devices))}")


@self_check("span_attention")
def _check_span_attention(dtype: torch.dtype, device: torch.device, dim: int) -> None:
    """Two to a key head, few rows on many keys and the other way round."""
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
    """What is written is there, and nothing else has changed."""
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
