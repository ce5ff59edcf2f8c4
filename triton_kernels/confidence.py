"""What a decoder needs of a row of logits: the chosen token and how sure the model is of it.

With z the logits of a row and p = softmax(z) over the whole vocabulary:

    token        argmax of z without the mask id; sampled: of z / temperature + Gumbel noise
    probability  p[token]
    entropy      -sum_v p[v] log p[v], in nats
    margin       difference of the two largest p without the mask id
    named        p[named], of a token that the caller names
    named_log    log p[named], also where p[named] is 0 in fp32

`confidence_of_logits` computes them, its truth is `confidence_reference`; both in fp32, whatever
the logits' dtype. Of equal logits the lowest id is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triton_kernels.choice import use_kernel
from triton_kernels.philox import uniform
from triton_kernels.self_check import random_inputs, self_check


@dataclass(frozen=True)
class Confidence:
    """Of each row ``[N]``: token int64, the others fp32; named and named_log None where no token
    was named."""

    token: Tensor
    probability: Tensor
    entropy: Tensor
    margin: Tensor
    named: Tensor | None
    named_log: Tensor | None


def confidence_reference(
    logits: Tensor,
    *,
    mask_id: int | None = None,
    named: Tensor | None = None,
    temperature: float = 0.0,
    seed: int | Tensor | None = None,
) -> Confidence:
    """`confidence_of_logits` in plain PyTorch."""
    _check(logits.shape[0], logits.shape[-1], mask_id, named, temperature, seed)
    wide = logits.float()  # [N, V]
    # The mask id is never chosen, but keeps its part of the probability: p is over the whole
    # vocabulary, as in the official code, or thresholds would mean something else.
    allowed = wide
    if mask_id is not None:
        allowed = wide.clone()
        allowed[:, mask_id] = -torch.inf
    score = allowed
    if temperature > 0:
        assert seed is not None
        # Gumbel's trick: the argmax of log p / temperature + noise is a sample of the softmax.
        noise = uniform(_seeds(seed, wide), wide.shape[1])
        score = allowed / temperature - torch.log(-torch.log(noise))
    token = score.argmax(-1)
    # Confidence is of the model: without temperature and noise, whichever token was chosen.
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


def confidence_of_logits(
    logits: Tensor,
    *,
    mask_id: int | None = None,
    named: Tensor | None = None,
    temperature: float = 0.0,
    seed: int | Tensor | None = None,
    kernel: bool | None = None,
) -> Confidence:
    """Token and confidence of each row of logits ``[N, V]``.

    named: int64 ``[N]``. temperature: 0 is greedy; above it seed is needed, one for all rows or
    int64 ``[N]``, and row and column decide the noise, not the batch. kernel: as `use_kernel` says.
    Raises ValueError.
    """
    options = {"mask_id": mask_id, "named": named, "temperature": temperature, "seed": seed}
    if logits.dim() != 2:
        raise ValueError(f"logits must be [N, V], got {list(logits.shape)}")
    if not use_kernel("confidence", logits, kernel) or not len(logits):
        return confidence_reference(logits, **options)  # type: ignore[arg-type]
    _check(len(logits), logits.shape[1], mask_id, named, temperature, seed)
    from triton_kernels import confidence_tiles

    seeds = None if not temperature or seed is None else _seeds(seed, logits)
    return Confidence(*confidence_tiles.of_logits(logits, mask_id, named, temperature, seeds))


def _seeds(seed: int | Tensor, rows: Tensor) -> Tensor:
    """One seed for each row, int64 ``[N]``: a row's noise then does not depend on its batch."""
    if isinstance(seed, Tensor):
        return seed.to(rows.device)
    return torch.full((len(rows),), seed, dtype=torch.int64, device=rows.device)


def _check(
    rows: int,
    vocabulary: int,
    mask_id: int | None,
    named: Tensor | None,
    temperature: float,
    seed: int | Tensor | None,
) -> None:
    if vocabulary < 1:
        raise ValueError("expected at least one token in the vocabulary, got 0")
    if mask_id is not None and not 0 <= mask_id < vocabulary:
        raise ValueError(f"mask_id must lie in [0, {vocabulary}), got {mask_id}")
    for name, given in (("named", named), ("seed", seed)):
        if isinstance(given, Tensor) and (given.shape != (rows,) or given.dtype != torch.int64):
            raise ValueError(
                f"{name} must be int64 [{rows}], got {given.dtype} {list(given.shape)}"
            )
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    if temperature > 0 and seed is None:
        raise ValueError("a temperature above 0 needs a seed")


@self_check("confidence")
def _check_confidence(dtype: torch.dtype, device: torch.device, dim: int) -> None:
    """The same tokens, ties included, and the same probabilities."""
    logits = 3 * random_inputs(((6, 5000),), dtype, device)[0]
    # Equal largest logits in two tiles: the lower id must win.
    logits[0, 30] = logits[0, 4000] = logits.max() + 1
    named = torch.arange(6, device=device)
    ours, plain = (
        confidence_of_logits(logits, mask_id=7, named=named, kernel=kernel)
        for kernel in (True, False)
    )
    if not torch.equal(ours.token, plain.token):
        raise AssertionError("it chooses other tokens than the plain computation")
    for name in ("probability", "entropy", "margin", "named", "named_log"):
        difference = (getattr(ours, name) - getattr(plain, name)).abs().max().item()
        if not difference < 1e-4:
            raise AssertionError(f"its {name} differs by {difference:.2g} from the plain one")
