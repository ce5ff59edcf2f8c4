"""From logits to predictions: greedy or sampled, in fp32, the mask id never chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2f.errors import NonFiniteLogitsError
from decode.step import Ints, Predictions
from triton_kernels.choice import use_kernel
from triton_kernels.confidence import Confidence, confidence_of_logits, confidence_reference


@dataclass(frozen=True)
class Sampling:
    """How a request chooses tokens; temperature 0 is greedy, top_k None and top_p 1 are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0


class Sampler:
    """The choice of one request's tokens, with a generator of its own: what it draws does not
    depend on the batch that it is in."""

    def __init__(self, sampling: Sampling, mask_id: int | None):
        self.sampling = sampling
        self.mask_id = mask_id
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> Tensor:
        """Token ids ``[N]`` from fp32 logits ``[N, V]`` whose mask column is -inf."""
        settings = self.sampling
        if settings.temperature == 0:
            return logits.argmax(-1)
        scaled = keep_top(logits / settings.temperature, settings.top_k, settings.top_p)
        uniform = torch.rand(logits.shape, generator=self.generator)
        gumbel = -torch.log(-torch.log(uniform.clamp(min=1e-20, max=1 - 1e-7)))
        return (scaled + gumbel.to(logits.device)).argmax(-1)


def keep_top(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Logits ``[N, V]`` with -inf outside the top_k and outside the smallest set whose probability
    reaches top_p (the most likely token always stays)."""
    if top_k is not None and top_k < logits.shape[-1]:
        floor = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, index, before >= top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits


@dataclass(frozen=True)
class Wanted:
    """What one request wants of its `count` rows; named and uncertainty as in `Step`."""

    sampler: Sampler
    count: int
    named: Ints | None = None
    uncertainty: bool = False


def predict(logits: Tensor, groups: list[Wanted], forward: int) -> list[Predictions]:
    """Predictions of each group from logits ``[N, V]`` of one model, rows group after group.

    Raises NonFiniteLogitsError that names the forward.
    """
    columns = _by_kernel(logits, groups)
    if columns is None:
        columns = _plain(logits, groups)
    # One transfer, and with it the only wait for the device in a forward.
    table = torch.stack([column.double() for column in columns]).cpu().numpy()
    return split(table, groups, forward)


def split(table: NDArray[np.float64], groups: list[Wanted], forward: int) -> list[Predictions]:
    """Predictions of each group from a table ``[2 to 5, N or more]`` of what `Predictions` has, in
    its order. Raises NonFiniteLogitsError that names the forward."""
    count = sum(group.count for group in groups)
    if not np.isfinite(table[1, :count]).all():
        raise NonFiniteLogitsError(f"the model gave NaN or infinite logits at forward {forward}")
    tokens, values = table[0].astype(np.int64), table[1:].astype(np.float32)
    results, start = [], 0
    for group in groups:
        part = slice(start, start + group.count)
        named = None if group.named is None else values[1, part]
        scores = (values[2, part], values[3, part]) if group.uncertainty else (None, None)
        results.append(Predictions(tokens[part], values[0, part], named, *scores))
        start = part.stop
    return results


def _by_kernel(logits: Tensor, groups: list[Wanted]) -> list[Tensor] | None:
    """Columns of the table by the kernel, None where it cannot make them or is not chosen."""
    if any(group.sampler.sampling.temperature for group in groups) or not use_kernel(
        "confidence", logits
    ):
        return None
    named = _named(groups, logits.device)
    mask_id = groups[0].sampler.mask_id
    found = confidence_of_logits(logits, mask_id=mask_id, named=named, kernel=True)
    return [found.token, found.probability, *_more(found, groups)]


def _plain(logits: Tensor, groups: list[Wanted]) -> list[Tensor]:
    """Columns of the table."""
    wide, mask_id = logits.float(), groups[0].sampler.mask_id
    allowed = wide
    if mask_id is not None:
        allowed = wide.clone()
        allowed[:, mask_id] = -torch.inf
    if any(group.sampler.sampling.temperature for group in groups):
        parts = allowed.split([group.count for group in groups])
        chosen = [group.sampler.choose(part) for group, part in zip(groups, parts, strict=True)]
        token = torch.cat(chosen)
    else:
        token = allowed.argmax(-1)
    columns = [token, wide.softmax(-1).gather(-1, token[:, None])[:, 0]]
    named = _named(groups, logits.device)
    if named is not None or any(group.uncertainty for group in groups):
        found = confidence_reference(wide, mask_id=mask_id, named=named)
        columns += _more(found, groups)
    return columns


def _more(found: Confidence, groups: list[Wanted]) -> list[Tensor]:
    """The columns that only some steps ask for; all of them where one does."""
    if found.named is None and not any(group.uncertainty for group in groups):
        return []
    named = found.probability if found.named is None else found.named
    return [named, found.entropy, found.margin]


def _named(groups: list[Wanted], device: torch.device) -> Tensor | None:
    """The tokens whose probability is wanted, int64 ``[N]``, 0 where none is."""
    if all(group.named is None for group in groups):
        return None
    parts = [np.zeros(g.count, dtype=np.int64) if g.named is None else g.named for g in groups]
    return torch.from_numpy(np.concatenate(parts)).to(device)
