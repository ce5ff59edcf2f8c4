"""What a decoder needs of a row of logits: the chosen token and how sure the model is of it.

With z the logits of a row and p = softmax(z) over the whole vocabulary:

    token        argmax of z without the mask id; drawn where `draws.Draws` says how
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
from triton_kernels.draws import Draws
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
    draws: Draws | None = None,
) -> Confidence:
    """`confidence_of_logits` in plain PyTorch."""
    _check(logits.shape[0], logits.shape[-1], mask_id, named, draws)
    wide = logits.float()  # [N, V]
    allowed = without(wide, mask_id)
    token = allowed.argmax(-1) if draws is None else draws.choose(allowed)
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


def without(logits: Tensor, mask_id: int | None) -> Tensor:
    """Logits ``[N, V]`` whose mask column is -inf. The mask id is never chosen, but keeps its part
    of the probability: p is over the whole vocabulary, as in the official code, or thresholds would
    mean something else."""
    if mask_id is None:
        return logits
    allowed = logits.clone()
    allowed[:, mask_id] = -torch.inf
    return allowed


def confidence_of_logits(
    logits: Tensor,
    *,
    mask_id: int | None = None,
    named: Tensor | None = None,
    draws: Draws | None = None,
    kernel: bool | None = None,
) -> Confidence:
    """Token and confidence of each row of logits ``[N, V]``.

    named: int64 ``[N]``. draws: how tokens are drawn; None takes the most likely ones. kernel: as
    `use_kernel` says. Raises ValueError.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits must be [N, V], got {list(logits.shape)}")
    if not use_kernel("confidence", logits, kernel) or not len(logits):
        return confidence_reference(logits, mask_id=mask_id, named=named, draws=draws)
    _check(len(logits), logits.shape[1], mask_id, named, draws)
    from triton_kernels import confidence_tiles

    floor = None
    if draws is not None and draws.is_filtered:
        floor = draws.floor(without(logits.float(), mask_id))
    return Confidence(*confidence_tiles.of_logits(logits, mask_id, named, draws, floor))


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
    """The same tokens, ties included and drawn ones too, and the same probabilities."""
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
