"""Judges that compare text: `exact`, `contains`, `regex`."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import field_validator

from d2f.configuration import Switch
from d2f.quantities import Text
from d2f.tasks.judges.judge import Judge
from d2f.tasks.problem import Problem


class Exact(Judge):
    """The response is the reference, but for blanks around it."""

    name: ClassVar[str] = "exact"
    ignore_case: Switch = False
    """Upper and lower case are one."""

    def right(self, problem: Problem, text: str) -> bool:
        return self.answer(text) == self.answer(problem.answer)

    def answer(self, text: str) -> str | None:
        text = text.strip()
        return text.casefold() if self.ignore_case else text


class Contains(Judge):
    """The reference, without blanks around it, is somewhere in the response."""

    name: ClassVar[str] = "contains"
    ignore_case: Switch = False
    """Upper and lower case are one."""

    def right(self, problem: Problem, text: str) -> bool:
        wanted = problem.answer.strip()
        if self.ignore_case:
            return wanted.casefold() in text.casefold()
        return wanted in text


class Regex(Judge):
    """What the pattern finds in the response (its first group, or all of it) is the reference."""

    name: ClassVar[str] = "regex"
    pattern: Text
    """As Python's `re` reads it, with ^ and $ at the ends of lines."""
    take: Literal["first", "last"] = "first"
    """Of several finds."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.MULTILINE)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern[:60]!r} is no regular expression: {error}") from error
        return pattern

    def right(self, problem: Problem, text: str) -> bool:
        return self.answer(text) == problem.answer.strip()

    def answer(self, text: str) -> str | None:
        found = list(re.finditer(self.pattern, text, re.MULTILINE))
        if not found:
            return None
        chosen = found[0 if self.take == "first" else -1]
        value: str | None = chosen[1 if chosen.re.groups else 0]
        return None if value is None else value.strip()
