"""The tasks by name: how each draws a problem and how each judges a response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from d2f.tasks import coding, countdown, story, sudoku
from d2f.tasks.problem import Draft, Problem

DRAW: dict[str, Callable[[np.random.Generator], Draft]] = {
    "story": story.draw,
    "countdown": countdown.draw,
    "sudoku": sudoku.draw,
    "coding": coding.draw,
}
CHECK: dict[str, Callable[[Problem, str], bool]] = {
    "story": story.check,
    "countdown": countdown.check,
    "sudoku": sudoku.check,
    "coding": coding.check,
}
ANSWER: dict[str, Callable[[str], str | None]] = {"story": story.answer, "sudoku": sudoku.answer}
"""What a response answers, of the tasks whose answers can be told equal."""
TASKS: tuple[str, ...] = tuple(DRAW)
DEFAULT_TASKS = ("story", "countdown", "sudoku")
"""Those that the bundled models were trained on: what a command takes where none is named."""
RESPONSE_LENGTH: dict[str, int] = {"story": 64, "countdown": 32, "sudoku": 32, "coding": 224}
"""Tokens that hold any response of a task, with its end: what a benchmark of it decodes."""


def number_of(kind: str, name: str, names: Sequence[str]) -> int:
    """The place of name in names. Raises ValueError, naming the kind, where it is none of them."""
    if name not in names:
        raise ValueError(f"{kind} must be one of {', '.join(names)}, got {name!r}")
    return names.index(name)


def check(problem: Problem, text: str) -> bool:
    """Whether text, a decoded response, solves the problem. No string makes it raise.

    story: the integer after the first "####" counts, whatever the steps and the rest say.
    countdown: every line is checked, and nothing may follow the last step.
    sudoku: the grid must be the solution, and nothing may follow it.
    coding: a function of the asked name must pass the tests, and nothing may follow it.

    Raises ValueError if the problem's task is none of TASKS.
    """
    number_of("task", problem.task, TASKS)
    return CHECK[problem.task](problem, text)
