"""Define a task, whether its problems are generated or come from rows of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from d2f.errors import InputError, not_one_of
from d2f.tasks import coding, countdown, story, sudoku
from d2f.tasks.problem import Problem

# The generated tasks. A module has `draw`, `check`, and `answer` where answers can be told equal.
_MODULES: dict[str, Any] = {
    "story": story,
    "countdown": countdown,
    "sudoku": sudoku,
    "coding": coding,
}
TASKS: tuple[str, ...] = tuple(_MODULES)
DEFAULT_TASKS = ("story", "countdown", "sudoku")
"""The tasks that the bundled models were trained on; a command takes them where none is named."""
RESPONSE_LENGTH: dict[str, int] = {"story": 64, "countdown": 32, "sudoku": 32, "coding": 224}
"""Tokens that hold any response of a task, with its end: what a benchmark of it decodes."""
SPLITS: tuple[str, ...] = ("train", "tuning", "heldout")
ALL = "all"
"""In place of a split: every row of a task's data, where its splits are shares of it."""
MAX_REPEATS = 500  # repeated keys in a row after which a split counts as exhausted
MAX_COUNT = 100_000  # distinct problems at a time: about a minute and a half of drawing


def check(problem: Problem, text: str) -> bool:
    """Check that a decoded response solves the problem. No text makes it raise.

    story: the integer after the first "####" counts, whatever the steps and the rest say.
    countdown: every line is checked, and nothing may follow the last step.
    sudoku: the grid must be the solution, and nothing may follow it.
    coding: a function of the asked name must pass the tests, and nothing may follow it.

    Raises ValueError if the problem's task is none of TASKS.
    """
    _number_of("task", problem.task, TASKS)
    return bool(_MODULES[problem.task].check(problem, text))


def split_of(key: str) -> str:
    """Return the split of every problem with this key: 5% heldout, 5% tuning, 90% train.

    It depends on the key alone, so splits stay disjoint whatever seeds they are drawn with.
    """
    # A digest, since Python's own hash() of text differs from one process to the next.
    bucket = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") % 100
    if bucket < 5:
        return "heldout"
    return "tuning" if bucket < 10 else "train"


def make_problem(task: str, split: str, index: int, seed: int = 0) -> Problem:
    """Make the problem at index from the arguments alone; other indexes may repeat its key.

    Raises ValueError for an unknown task or split, and for a negative index or seed.
    """
    task_number = _number_of("task", task, TASKS)
    split_number = _number_of("split", split, SPLITS)
    rng = np.random.default_rng([seed, task_number, split_number, index])
    draw = _MODULES[task].draw
    draft = draw(rng)
    while split_of(draft.key) != split:  # one in twenty is heldout
        draft = draw(rng)
    problem: Problem = draft.write(rng)
    return problem


def make_problems(task: str, split: str, count: int, seed: int = 0) -> list[Problem]:
    """Make the first count problems with distinct keys, walking the indexes from 0.

    Raises ValueError as make_problem does, and for a count above MAX_COUNT or beyond what the split
    holds (MAX_REPEATS repeats in a row).
    """
    if count > MAX_COUNT:
        raise ValueError(f"count must be at most {MAX_COUNT}, got {count}")
    found: dict[str, Problem] = {}
    index = repeats = 0
    while len(found) < count:
        problem = make_problem(task, split, index, seed)
        index += 1
        repeats = repeats + 1 if problem.key in found else 0
        found.setdefault(problem.key, problem)
        if repeats == MAX_REPEATS:
            raise ValueError(
                f"count must be at most about {len(found)}, the distinct problems found in "
                f"the {split} split of {task}, got {count}"
            )
    return list(found.values())


def _number_of(kind: str, name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise InputError(f"{kind}: {not_one_of(name, names)}")
    return names.index(name)


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
        """Return the first `count` problems of a split (None: all), in the order of the seed.

        Fewer are the beginning of more. Raises InputError for an unknown split or missing data,
        ValueError for more problems than there are.
        """

    @abstractmethod
    def right(self, problem: Problem, text: str) -> bool:
        """Judge a decoded response."""

    @abstractmethod
    def answer(self, text: str) -> str | None:
        """Extract the answer, so that equal ones can be counted; None without one."""

    def kept_back(self, split: str) -> int:
        """Count the problems outside a split that could be evaluated too."""
        return 0


@dataclass(frozen=True)
class GeneratedTask(Task):
    """Make the problems of a tiny task from a seed."""

    name: str
    identity: str
    response_length: int
    words: tuple[str, ...]
    default_count: int | None = 500

    def problems(self, split: str, count: int | None, seed: int = 0) -> list[Problem]:
        if split == ALL:
            raise InputError(f"{self.name} has no split {ALL}, it has {', '.join(SPLITS)}")
        if count is None:
            raise ValueError(f"{self.name} has no last problem: expected a number of them")
        return make_problems(self.name, split, count, seed)

    def right(self, problem: Problem, text: str) -> bool:
        return check(problem, text)

    def answer(self, text: str) -> str | None:
        extract = getattr(_MODULES[self.name], "answer", None)
        return extract(text) if extract else None


GENERATED: dict[str, Task] = {
    name: GeneratedTask(name, name, RESPONSE_LENGTH[name], ("--tasks", name)) for name in TASKS
}


def before_stop(text: str, stop: tuple[str, ...]) -> str:
    """Cut a text at the first stop string."""
    cuts = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(cuts)] if cuts else text
