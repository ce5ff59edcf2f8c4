"""Turn logits into predictions: the most likely tokens or drawn ones, in fp32, the mask id never
chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2f.cpu import scored
from decode.step import Ints, Predictions, Sampling
from triton_kernels.confidence import confidence_of_logits, confidence_reference, without
from triton_kernels.dispatch import use_kernel
from triton_kernels.draws import Draws

# Lines of the array that says how rows are drawn. What is no whole number is there as the bits of
# its fp64, so that all of it can cross to the device with the other arrays of a forward.
_SEED, _ROW, _TEMPERATURE, _TOP_K, _TOP_P = range(5)
DRAW_LINES = 5

ROWS_A_STEP = 1 << 16  # from the number of a step's first row to that of the next one's


class Sampler:
    """Numbers a request's draws: by its seed, the number of its step and that of the row within it,
    on any device and in any batch (`triton_kernels.draws`). So rows that a step leaves out at its
    end, since nothing could come of them, change no draw of a later one.

    steps: that the request has taken. read: rows of the next one that it has taken already, where
    it is fed in pieces.
    """

    def __init__(self, sampling: Sampling, mask_id: int | None):
        self.sampling, self.greedy = sampling, sampling.greedy
        self.mask_id = mask_id
        self.steps = self.read = 0

    def took(self, count: int, *, whole: bool) -> None:
        """Note that the request has taken `count` rows; whole: with them all of a step."""
        self.steps, self.read = (self.steps + 1, 0) if whole else (self.steps, self.read + count)

    def lines(self, count: int) -> Ints:
        """Say how the next `count` rows are drawn, int64 ``[DRAW_LINES, count]``; the same until
        they are taken, also where a forward is computed again."""
        settings = self.sampling
        lines = np.zeros((DRAW_LINES, count), dtype=np.int64)
        if not self.greedy:
            lines[_SEED] = np.uint64(settings.seed % 2**64).astype(np.int64)
            first = self.steps * ROWS_A_STEP + self.read
            lines[_ROW] = np.arange(first, first + count) % 2**32
            warmest = float(np.finfo(np.float32).max)  # infinity would make NaN of a mask's logit
            lines[_TEMPERATURE] = _bits(min(settings.temperature, warmest))
            lines[_TOP_K] = settings.top_k or 0
        lines[_TOP_P] = _bits(1.0 if self.greedy else settings.top_p)
        return lines


def _bits(value: float) -> np.int64:
    return np.float64(value).view(np.int64)


@dataclass(frozen=True)
class PredictionRequest:
    """One request's `count` rows that are read; queried_tokens and uncertainty as in its `Step`."""

    sampler: Sampler
    count: int
    queried_tokens: Ints | None = None
    uncertainty: bool = False

    @property
    def greedy(self) -> bool:
        return self.sampler.greedy

    @property
    def scored(self) -> bool:
        """Say whether it wants more than token and confidence."""
        return self.uncertainty or self.queried_tokens is not None


@dataclass(frozen=True)
class Wanted:
    """Scores and draws wanted of the rows ``[N]`` that a forward reads, as arrays on the host.

    queried: the token of each whose probability is wanted; None: nothing but token and confidence.
    draws: how each is drawn, ``[DRAW_LINES, N]``; None: no row is.
    mask_id: the id that none may choose.
    """

    queried: Ints | None = None
    draws: Ints | None = None
    mask_id: int | None = None

    @property
    def filtered(self) -> bool:
        """Say whether a row is drawn from a part of the vocabulary."""
        if self.draws is None:
            return False
        return bool(self.draws[_TOP_K].any() or (self.draws[_TOP_P] != _bits(1.0)).any())


def wanted_of(groups: list[PredictionRequest]) -> Wanted:
    """Join what all groups want."""
    scored, greedy = any(g.scored for g in groups), all(g.greedy for g in groups)
    lines = None if greedy else [group.sampler.lines(group.count) for group in groups]
    return Wanted(
        _queried_tokens(groups) if scored else None,
        None if lines is None else np.concatenate(lines, axis=1),
        groups[0].sampler.mask_id,
    )


def draws_of(lines: Tensor, *, filtered: bool) -> Draws:
    """Make the draws of lines ``[DRAW_LINES, N]`` on a device."""
    temperature, top_p = (lines[i].view(torch.float64).float() for i in (_TEMPERATURE, _TOP_P))
    filters = (lines[_TOP_K], top_p) if filtered else (None, None)
    return Draws(lines[_SEED], lines[_ROW], temperature, *filters)


def table_of(logits: Tensor, wanted: Wanted, *, native: bool = False) -> Tensor:
    """Score logits ``[N, V]``: one fp64 table ``[2 or 6, N]`` of what `Predictions` has, in its
    order, so that it crosses from the device in one transfer. native: by `d2f.cpu`, drawn
    rows, too, so that no row's values depend on its neighbours."""
    queried, lines = (
        None if given is None else torch.from_numpy(given).to(logits.device)
        for given in (wanted.queried, wanted.draws)
    )
    if native and logits.dtype == torch.float32:
        table = scored(logits, wanted.mask_id, queried)
        if wanted.draws is not None:
            _draw(table, logits, wanted)
        return table
    draws = None if lines is None else draws_of(lines, filtered=wanted.filtered)
    return prediction_table(logits, wanted.mask_id, queried, draws)


def _draw(table: Tensor, logits: Tensor, wanted: Wanted) -> None:
    """Put drawn tokens and their probabilities in the place of the most likely ones, where rows are
    drawn."""
    assert wanted.draws is not None
    drawn = wanted.draws[_TEMPERATURE].nonzero()[0]
    rows, lines = torch.from_numpy(drawn), torch.from_numpy(wanted.draws[:, drawn])
    part = logits[rows]
    allowed = without(part, wanted.mask_id)
    token = draws_of(lines, filtered=wanted.filtered).choose(allowed)
    table[0, rows] = token.double()
    table[1, rows] = scored(part, wanted.mask_id, token)[2]


def prediction_table(
    logits: Tensor, mask_id: int | None, queried: Tensor | None, draws: Draws | None
) -> Tensor:
    """Score by arrays that are on the device: `queried` ``[N]`` or None, and `draws`."""
    if use_kernel("confidence", logits):
        found = confidence_of_logits(
            logits, mask_id=mask_id, named=queried, draws=draws, kernel=True
        )
        columns = [found.token, found.probability]
        if found.named is not None and found.named_log is not None:
            columns += [found.named, found.named_log, found.entropy, found.margin]
        return torch.stack([column.double() for column in columns])
    # [N, V]; in bf16 many confidences would be exactly 1, and thresholds would not tell them apart.
    wide = logits.float()
    if queried is None:
        allowed = without(wide, mask_id)
        token = allowed.argmax(-1) if draws is None else draws.choose(allowed)
        columns = [token, wide.softmax(-1).gather(-1, token[:, None])[:, 0]]
    else:
        found = confidence_reference(wide, mask_id=mask_id, named=queried, draws=draws)
        assert found.named is not None and found.named_log is not None
        columns = [found.token, found.probability]
        columns += [found.named, found.named_log, found.entropy, found.margin]
    return torch.stack([column.double() for column in columns])


def split(table: NDArray[np.float64], groups: list[PredictionRequest]) -> list[Predictions | None]:
    """Take each group's predictions from the table of all, which may be longer; None for a group
    whose own logits are not finite."""
    count = sum(group.count for group in groups)
    finite = np.isfinite(table[1])  # one NaN or infinity in a row makes its softmax NaN
    # A row that is not finite may hold any index; its group is refused below.
    tokens = np.where(finite, table[0], 0)[:count].astype(np.int64)
    values = table[1:, :count].astype(np.float32)
    results: list[Predictions | None] = []
    start, all_finite = 0, bool(finite[:count].all())
    for group in groups:
        part = slice(start, start + group.count)
        start = part.stop
        if not all_finite and not finite[part].all():
            results.append(None)
            continue
        wanted = group.queried_tokens is not None
        queried = (values[1, part], values[2, part]) if wanted else (None, None)
        # What another group asked for is in the table, too, and not handed out.
        scores = (values[3, part], values[4, part]) if group.uncertainty else (None, None)
        results.append(Predictions(tokens[part], values[0, part], *queried, *scores))
    return results


def _queried_tokens(groups: list[PredictionRequest]) -> Ints:
    """Join the tokens whose probability is wanted, ``[N]``, 0 where none is."""
    none = np.zeros(max(group.count for group in groups), dtype=np.int64)
    parts = [none[: g.count] if g.queried_tokens is None else g.queried_tokens for g in groups]
    return np.concatenate(parts)
