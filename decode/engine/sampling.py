"""From logits to predictions: greedy or sampled, in fp32, the mask id never chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode.engine.sampling_options import Sampling
from decode.engine.step import Ints, Predictions
from triton_kernels.choice import use_kernel
from triton_kernels.confidence import confidence_of_logits, confidence_reference


class Sampler:
    """The choice of one request's tokens, with a generator of its own: what it draws does not
    depend on the batch that it is in."""

    def __init__(self, sampling: Sampling, mask_id: int | None):
        self.sampling = sampling
        self.mask_id = mask_id
        self.generator = torch.Generator().manual_seed(sampling.seed)
        self._before = self.generator.get_state()

    def rewind(self) -> None:
        """Put the generator back to before the last choice, so that the next one draws the same
        numbers again."""
        self.generator.set_state(self._before)

    def choose(self, logits: Tensor) -> Tensor:
        """Token ids ``[N]`` from fp32 logits ``[N, V]`` whose mask column is -inf."""
        settings = self.sampling
        if settings.greedy:
            return logits.argmax(-1)
        # Kept for `rewind`: a forward that is computed again must draw the same.
        self._before = self.generator.get_state()
        # Dividing comes first: top_p is a share of the probability at this temperature.
        scaled = keep_top(logits / settings.temperature, settings.top_k, settings.top_p)
        # On the CPU whatever the model's device, so the same seed draws the same everywhere. The
        # clamp keeps both logarithms finite.
        uniform = torch.rand(logits.shape, generator=self.generator)
        # argmax of logits + Gumbel noise is a draw from their softmax (the Gumbel-max trick).
        gumbel = -torch.log(-torch.log(uniform.clamp(min=1e-20, max=1 - 1e-7)))
        return (scaled + gumbel.to(logits.device)).argmax(-1)


def keep_top(logits: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """Logits ``[N, V]`` with -inf outside the top_k and outside the smallest set whose probability
    reaches top_p (the most likely token always stays)."""
    if top_k is not None and top_k < logits.shape[-1]:
        # [N, 1], the k-th largest; equal ones stay too.
        floor = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        # Kept: every token before whose own the probabilities do not yet sum to top_p.
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        beyond = before >= top_p
        beyond[..., 0] = False  # also where top_p is 0 in fp32
        drop = torch.zeros_like(beyond).scatter(-1, index, beyond)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits


@dataclass(frozen=True)
class PredictionRequest:
    """What one request wants to know of the `count` rows that it reads. queried_tokens and
    uncertainty are those of its `Step`."""

    sampler: Sampler
    count: int
    queried_tokens: Ints | None = None
    uncertainty: bool = False

    @property
    def greedy(self) -> bool:
        return self.sampler.sampling.greedy

    @property
    def scored(self) -> bool:
        """Whether it wants more than token and confidence."""
        return self.uncertainty or self.queried_tokens is not None


def table_of(logits: Tensor, groups: list[PredictionRequest]) -> Tensor:
    """What the groups want of logits ``[N, V]``, as one fp64 table ``[2 or 6, N]`` of what
    `Predictions` has, in its order: so that it crosses from the device in one transfer."""
    mask_id, scores = groups[0].sampler.mask_id, any(group.scored for group in groups)
    queried = torch.from_numpy(queried_tokens(groups)).to(logits.device) if scores else None
    if all(group.greedy for group in groups):
        return greedy_table(logits, mask_id, queried)
    wide = logits.float()  # probabilities are never computed in less than fp32
    parts = _without(wide, mask_id).split([group.count for group in groups])
    chosen = [group.sampler.choose(part) for group, part in zip(groups, parts, strict=True)]
    return _table(wide, torch.cat(chosen), mask_id, queried)


def greedy_table(logits: Tensor, mask_id: int | None, queried: Tensor | None) -> Tensor:
    """The table of greedy choices, ``[6, N]`` where tokens ``[N]`` are queried, else ``[2, N]``."""
    if use_kernel("confidence", logits):
        found = confidence_of_logits(logits, mask_id=mask_id, named=queried, kernel=True)
        columns = [found.token, found.probability]
        if found.named is not None and found.named_log is not None:
            columns += [found.named, found.named_log, found.entropy, found.margin]
        return torch.stack([column.double() for column in columns])
    # [N, V]; in bf16 many confidences would be exactly 1, and thresholds would not tell them apart.
    wide = logits.float()
    return _table(wide, _without(wide, mask_id).argmax(-1), mask_id, queried)


def split(table: NDArray[np.float64], groups: list[PredictionRequest]) -> list[Predictions | None]:
    """Predictions of each group from the table of all, which may be longer; None for a group whose
    own logits are not finite."""
    count = sum(group.count for group in groups)
    finite = np.isfinite(table[1])  # one NaN or infinity in a row makes its softmax NaN
    # A row that is not finite may hold any index; its group is refused below.
    tokens = np.where(finite, table[0], 0)[:count].astype(np.int64)
    values = table[1:, :count].astype(np.float32)
    results: list[Predictions | None] = []
    start = 0
    for group in groups:
        part = slice(start, start + group.count)
        start = part.stop
        if not finite[part].all():
            results.append(None)
            continue
        wanted = group.queried_tokens is not None
        queried = (values[1, part], values[2, part]) if wanted else (None, None)
        # What another group asked for is in the table, too, and not handed out.
        scores = (values[3, part], values[4, part]) if group.uncertainty else (None, None)
        results.append(Predictions(tokens[part], values[0, part], *queried, *scores))
    return results


def queried_tokens(groups: list[PredictionRequest]) -> Ints:
    """The tokens whose probability is wanted, ``[N]``, 0 where none is."""
    none = np.zeros(max(group.count for group in groups), dtype=np.int64)
    parts = [none[: g.count] if g.queried_tokens is None else g.queried_tokens for g in groups]
    return np.concatenate(parts)


def _table(wide: Tensor, token: Tensor, mask_id: int | None, queried: Tensor | None) -> Tensor:
    columns = [token, wide.softmax(-1).gather(-1, token[:, None])[:, 0]]
    if queried is not None:
        found = confidence_reference(wide, mask_id=mask_id, named=queried)
        assert found.named is not None and found.named_log is not None
        columns += [found.named, found.named_log, found.entropy, found.margin]
    return torch.stack([column.double() for column in columns])


def _without(wide: Tensor, mask_id: int | None) -> Tensor:
    """Logits whose mask column is -inf."""
    if mask_id is None:
        return wide
    # A copy, since the confidence is that under the full softmax, the mask id's share included.
    allowed = wide.clone()
    allowed[:, mask_id] = -torch.inf
    return allowed
