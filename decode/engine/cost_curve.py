"""What a forward costs by its rows, reads and requests, learned from the forwards that ran.

Up to some number of rows a forward takes as long as its weights take to be read; from there on each
row costs; one that is read costs more, as it meets the head, its logits are scored and its
prediction is handed out (most rows of a prompt are not read); and each request costs, as its keys
lie apart from the others'. How much differs from machine to machine, with the number of threads and
with what else runs. So it is measured, and two things keep it from being misled by a
machine that others use too:

- All of a machine gets slower and faster at once. Forwards are compared with those shortly before
  them: `load`, what forwards take at present beside what like ones took, is divided out. It is a
  median, as what it is held against is one: a mean of times of which some are far longer lies above
  their median, and would raise the load a little with each forward, for ever.
- Forwards of about as many rows, reads and requests share the median of their last times, and
  through all of these medians goes one function that can only rise, and bends upwards alone: no
  single figure makes the next rows look free, or hopeless. Its terms, none negative::

      seconds = a + b * requests + e * reads + c * rows
                + sum of d_k * max(0, rows - k), k = 32, 128, 512, 2048

Where little was measured, a forward is taken to cost as ``rows + FLAT`` does, whatever is read: an
unknown number of rows looks neither free nor hopeless, and is tried.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
FLAT = 32  # rows that cost about what one costs, where nothing is known
LAST = 15  # forwards of about as many rows, reads and requests of which the median is taken
KNOWN = 3  # such forwards after which the next one says how loaded the machine is
LASTS = 0.98  # the power of it that stays: a load that lasts becomes what is usual
BINS_AN_OCTAVE = 4  # of rows; of reads two, of requests one
OLD = 2000  # forwards after which a median counts half
BENDS = np.array([0.0, 32.0, 128.0, 512.0, 2048.0])
SUPPOSED = np.array([1.0, 32.0, 128.0, 512.0])  # rows at which the supposition counts
TRUST = 0.5  # what it counts for there, in forwards
AGAIN = 64  # forwards at most from one fit to the next; at first it is every twice as many
SWEEPS = 30
FREE = 0.01  # of the shortest median: what a forward takes at least, were no two times to agree


class CostCurve:
    """Seconds of a forward by its rows, the number of those that are read, and its requests."""

    def __init__(self) -> None:
        self.load = 1.0
        self._alike: dict[tuple[int, int, int], _Alike] = {}
        self._beside: deque[float] = deque(maxlen=LAST)
        self._now = 0
        self._terms: Numbers | None = None  # a, b, e, c, d_32, ...; None before the first forward
        self._fitted = 0  # when, in forwards

    def note(self, rows: int, reads: int, requests: int, seconds: float) -> None:
        """A forward of so many rows, so many of them read, of so many requests took so long."""
        self._now += 1
        place = (
            round(BINS_AN_OCTAVE * math.log2(rows)),
            round(BINS_AN_OCTAVE / 2 * math.log2(reads + 1)),  # a piece of a prompt reads none
            round(math.log2(requests)),
        )
        alike = self._alike.setdefault(place, _Alike())
        if len(alike.seconds) >= KNOWN:
            self._beside.append(seconds / alike.median)
            self.load = median(tuple(self._beside)) ** LASTS
        alike.note(rows, reads, requests, seconds / self.load, self._now)

    def seconds(self, rows: Numbers, requests: int) -> Numbers:
        """What forwards of `rows`, ``[2, N]``, those that are fed, at least 1, and of them those
        that are read, of so many requests are expected to take; non-decreasing in each."""
        fed, reads = rows
        if not self._alike:
            return (fed + FLAT) / FLAT
        terms = self._terms
        if terms is None or self._now - self._fitted >= min(self._fitted, AGAIN):
            terms = self._terms = self._fit()
            self._fitted = self._now
        return self.load * (_terms_of(fed, reads, np.full(len(fed), float(requests))) @ terms)

    def _fit(self) -> Numbers:
        """The terms that are nearest to the medians, by squares of what they are off in shares."""
        alike = self._alike.values()
        rows = np.array([a.rows for a in alike], dtype=np.float64)
        reads = np.array([a.reads for a in alike], dtype=np.float64)
        requests = np.array([a.requests for a in alike], dtype=np.float64)
        seconds = np.array([a.median for a in alike])
        weight = np.array([len(a.seconds) * 0.5 ** ((self._now - a.noted) / OLD) for a in alike])
        scale = float(np.average(seconds / (rows + FLAT), weights=weight))
        supposed = scale * (SUPPOSED + FLAT)
        one = np.ones(len(SUPPOSED))
        terms = _terms_of(
            np.append(rows, SUPPOSED), np.append(reads, one), np.append(requests, one)
        )
        shares = terms / np.append(seconds, supposed)[:, None]
        weight = np.append(weight, np.full(len(SUPPOSED), TRUST))
        gram = shares.T @ (weight[:, None] * shares)
        # Rows and those that are read mostly rise together: what could be of either is of rows.
        gram[2, 2] += TRUST * float(np.sum((SUPPOSED / supposed) ** 2))
        start = self._terms
        if start is None:
            start = np.zeros(terms.shape[1])
            start[[0, 3]] = scale * FLAT, scale
        found = non_negative(gram, shares.T @ weight, start)
        found[0] = max(found[0], FREE * seconds.min())
        return found


class _Alike:
    """Forwards of about as many rows, reads and requests. median: of their last seconds, without
    load. rows, reads, requests: of the last, which was the one `noted`."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=LAST)
        self.median = 0.0
        self.rows = self.reads = self.requests = self.noted = 0

    def note(self, rows: int, reads: int, requests: int, seconds: float, now: int) -> None:
        self.seconds.append(seconds)
        self.median = median(tuple(self.seconds))
        self.rows, self.reads, self.requests, self.noted = rows, reads, requests, now


def _terms_of(rows: Numbers, reads: Numbers, requests: Numbers) -> Numbers:
    """``[N, 3 + bends]``: what a, b, e, c, ... are multiplied with."""
    beyond = np.maximum(rows[:, None] - BENDS, 0.0)
    return np.column_stack((np.ones(len(rows)), requests, reads, beyond))


def non_negative(gram: Numbers, right: Numbers, start: Numbers) -> Numbers:
    """The x that makes ``x gram x / 2 - right x`` small with no entry below 0, from `start` on, an
    entry at a time."""
    x, diagonal = start.tolist(), np.maximum(gram.diagonal(), 1e-300).tolist()
    lines, right_side = gram.tolist(), right.tolist()
    for _ in range(SWEEPS):
        for i, line in enumerate(lines):
            off = right_side[i] - sum(g * v for g, v in zip(line, x, strict=True))
            x[i] = max(0.0, x[i] + off / diagonal[i])
    return np.array(x)
