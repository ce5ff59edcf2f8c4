"""What a task is, wherever its problems come from: generated ones, or the rows of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from d2f.errors import InputError
from d2f.tasks.problem import Problem
from d2f.tasks.registry import ANSWER, RESPONSE_LENGTH, TASKS, check
from d2f.tasks.splits import SPLITS, make_problems

ALL = "all"
"""In place of a split: every row of a task's data, where its splits are shares of it."""


class Task(ABC):
    """Problems in disjoint splits, and a judge of responses.

    name: unique within a run. response_length: most tokens of a response. stop: strings that end
    one. identity: what decides its problems and verdicts; a run that goes on must have the same.
    default_count: problems that are evaluated where nobody says how many, None for all. notice:
    what a user should know before anything is judged. words: how a command line names it.
    judging_seconds: how long a judgement in a process of its own may take, beside others; None: it
    is made in this one.
    """

    name: str
    response_length: int
    stop: tuple[str, ...] = ()
    identity: str
    default_count: int | None = None
    notice: str | None = None
    words: tuple[str, ...]
    judging_seconds: float | None = None

    @abstractmethod
    def problems(self, split: str, count: int | None, seed: int = 0) -> list[Problem]:
        """The first `count` problems of a split, in an order that the seed decides; None: all that
        there are. Fewer are the beginning of more. Raises InputError for a split or data that
        there is not, ValueError for more problems than there are."""

    @abstractmethod
    def right(self, problem: Problem, text: str) -> bool:
        """Whether text, a decoded response, solves the problem."""

    @abstractmethod
    def answer(self, text: str) -> str | None:
        """What a response answers, so that equal answers can be counted; None where it has none."""

    def kept_back(self, split: str) -> int:
        """Problems that there are beside those of a split, and that could be evaluated too."""
        return 0


@dataclass(frozen=True)
class GeneratedTask(Task):
    """One of the tiny tasks, whose problems are made from a seed."""

    name: str
    default_count: int | None = 500

    @property
    def response_length(self) -> int:  # type: ignore[override]
        return RESPONSE_LENGTH[self.name]

    @property
    def identity(self) -> str:  # type: ignore[override]
        return self.name

    @property
    def words(self) -> tuple[str, ...]:  # type: ignore[override]
        return "--tasks", self.name

    def problems(self, split: str, count: int | None, seed: int = 0) -> list[Problem]:
        if split == ALL:
            raise InputError(f"{self.name} has no split {ALL}, it has {', '.join(SPLITS)}")
        if count is None:
            raise ValueError(f"{self.name} has no last problem: expected a number of them")
        return make_problems(self.name, split, count, seed)

    def right(self, problem: Problem, text: str) -> bool:
        return check(problem, text)

    def answer(self, text: str) -> str | None:
        return ANSWER[self.name](text) if self.name in ANSWER else None


def before_stop(text: str, stop: tuple[str, ...]) -> str:
    """Text before the first stop string: what a reader gets."""
    cuts = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(cuts)] if cuts else text


GENERATED: dict[str, Task] = {name: GeneratedTask(name) for name in TASKS}
