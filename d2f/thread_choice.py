"""With how many threads a forward or a step of training is computed on a CPU: measured as it goes.

More threads are faster on cores that are free, and far slower on cores that are not; few rows may
be computed fastest by one thread anywhere. So forwards of about as many rows (up to the same power
of two) are tried with each count that there is to choose from, and the count of the lowest median
is taken. One that took far longer is not tried a second time, nor at first with other numbers of
rows. Now and then another is tried again, as what else runs comes and goes; all such trials
together may lose `TRIALS` of the time, so one that turns out slow is not repeated soon.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch

LAST = 7  # forwards with a count of which the median is taken
FIRST = 3  # forwards with each before one is chosen
FAR = 1.5  # times the lowest: one forward is enough to see it
TRIALS = 0.02  # share of the time that may be lost by trying others
BETTER = 0.95  # a count takes over from the present one below this share of its time


class ThreadChoice:
    """The numbers of threads of one model's forwards. counts: to choose from, ascending, at least
    one."""

    def __init__(self, counts: Sequence[int]):
        self.counts = counts
        self._sizes: dict[int, _Size] = {}
        self._latest: _Size | None = None  # that has been tried with all counts that it would be
        self._spent = self._lost = 0.0  # seconds of all forwards; what trials took above the best

    def choose(self, rows: int) -> int:
        """The threads for a forward of so many rows, at least 1."""
        if len(self.counts) == 1:
            return self.counts[0]
        size = self._sizes.get(rows.bit_length())
        if size is None:
            out = self._latest.far_off() if self._latest is not None else []
            size = self._sizes[rows.bit_length()] = _Size(self.counts, out)
        lacking = size.lacking()
        if lacking is not None:
            return lacking
        self._latest, best = size, size.best()
        return size.oldest(besides=best) if self._lost < TRIALS * self._spent else best

    @contextmanager
    def using(self, rows: int) -> Iterator[int]:
        """Within it, torch computes with the threads of a forward of so many rows; what the process
        does besides keeps its own number. Gives that number; `note` is still to be called."""
        before, count = torch.get_num_threads(), self.choose(rows)
        torch.set_num_threads(count)  # takes a microsecond
        try:
            yield count
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def timed(self, rows: int) -> Iterator[None]:
        """The same, and what is done within it is noted as such a forward."""
        began = time.perf_counter()
        with self.using(rows) as count:
            yield
        self.note(rows, count, time.perf_counter() - began)

    def note(self, rows: int, threads: int, seconds: float) -> bool:
        """A forward of so many rows took so long with so many threads; whether these are what it
        is computed with, and not a trial."""
        self._spent += seconds
        size = self._sizes.get(rows.bit_length())
        if size is None:
            return len(self.counts) == 1
        if size.lacking() is not None:
            size.note(threads, seconds)
            return False
        best = size.best()
        if threads != best:
            self._lost += max(0.0, seconds - median(size.seconds[best]))
        size.note(threads, seconds)
        return threads == best


class _Size:
    """Forwards of about as many rows. out: counts that are not tried at first."""

    def __init__(self, counts: Sequence[int], out: Sequence[int]):
        self.seconds: dict[int, deque[float]] = {count: deque(maxlen=LAST) for count in counts}
        self._first = [count for count in counts if count not in out]
        self._noted = dict.fromkeys(counts, 0)  # when, in forwards
        self._now = 0
        self._best: int | None = None
        self._settled = False

    def note(self, threads: int, seconds: float) -> None:
        self._now += 1
        self._noted[threads] = self._now
        times = self.seconds[threads]
        # Far faster than it was: what it was measured beside is gone, and so is the measurement.
        if self._settled and times and threads != self._best and FAR * seconds < median(times):
            times.clear()
        times.append(seconds)

    def lacking(self) -> int | None:
        """A count that was tried too seldom to choose; None where there is none."""
        if not self._settled:
            far = self.far_off()
            for count in self._first:
                if len(self.seconds[count]) < (1 if count in far else FIRST):
                    return count
            self._settled = True
        return None

    def far_off(self) -> list[int]:
        """The counts with which forwards took far longer than with the best."""
        found = {count: median(times) for count, times in self.seconds.items() if times}
        lowest = min(found.values(), default=0.0)
        return [count for count, seconds in found.items() if seconds > FAR * lowest]

    def best(self) -> int:
        """The count of the lowest median; the one before it where they hardly differ."""
        found = {count: median(times) for count, times in self.seconds.items() if times}
        lowest = min(found, key=lambda count: found[count])
        if self._best is None or found[lowest] < BETTER * found[self._best]:
            self._best = lowest
        return self._best

    def oldest(self, besides: int) -> int:
        """Of the other counts the one that was not tried for longest."""
        others = (count for count in self.seconds if count != besides)
        return min(others, key=lambda count: self._noted[count])
