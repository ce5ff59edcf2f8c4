"""What a problem is, and what a task has to draw to make one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

Item = TypeVar("Item")


@dataclass(frozen=True)
class Problem:
    """One question with its worked response.

    task: the task's name. question: the user's message. answer: the full worked response.
    key: the problem's identity without its wording; equal keys are the same problem.
    """

    task: str
    question: str
    answer: str
    key: str


class Draft(Protocol):
    """A problem drawn but not yet put into words: enough to know its split."""

    @property
    def key(self) -> str:
        """The key of the problem that `write` returns."""

    def write(self, rng: np.random.Generator) -> Problem:
        """The problem, in words chosen by rng."""


def pick(rng: np.random.Generator, items: Sequence[Item]) -> Item:
    """One of items, each as likely (several times quicker than rng.choice)."""
    return items[int(rng.random() * len(items))]


def pick_integer(rng: np.random.Generator, low: int, high: int) -> int:
    """An integer of low..high, both included, each as likely."""
    return low + int(rng.random() * (high - low + 1))
