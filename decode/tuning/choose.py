"""The frontier of accuracy against speed, and the choice on it.

A goal is a bound on the accuracy; the choice is the fastest setting that reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from d2f.errors import InputError
from decode.reporting.intervals import paired
from decode.reporting.measurements import Measurements

TOUCH = 1e-9  # accuracies are shares of small counts: what is closer than this is equal


@dataclass(frozen=True)
class Goal:
    """How accurate a setting must be: at least min_accuracy (a share), or where that is None at
    most `within` percentage points below the best of the settings. Raises InputError."""

    within: float = 1.0
    min_accuracy: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.within) and 0 <= self.within <= 100):
            raise InputError(f"within must lie in [0, 100] percentage points, got {self.within}")
        if self.min_accuracy is not None and not 0 <= self.min_accuracy <= 1:
            raise InputError(f"min_accuracy must lie in [0, 1], got {self.min_accuracy}")

    def bound(self, best: float) -> float:
        """The accuracy to reach where the best has `best`."""
        return best - self.within / 100 if self.min_accuracy is None else self.min_accuracy

    @property
    def text(self) -> str:
        if self.min_accuracy is not None:
            return f"the fastest setting with an accuracy of at least {self.min_accuracy:.1%}"
        points = f"{self.within:g} percentage point{'' if self.within == 1 else 's'}"
        return f"the fastest setting within {points} of the most accurate one"


@dataclass(frozen=True)
class Choice:
    """What was chosen from a list of settings.

    chosen, reference: places in that list; the reference is the most accurate setting. bound: the
    accuracy that had to be reached. reached: whether any setting does; where none does, the chosen
    one is the most accurate.
    """

    chosen: int
    reference: int
    bound: float
    reached: bool


def most_accurate(measured: Sequence[Measurements]) -> int:
    """The place of the most accurate setting, of equally accurate ones the slowest: the careful
    one, and so the better reference where problems are few."""
    return max(
        range(len(measured)), key=lambda i: (measured[i].accuracy, -measured[i].tokens_per_second)
    )


def choose(goal: Goal, measured: Sequence[Measurements]) -> Choice:
    """The choice among settings measured on the same problems. measured: at least one."""
    reference = most_accurate(measured)
    bound = goal.bound(measured[reference].accuracy)
    allowed = [i for i, e in enumerate(measured) if e.accuracy >= bound - TOUCH]
    if not allowed:
        # Only a fixed bound can be out of reach; then accuracy decides.
        best = measured[reference].accuracy
        allowed = [i for i, e in enumerate(measured) if e.accuracy >= best - TOUCH]
    chosen = max(allowed, key=lambda i: (measured[i].tokens_per_second, measured[i].accuracy))
    reached = measured[chosen].accuracy >= bound - TOUCH
    return Choice(chosen, reference, bound, reached)


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """The places of the (speed, accuracy) points that no other one dominates, fastest first: none
    is at least as fast and as accurate and better in one of the two. Of equal points the first."""
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1], i))
    front: list[int] = []
    for i in order:
        # In order of speed a slower point must be more accurate than all before it, of which the
        # last on the front is the most accurate.
        if not front or points[i][1] > points[front[-1]][1]:
            front.append(i)
    return front


@dataclass(frozen=True)
class Verdict:
    """Whether a choice holds up on other problems.

    margin: accuracy above the bound, a share (negative: below). low, high: its 95 % interval.
    """

    margin: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.margin >= -TOUCH

    @property
    def certain(self) -> bool:
        """Whether the interval lies on one side of the bound."""
        return self.low >= 0 or self.high < 0


def verdict(goal: Goal, chosen: Measurements, reference: Measurements) -> Verdict:
    """The chosen setting against the goal, both measured on the same problems. With a bound below
    the reference the interval is that of the paired difference."""
    if goal.min_accuracy is not None:
        low, high = chosen.interval
        least = goal.min_accuracy
        return Verdict(chosen.accuracy - least, low - least, high - least)
    points = goal.within / 100
    low, high = paired_interval(chosen, reference)
    return Verdict(chosen.accuracy - reference.accuracy + points, low + points, high + points)


def paired_interval(a: Measurements, b: Measurements) -> tuple[float, float]:
    """95 % interval of the accuracy of a minus that of b, on the same problems."""
    return paired(int((a.right & ~b.right).sum()), int((~a.right & b.right).sum()), a.problems)
