"""What was measured on problems of a task, one by one, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from decode.reporting.intervals import wilson


@dataclass(frozen=True, eq=False)
class Measurements:
    """Problems decoded by one decoder; all arrays are [problems].

    right: whether the response solves the problem. tokens: visible ones. forwards: calls of the
    model that the request was in. seconds: wall time; of problems decoded together each has a
    share, so that they add up to the time that passed.
    """

    right: npt.NDArray[np.bool_]
    tokens: npt.NDArray[np.int64]
    forwards: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]

    def first(self, count: int) -> Measurements:
        """The first `count` problems of it."""
        part = slice(count)
        return Measurements(
            self.right[part], self.tokens[part], self.forwards[part], self.seconds[part]
        )

    @property
    def problems(self) -> int:
        return len(self.right)

    @property
    def count_right(self) -> int:
        return int(self.right.sum())

    @property
    def accuracy(self) -> float:
        return self.count_right / self.problems

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the accuracy."""
        return wilson(self.count_right, self.problems)

    @property
    def tokens_per_second(self) -> float:
        # A ratio of sums: a mean of ratios would count short answers as much as long ones.
        return float(self.tokens.sum() / self.seconds.sum())

    @property
    def tokens_per_forward(self) -> float:
        return float(self.tokens.sum() / self.forwards.sum())

    @property
    def forwards_per_problem(self) -> float:
        return float(self.forwards.sum() / self.problems)

    @property
    def seconds_per_problem(self) -> float:
        return float(self.seconds.sum() / self.problems)

    def numbers(self) -> dict[str, Any]:
        """Sums and shares, as reports have them."""
        low, high = self.interval
        return {
            "problems": self.problems,
            "right": self.count_right,
            "accuracy": self.accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "visible_tokens": int(self.tokens.sum()),
            "forwards": int(self.forwards.sum()),
            "tokens_per_forward": self.tokens_per_forward,
        }


def joined(parts: list[Measurements]) -> Measurements:
    """Parts one after another. parts: at least one."""
    names = [field.name for field in fields(Measurements)]
    return Measurements(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))
