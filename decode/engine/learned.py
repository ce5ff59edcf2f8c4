"""What the engines of a model learn from its forwards, kept while it is loaded: what a forward
costs by its rows, reads and requests, with how many threads it is fastest, and what speculation
brings.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np

from d2f.device import ThreadChoice
from d2f.model import DiffusionModel
from decode.decoders.adaptive import Adaptive
from decode.engine.cost_curve import CostCurve, Numbers

RECENT = 1000  # forwards over which the mean gain of a width is taken, about
GUESS = 16  # forwards that a guess counts for where a width was never or seldom seen
RIGHT = np.linspace(0.0, 1.0, 101)  # how often a further draft may be right
SUPPOSED = 0.8  # how often, where nothing was seen, and in how many forwards that would be seen
FORWARDS = 2.0
OFTEN = 2  # of so many occasions one is a trial of a width hardly known
TRIED = 8  # forwards seen of a width for each occasion that passes until it is tried again


class Learned:
    """What was learned of one model. others: tokens a forward of a request that has no width to
    choose."""

    def __init__(self, thread_counts: Sequence[int] = ()) -> None:
        self.curve = CostCurve()
        self.threads = ThreadChoice(thread_counts) if thread_counts else None
        self.others = 0.0
        self._used = 0  # threads of the last forward
        self._yields: dict[Hashable, Yields] = {}

    @contextmanager
    def best_threads(self, rows: int) -> Iterator[None]:
        """Within it, torch computes with the threads that are fastest for a forward of so many
        rows."""
        if self.threads is None:
            yield
        else:
            with self.threads.using(rows) as self._used:
                yield

    def note_forward(
        self, rows: int, reads: int, requests: int, seconds: float, after: float
    ) -> None:
        """One of so many rows, of which so many were read, took so long, and to hand out what it
        found so long after it."""
        if self.threads is None or self.threads.note(rows, self._used, seconds):
            self.curve.note(rows, reads, requests, seconds + after)

    def yields(self, session: Adaptive) -> Yields:
        """Those of all sessions that learn with this one."""
        key = (session.learns_with, session.widths)
        if key not in self._yields:
            self._yields[key] = Yields(session.widths, session.rows_alone)
        return self._yields[key]


_learned: WeakKeyDictionary[DiffusionModel, Learned] = WeakKeyDictionary()


def learned_of(model: DiffusionModel) -> Learned:
    """What was learned of a model so far, shared by its engines."""
    return _learned.setdefault(model, Learned(model.thread_counts))


class Yields:
    """What each width brings a forward: tokens and rows, of the sessions that learn together.
    alone: rows of a step of the first, all read, where they are known without it. Rows are counted
    twice: those that are fed and, after them, those that are read."""

    def __init__(self, widths: Sequence[int], alone: int | None = None):
        self.widths: Numbers = np.array(widths, dtype=np.float64)
        self._alone = alone
        self.tokens: Numbers = np.zeros(len(widths))
        self.rows: Numbers = np.zeros((2, len(widths)))
        self.seen: Numbers = np.zeros(len(widths))
        self.begun: Numbers = np.zeros((2, len(widths)))  # of first steps, behind the prompt's
        self.starts: Numbers = np.zeros(len(widths))
        self.prompt = self.first = 0.0  # rows of a prompt; tokens that a first step decided
        self.length = 0.0  # of a response, in tokens
        self._ended = self._started = 0
        self.at = {width: at for at, width in enumerate(widths)}
        self._terms: Numbers = np.where(  # [p, width]
            RIGHT[:, None] < 1.0,
            (1 - RIGHT[:, None] ** self.widths) / np.maximum(1 - RIGHT[:, None], 1e-9),
            self.widths,
        )
        self._occasions = 0

    def note(self, width: int, forwards: int, tokens: int, rows: int, reads: int) -> None:
        """So many forwards of a session of that width fed `rows`, read `reads` of them and decided
        `tokens`."""
        at = self.at[width]
        self.seen[at] = seen = min(self.seen[at] + forwards, RECENT)
        self.tokens[at] += (tokens - self.tokens[at] * forwards) / seen
        for of, count in zip(self.rows, (rows, reads), strict=True):
            of[at] += (count - of[at] * forwards) / seen

    def begin(self, width: int, prompt: int, rows: int, reads: int, tokens: int) -> None:
        """The first step of a session of that width fed a prompt and `rows` besides, read `reads`
        of all and decided `tokens`."""
        at = self.at[width]
        self._started = min(self._started + 1, RECENT)
        self.prompt += (prompt - self.prompt) / self._started
        self.first += (tokens - self.first) / self._started
        self.starts[at] = starts = min(self.starts[at] + 1, RECENT)
        for of, count in zip(self.begun, (rows, reads), strict=True):
            of[at] += (count - of[at]) / starts

    def end(self, tokens: int) -> None:
        """A session is done, after so many tokens."""
        self._ended = min(self._ended + 1, RECENT)
        self.length += (tokens - self.length) / self._ended

    def expected(self) -> tuple[Numbers, Numbers]:
        """Tokens, ``[width]``, and rows, ``[2, width]``, a forward, the mean over a response's, its
        first with the prompt among them; where a width was seldom seen, in part a guess."""
        weight = self.seen / (self.seen + GUESS)
        tokens = weight * self.tokens + (1 - weight) * self._guess()
        supposed = self.widths * self._a_width(self.rows, self.seen)
        if self._alone is not None:
            supposed[:, 0] = self._alone
        rows = weight * self.rows + (1 - weight) * supposed
        if self._ended:
            # Without speculation it may be none, which says nothing of the widths beside.
            wide = np.append(0.0, self.starts[1:])
            begun = self.widths * self._a_width(self.begun, wide)
            if self.starts[0]:
                begun[:, 0] = self.begun[:, 0]
            later = max(self.length - self.first, 0.0) / np.maximum(tokens, 1e-9)
            prompt = np.array([[self.prompt], [0.0]])
            rows = (prompt + np.maximum(begun, begun[:, :1]) + later * rows) / (1 + later)
            tokens = max(self.length, self.first) / (1 + later)
        return tokens, rows

    def trial(self, best: int) -> int | None:
        """At an occasion to hold a session at a width: the index of the one that was seen least of
        the best and those beside it, or None where this is not the time for it."""
        self._occasions += 1
        beside = [at for at in (best - 1, best, best + 1) if 0 <= at < len(self.widths)]
        at = min(beside, key=lambda at: self.seen[at])
        every = max(OFTEN, int(self.seen[at]) // TRIED)
        return at if self._occasions % every == 0 else None

    def _guess(self) -> Numbers:
        """Tokens of each width, were each further draft right as often as the one before it, p:
        1 + p + p^2 + ..., as many terms as the width, times what no speculation brings. The p that
        comes nearest to what was seen."""
        base = self.tokens[0] if self.seen[0] else 1.0
        off = base * self._terms - self.tokens
        misfit = (self.seen[1:] * off[:, 1:] ** 2).sum(1) + FORWARDS * (RIGHT - SUPPOSED) ** 2
        return base * self._terms[int(np.argmin(misfit))]

    def _a_width(self, rows: Numbers, seen: Numbers) -> Numbers:
        """Rows, ``[2, width]``, over width: of a width that was not seen, between those of the ones
        beside it that were."""
        known = np.flatnonzero(seen)
        if not len(known):
            return np.ones_like(rows)
        places = np.log(self.widths)
        shares = rows[:, known] / self.widths[known]
        return np.stack([np.interp(places, places[known], share) for share in shares])
