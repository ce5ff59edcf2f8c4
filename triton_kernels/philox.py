"""Triton's random numbers in PyTorch: Philox 4x32-10 (Salmon et al. 2011) by key and counter.

What a kernel draws with ``tl.rand4x(seed, offset)`` the reference draws too, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUND = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_SCALE = 4.6566127342e-10  # the largest int32 times this is below 1 in fp32


def uniform(seeds: Tensor, rows: Tensor, count: int) -> Tensor:
    """fp32 ``[N, count]`` in [0, 1), four numbers a counter: at j of line i number j % 4 of the key
    seeds[i] and the counter (j // 4, rows[i], 0, 0).

    seeds, rows: int64 ``[N]``, rows below 2**32.
    """
    c0 = torch.arange(-(-count // 4), device=seeds.device)[None]  # [1, count / 4]
    c1 = rows[:, None]
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = (seeds & _LOW)[:, None], ((seeds >> 32) & _LOW)[:, None]
    for _ in range(10):
        # int64 keeps all 64 bits of a product, with the highest for its sign.
        a, b = _ROUND[0] * c0, _ROUND[1] * c2
        c0, c2 = ((b >> 32) & _LOW) ^ c1 ^ k0, ((a >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = b & _LOW, a & _LOW
        k0, k1 = (k0 + _KEY[0]) & _LOW, (k1 + _KEY[1]) & _LOW
    four = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)  # [N, count / 4, 4]
    drawn = four.flatten(1)[:, :count]
    signed = torch.where(drawn > 0x7FFFFFFF, drawn ^ _LOW, drawn)  # ~x of a negative int32
    return signed.to(torch.float32) * _SCALE
