"""What the engines of a model learn from its forwards, kept while it is loaded: what a forward
costs by its rows and requests, with how many threads it is fastest, and what speculation brings.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np

from d2f.model import DiffusionModel
from d2f.thread_choice import ThreadChoice
from decode.decoders.adaptive import Adaptive
from decode.engine.cost_curve import CostCurve, Numbers

RECENT = 1000  # forwards over which the mean gain of a width is taken, about
GUESS = 4  # forwards that a guess counts for where a width was never or seldom seen
GROWTH = 0.7  # the power of the width that tokens are guessed to grow with
ENOUGH = 64  # forwards after which a width is known well
OFTEN = 4  # of so many occasions one is a trial of a width less known
SELDOM = 200  # and one of a width well known: at high load a trial costs all others' time


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

    def note_forward(self, rows: int, requests: int, seconds: float, after: float) -> None:
        """It took so long, and to hand out what it found so long after it."""
        if self.threads is None or self.threads.note(rows, self._used, seconds):
            self.curve.note(rows, requests, seconds + after)

    def yields(self, session: Adaptive) -> Yields:
        """Those of all sessions that learn with this one."""
        key = (session.learns_with, session.widths)
        return self._yields.setdefault(key, Yields(session.widths))


_learned: WeakKeyDictionary[DiffusionModel, Learned] = WeakKeyDictionary()


def learned_of(model: DiffusionModel) -> Learned:
    """What was learned of a model so far, shared by its engines."""
    return _learned.setdefault(model, Learned(model.thread_counts))


class Yields:
    """What each width brings a forward: tokens and rows, of the sessions that learn together."""

    def __init__(self, widths: Sequence[int]):
        self.widths: Numbers = np.array(widths, dtype=np.float64)
        self.tokens: Numbers = np.zeros(len(widths))
        self.rows: Numbers = np.zeros(len(widths))
        self.seen: Numbers = np.zeros(len(widths))
        self._occasions = 0

    def note(self, width: int, tokens: int, rows: int) -> None:
        """A forward of a session of that width fed `rows` and decided `tokens`."""
        at = int(np.searchsorted(self.widths, width))
        self.seen[at] = seen = min(self.seen[at] + 1, RECENT)
        self.tokens[at] += (tokens - self.tokens[at]) / seen
        self.rows[at] += (rows - self.rows[at]) / seen

    def expected(self) -> tuple[Numbers, Numbers]:
        """Tokens and rows a forward by width; where a width was seldom seen, in part a guess."""
        known = self.seen > 0
        weight = self.seen / (self.seen + GUESS)
        tokens = weight * self.tokens + (1 - weight) * self._guess(known)
        a_width = (self.rows[known] / self.widths[known]).mean() if known.any() else 1.0
        rows = weight * self.rows + (1 - weight) * self.widths * a_width
        return tokens, rows

    def trial(self, best: int) -> int | None:
        """At an occasion to try another width than the best: the index of the one beside it that
        was seen less, or None where this is not the time for it."""
        self._occasions += 1
        beside = [at for at in (best - 1, best + 1) if 0 <= at < len(self.widths)]
        at = min(beside, key=lambda at: self.seen[at], default=best)
        every = OFTEN if self.seen[at] < ENOUGH else SELDOM
        return at if at != best and self._occasions % every == 0 else None

    def _guess(self, known: np.ndarray) -> Numbers:
        """Tokens of each width by those of the others: between two of them on a curve that bends
        as a square root does, beyond the last no more than it. Where none speculated yet, as a
        power of the width."""
        x, y = self.widths[known], self.tokens[known]
        if not known[0]:  # without speculation
            x, y = np.append(self.widths[0], x), np.append(1.0, y)
        after = np.clip(np.searchsorted(x, self.widths, "right"), 1, max(len(x) - 1, 1))
        if len(x) == 1:
            return y[0] * (self.widths / x[0]) ** GROWTH
        low, high = after - 1, after
        share = np.clip((self.widths - x[low]) / (x[high] - x[low]), 0.0, 1.0)
        return y[low] + (y[high] - y[low]) * np.sqrt(share)
