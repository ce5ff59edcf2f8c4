"""Attention over spans: each query sees a union of at most three key ranges.

    out[h, t] = softmax(scale * q[h, t] . k[h // group, j] for j in spans[t]) @ v[h // group, j]

`span_attention_reference` is the plain PyTorch computation: the path of the CPU and the truth
that a kernel is tested against. `span_attention` is where a kernel is chosen by device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor


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
    """Span attention in plain PyTorch, heads grouped.

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
    if heads != kv_heads:
        k, v = (repeat(x, "b h s d -> b (h g) s d", g=heads // kv_heads) for x in (k, v))
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale)
    if q.device.type == "cpu":  # gives 0 for a query that sees no key, of itself
        return out
    return torch.where(mask.any(dim=-1)[:, None, :, None], out, 0.0)


def span_attention(device: torch.device) -> Callable[..., Tensor] | None:
    """The kernel for tensors on `device`, or None where the reference is what runs."""
    return KERNELS.get(device.type)


KERNELS: dict[str, Callable[..., Tensor]] = {}
"""Span attention kernels by device type; empty until a kernel has passed its tests."""
