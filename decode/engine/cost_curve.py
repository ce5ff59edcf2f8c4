"""What a forward costs by its rows, learned from the forwards that ran.

Up to some number of rows a forward takes as long as its weights take to be read; from there on each
row costs. Where the bend is, and how steep the rise, differs from machine to machine, with the
number of threads and with what else runs. So it is measured: forwards of about as many rows share
the median of their last times, the medians are made non-decreasing, and between them lies a
straight line. Where nothing was measured yet, a forward is taken to cost as ``rows + FLAT`` does,
from the nearest that was: an unknown number of rows looks neither free nor hopeless, and is tried.

    measured       16 rows 2.0 ms     64 rows 4.0 ms
    taken          1: 1.4   16: 2.0   32: 2.7   64: 4.0   128: 6.7
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
FLAT = 32  # rows that cost about what one costs, where nothing is known
LAST = 15  # forwards of about as many rows of which the median is taken
BINS_AN_OCTAVE = 4


class CostCurve:
    """Seconds of a forward by its rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._rows: dict[int, float] = {}  # of a bin's last forward
        self._medians: dict[int, float] = {}

    def note(self, rows: int, seconds: float) -> None:
        """A forward of so many rows took so long."""
        place = round(BINS_AN_OCTAVE * math.log2(rows))
        last = self._seconds.setdefault(place, deque(maxlen=LAST))
        last.append(seconds)
        self._rows[place] = rows
        self._medians[place] = median(tuple(last))

    def seconds(self, rows: Numbers) -> Numbers:
        """What forwards of `rows`, ``[N]``, at least 1, are expected to take; non-decreasing."""
        if not self._medians:
            return (rows + FLAT) / FLAT
        places = sorted(self._medians)
        x = np.array([self._rows[place] for place in places], dtype=np.float64)
        y = non_decreasing(
            np.array([self._medians[place] for place in places]),
            np.array([len(self._seconds[place]) for place in places], dtype=np.float64),
        )
        nearest = np.clip(rows, x[0], x[-1])
        return np.interp(nearest, x, y) * (rows + FLAT) / (nearest + FLAT)


def non_decreasing(values: Numbers, weights: Numbers) -> Numbers:
    """The non-decreasing sequence nearest to `values` in weighted squares (isotonic regression):
    neighbours that fall are pooled to their mean, as [1, 3, 2, 4] to [1, 2.5, 2.5, 4]."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many values
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m, i), (b, n, j) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n, i + j)]
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])
