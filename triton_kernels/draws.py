"""Draw tokens at a temperature, each row on its own:

    token = argmax over v of z[v] / temperature - log(-log(u[v])),    u[v] uniform in [0, 1)

is a draw from softmax(z / temperature) (Gumbel's trick). u comes from Philox 4x32-10 (Salmon et al.
2011): its key is the request's seed, its counter the token's id and the row's number within the
request. So a row draws the same in any batch, here and in a kernel (by ``tl.rand4x(seed,
offset)``), on any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROUND = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_SCALE = 4.6566127342e-10  # the largest int32 times this is below 1 in fp32


def uniform(seeds: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return fp32 ``[N, count]`` in [0, 1), Triton's random numbers. Element [i, j] is number j % 4
    of the key seeds[i] and the counter (j // 4, rows[i], 0, 0).

    seeds, rows: int64 ``[N]``, rows below 2**32.
    """
    c0 = torch.arange(-(-count // 4), device=seeds.device)[None]  # [1, count / 4]
    c1 = rows[:, None]
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = (seeds & _LOW)[:, None], ((seeds >> 32) & _LOW)[:, None]
    for _ in range(10):
        # int64 keeps all 64 bits of a product, the highest as its sign.
        a, b = _ROUND[0] * c0, _ROUND[1] * c2
        c0, c2 = ((b >> 32) & _LOW) ^ c1 ^ k0, ((a >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = b & _LOW, a & _LOW
        k0, k1 = (k0 + _KEY[0]) & _LOW, (k1 + _KEY[1]) & _LOW
    four = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)  # [N, count / 4, 4]
    drawn = four.flatten(1)[:, :count]
    signed = torch.where(drawn > 0x7FFFFFFF, drawn ^ _LOW, drawn)  # ~x of a negative int32
    return signed.to(torch.float32) * _SCALE


@dataclass(frozen=True)
class Draws:
    """Say how to draw the token of each row ``[N]``.

    seed: int64, of its request. row: int64 below 2**32, its number among the rows of the request.
    temperature: fp32; 0 takes the most likely token. top_k: int64, 0 is off, and top_p: fp32, 1 is
    off: they limit the tokens (`floor`); both None where every row may draw any.
    """

    seed: Tensor
    row: Tensor
    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None

    @property
    def is_filtered(self) -> bool:
        """Say whether there is a `floor`."""
        return self.top_k is not None

    def floor(self, allowed: Tensor) -> Tensor:
        """Return the least logit that may be drawn in each row, fp32 ``[N]``: the last of the
        top_k, and of the smallest set whose probability at the temperature reaches top_p. Equal
        logits stay together; the largest always stays.

        allowed: logits ``[N, V]``, -inf where a token is never chosen.
        """
        assert self.top_k is not None and self.top_p is not None
        ordered = allowed.sort(-1, descending=True).values  # [N, V]
        count = ordered.shape[1]
        most = torch.where(self.top_k > 0, self.top_k, count).clamp(max=count)
        by_k = ordered.gather(-1, most[:, None] - 1)  # [N, 1]
        # top_p is a share of what top_k leaves, so it comes second.
        p = (ordered.masked_fill(ordered < by_k, -torch.inf) / self._divisor).softmax(-1)
        # Kept: every token before whose own the probabilities do not yet sum to top_p.
        kept = (p.cumsum(-1) - p < self.top_p[:, None]).sum(-1, keepdim=True).clamp(min=1)
        by_p = torch.maximum(by_k, ordered.gather(-1, kept - 1))
        return torch.where(self.top_p < 1, by_p[:, 0], by_k[:, 0])

    def choose(self, allowed: Tensor) -> Tensor:
        """Draw tokens ``[N]`` from such logits; of equal ones the lowest id."""
        noise = uniform(self.seed, self.row, allowed.shape[1])
        kept = allowed
        if self.is_filtered:
            kept = torch.where(allowed < self.floor(allowed)[:, None], -torch.inf, allowed)
        drawn = kept / self._divisor - torch.log(-torch.log(noise))
        return torch.where(self.temperature[:, None] > 0, drawn, allowed).argmax(-1)

    @property
    def _divisor(self) -> Tensor:
        """Return temperatures ``[N, 1]``, 1 where nothing is drawn."""
        return torch.where(self.temperature > 0, self.temperature, 1.0)[:, None]
