"""What every judge is: options that are checked, and a verdict on a response."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from d2f.configuration import Section
from d2f.tasks.problem import Problem


class Judge(Section):
    """Says whether a response solves a problem. Its fields are its options in a task file."""

    name: ClassVar[str]

    @abstractmethod
    def right(self, problem: Problem, text: str) -> bool:
        """Whether text, a decoded response, solves the problem. No text makes it raise."""

    def answer(self, text: str) -> str | None:
        """What a response answers, so that equal answers of several responses can be counted (the
        majority vote); None where it has no answer, or none that could be compared."""
        return None

    def check(self, problem: Problem) -> None:
        """Raise BadRecord for a problem that no response could solve."""

    @property
    def columns(self) -> set[str]:
        """Columns of the data that it reads."""
        return set()

    @property
    def judging_seconds(self) -> float | None:
        """As `d2f.tasks.Task` has it: a time after which no verdict will come."""
        return None

    @property
    def source(self) -> str:
        """A digest of what decides its verdicts beside its options; empty where that is this
        version of the toolkit."""
        return ""

    @property
    def notice(self) -> str | None:
        """What a user should know before it judges."""
        return None
