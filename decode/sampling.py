"""From logits to predictions: greedy or sampled, in fp32, the mask id never chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from d2f.errors import NonFiniteLogitsError
from decode.step import Predictions
from triton_kernels.choice import use_kernel
from triton_kernels.confidence import confidence_of_logits


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


def predict(logits: Tensor, groups: list[tuple[Sampler, int]], forward: int) -> list[Predictions]:
    """Predictions of each group from logits ``[N, V]`` whose rows lie group after group.

    groups: (sampler, number of rows). Raises NonFiniteLogitsError that names the forward.
    """
    mask_ids = {sampler.mask_id for sampler, _ in groups if sampler.mask_id is not None}
    greedy = all(sampler.sampling.temperature == 0 for sampler, _ in groups)
    if greedy and len(mask_ids) < 2 and use_kernel(logits):
        found = confidence_of_logits(logits, mask_id=next(iter(mask_ids), None), kernel=True)
        token, confidence = found.token, found.probability
    else:
        wide = logits.float()
        allowed = wide.clone() if mask_ids else wide
        for mask_id in mask_ids:
            allowed[:, mask_id] = -torch.inf
        if greedy:
            token = allowed.argmax(-1)
        else:
            counts = [count for _, count in groups]
            parts = zip(groups, allowed.split(counts), strict=True)
            token = torch.cat([sampler.choose(part) for (sampler, _), part in parts])
        confidence = wide.softmax(-1).gather(-1, token[:, None])[:, 0]
    # One transfer, and with it the only wait for the device in a forward.
    table = torch.stack((token.double(), confidence.double())).cpu().numpy()
    if not np.isfinite(table[1]).all():
        raise NonFiniteLogitsError(f"the model gave NaN or infinite logits at forward {forward}")
    tokens, confidences = table[0].astype(np.int64), table[1].astype(np.float32)
    results, start = [], 0
    for _, count in groups:
        part = slice(start, start + count)
        results.append(Predictions(tokens[part], confidences[part]))
        start += count
    return results
