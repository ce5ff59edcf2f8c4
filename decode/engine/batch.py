"""Join the steps of many requests into one forward, and turn its logits into their predictions: the
most likely tokens or drawn ones, in fp32, the mask id never chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2f.attention import Segment, SpanPlan
from d2f.cpu import scored
from d2f.spans import widened
from decode.decoders.base import Decoder
from decode.step import Ints, Predictions, Step
from triton_kernels.confidence import confidence_of_logits, confidence_reference, without
from triton_kernels.dispatch import use_kernel
from triton_kernels.draws import Draws


class Rows(NamedTuple):
    """The rows of a forward on the device: int64 ``[T]``, what each attends to, and int64 ``[N]``,
    the rows whose logits are wanted."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    plan: SpanPlan
    read: Tensor


@dataclass(frozen=True)
class FlatRows:
    """The rows of all requests in one forward, as arrays on the host: tokens, positions and slots
    ``[T]``, spans ``[T, K, 2]`` in slots of the whole cache, read ``[N]``. segments: which rows and
    slots belong to which request, so that attention can be computed request by request."""

    tokens: Ints
    positions: Ints
    slots: Ints
    spans: Ints
    read: Ints
    segments: list[Segment]

    def on(self, device: torch.device) -> Rows:
        """Copy the batch to a device, all at once: each copy to a GPU costs a launch."""
        parts = (self.tokens, self.positions, self.slots, self.spans.ravel(), self.read)
        host = torch.from_numpy(np.concatenate(parts))
        tokens, positions, slots, ranges, read = host.to(device).split([len(p) for p in parts])
        spans = ranges.view(len(tokens), -1, 2).to(torch.int32)
        return Rows(tokens, positions, slots, SpanPlan(spans, self.segments), read)


def join(steps: Sequence[Step], bases: Sequence[int]) -> FlatRows:
    """Join steps whose slots count from these bases. Two requests, the first in the slots from 0
    on, the second in those from 6 on::

        request    base    slots of its step    spans of its step       read of its step
        a          0       2 3                  [0, 4) [0, 4)           1
        b          6       0 1 2                [0, 1) [0, 2) [0, 3)    2

        joined             2 3 6 7 8            [0, 4) [0, 4)           1 4
                                                [6, 7) [6, 8) [6, 9)

    No row sees a slot of another request, so each computes what it would compute alone.
    """
    # All in one: at high load most steps are a row, and each operation of numpy costs as much.
    counts = np.array([len(step.tokens) for step in steps])
    firsts = np.cumsum(counts) - counts  # where the rows of each begin
    base = np.repeat(bases, counts)
    # Ranges a row in the batch: where one request needs three, the others get empty ones.
    width = max(step.spans.shape[1] for step in steps)
    spans = np.concatenate([widened(step.spans, width) for step in steps])
    reads = [len(step.read) for step in steps]
    return FlatRows(
        np.concatenate([step.tokens for step in steps]),
        np.concatenate([step.positions for step in steps]),
        np.concatenate([step.slots for step in steps]) + base,
        spans + base[:, None, None],
        # Read rows are numbered within the request.
        np.concatenate([step.read for step in steps]) + np.repeat(firsts, reads),
        _segments(spans, firsts, bases),
    )


def _segments(spans: Ints, firsts: Ints, bases: Sequence[int]) -> list[Segment]:
    """Find the slots that the rows of each request see: from its first to the last seen."""
    starts, ends = spans[..., 0], spans[..., 1]  # [T, K]
    last = np.maximum.reduceat(ends.max(1), firsts)
    # If every row sees all of them, attention over the segment needs no mask. Empty ranges, which
    # others of the batch may bring, hide nothing.
    least = np.where(ends > starts, ends, ends.max()).min(1)
    whole = (np.maximum.reduceat(starts.max(1), firsts) == 0) & (
        np.minimum.reduceat(least, firsts) == last
    )
    limits = [*firsts.tolist(), len(spans)]
    places = zip(pairwise(limits), bases, last.tolist(), whole.tolist(), strict=True)
    return [Segment(slice(*rows), slice(b, b + n), w) for rows, b, n, w in places]


# Lines of the array that says how rows are drawn. What is no whole number is there as the bits of
# its fp64, so that all of it can cross to the device with the other arrays of a forward.
_SEED, _ROW, _TEMPERATURE, _TOP_K, _TOP_P = range(5)
DRAW_LINES = 5
ROWS_A_STEP = 1 << 16  # from the number of a step's first row to that of the next one's


class Sampler:
    """Number the draws of a request by its seed, its step and the row within the step: the same on
    any device and in any batch (`triton_kernels.draws`). Rows that a step leaves out at its end
    change no later draw.

    steps: how many were taken. read: rows of the next step that were taken, if it is in pieces.
    """

    def __init__(self, decoder: Decoder, mask_id: int | None):
        self.decoder, self.greedy = decoder, decoder.greedy
        self.mask_id = mask_id
        self.steps = self.read = 0

    def took(self, count: int, *, whole: bool) -> None:
        """Note that the request has taken `count` rows; whole: they complete a step."""
        self.steps, self.read = (self.steps + 1, 0) if whole else (self.steps, self.read + count)

    def lines(self, count: int, draws: Ints | None = None) -> Ints:
        """Say how the next `count` rows are drawn, int64 ``[DRAW_LINES, count]``: the same until
        they are taken, so that a forward can be computed again. draws: as in `Step`; draw n is
        that of the first row of step n."""
        settings = self.decoder
        lines = np.zeros((DRAW_LINES, count), dtype=np.int64)
        if not self.greedy:
            lines[_SEED] = np.uint64(settings.seed % 2**64).astype(np.int64)
            first = self.steps * ROWS_A_STEP + self.read
            own = np.arange(first, first + count) if draws is None else draws * ROWS_A_STEP
            lines[_ROW] = own % 2**32
            warmest = float(np.finfo(np.float32).max)  # infinity would make NaN of a mask's logit
            lines[_TEMPERATURE] = _bits(min(settings.temperature, warmest))
            lines[_TOP_K] = settings.top_k or 0
        lines[_TOP_P] = _bits(1.0 if self.greedy else settings.top_p)
        return lines


def _bits(value: float) -> np.int64:
    return np.float64(value).view(np.int64)


class PredictionRequest(NamedTuple):
    """Ask for predictions of a request's `rows`; the rest is as in its `Step`."""

    sampler: Sampler
    rows: int
    queried_tokens: Ints | None = None
    uncertainty: bool = False
    draws: Ints | None = None


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
    queried = draws = None
    if any(group.uncertainty or group.queried_tokens is not None for group in groups):
        # Id 0 where a row queries no token.
        none = np.zeros(max(group.rows for group in groups), dtype=np.int64)
        asked = [(g.queried_tokens, g.rows) for g in groups]
        queried = np.concatenate([none[:rows] if ids is None else ids for ids, rows in asked])
    if not all(group.sampler.greedy for group in groups):
        draws = np.concatenate(
            [group.sampler.lines(group.rows, group.draws) for group in groups], axis=1
        )
    return Wanted(queried, draws, groups[0].sampler.mask_id)


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
    if not native or logits.dtype != torch.float32:
        draws = None if lines is None else draws_of(lines, filtered=wanted.filtered)
        return prediction_table(logits, wanted.mask_id, queried, draws)
    table = scored(logits, wanted.mask_id, queried)
    if lines is not None:  # drawn tokens take the place of the most likely ones
        drawn = lines[_TEMPERATURE].nonzero()[:, 0]
        part = logits[drawn]
        draws = draws_of(lines[:, drawn], filtered=wanted.filtered)
        token = draws.choose(without(part, wanted.mask_id))
        table[0, drawn] = token.double()
        table[1, drawn] = scored(part, wanted.mask_id, token)[2]
    return table


def prediction_table(
    logits: Tensor,
    mask_id: int | None,
    queried: Tensor | None,
    draws: Draws | None,
    *,
    kernel: bool | None = None,
) -> Tensor:
    """Score by arrays that are on the device: `queried` ``[N]`` or None, and `draws`. kernel: as in
    `use_kernel`."""
    if kernel or (logits.is_cuda and use_kernel("confidence", logits)):
        found = confidence_of_logits(
            logits, mask_id=mask_id, named=queried, draws=draws, kernel=True
        )
    elif queried is not None:
        found = confidence_reference(logits.float(), mask_id=mask_id, named=queried, draws=draws)
    else:
        # [N, V]; in bf16 many confidences would be exactly 1, which thresholds cannot tell apart.
        wide = logits.float()
        allowed = without(wide, mask_id)
        token = allowed.argmax(-1) if draws is None else draws.choose(allowed)
        probability = wide.softmax(-1).gather(-1, token[:, None])[:, 0]
        return torch.stack((token.double(), probability.double()))
    columns = [found.token, found.probability]
    if found.named is not None and found.named_log is not None:
        columns += [found.named, found.named_log, found.entropy, found.margin]
    return torch.stack([column.double() for column in columns])


def split(table: NDArray[np.float64], groups: list[PredictionRequest]) -> list[Predictions | None]:
    """Take each group's predictions from the table of all, which may be longer; None for a group
    whose own logits are not finite."""
    count = sum(group.rows for group in groups)
    finite = np.isfinite(table[1])  # one NaN or infinity in a row makes its softmax NaN
    # A row that is not finite may hold any index; its group is refused below.
    tokens = np.where(finite, table[0], 0)[:count].astype(np.int64)
    values = table[1:, :count].astype(np.float32)
    results: list[Predictions | None] = []
    start, all_finite = 0, bool(finite[:count].all())
    for group in groups:
        part = slice(start, start + group.rows)
        start = part.stop
        if not all_finite and not finite[part].all():
            results.append(None)
            continue
        # The table also has what other groups asked for; it is not handed out.
        wanted = group.queried_tokens is not None
        queried = (values[1, part], values[2, part]) if wanted else (None, None)
        scores = (values[3, part], values[4, part]) if group.uncertainty else (None, None)
        results.append(Predictions(tokens[part], values[0, part], *queried, *scores))
    return results
