"""Triton's random numbers in PyTorch: Philox 4x32-10 (Salmon et al. 2011) by seed and offset.

What a kernel draws with ``tl.rand(seed, offset)`` the reference draws too, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUND = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_SCALE = 4.6566127342e-10  # the largest int32 times this is below 1 in fp32


def uniform(seeds: Tensor, count: int) -> Tensor:
    """fp32 ``[N, count]`` in [0, 1): row i has the numbers of seeds[i] at offsets 0..count-1.

    seeds: int64 ``[N]``.
    """
    offset = torch.arange(count, device=seeds.device)[None].expand(len(seeds), -1)
    zero = torch.zeros_like(offset)
    c0, c1, c2, c3 = offset & _LOW, offset >> 32, zero, zero
    k0, k1 = (seeds & _LOW)[:, None], ((seeds >> 32) & _LOW)[:, None]
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = _product(_ROUND[0], c0), _product(_ROUND[1], c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEY[0]) & _LOW, (k1 + _KEY[1]) & _LOW
    signed = torch.where(c0 > 0x7FFFFFFF, c0 ^ _LOW, c0)  # ~x of a negative int32
    return signed.to(torch.float32) * _SCALE


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of factor * x, both below 2**32, without leaving int64."""
    low, high = factor * (x & 0xFFFF), factor * (x >> 16)  # below 2**48
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & _LOW
