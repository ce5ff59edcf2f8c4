"""Which split a problem belongs to, and random access to the problems of a split."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from d2f.tasks.problem import Problem
from d2f.tasks.registry import DRAW, TASKS, number_of

SPLITS: tuple[str, ...] = ("train", "tuning", "heldout")
MAX_REPEATS = 500  # repeated keys in a row after which a split counts as exhausted
MAX_COUNT = 100_000  # distinct problems at a time: about a minute and a half of drawing


def split_of(key: str) -> str:
    """The split of every problem with this key: 5% heldout, 5% tuning, 90% train.

    It depends on the key alone, so splits stay disjoint whatever seeds they are drawn with.
    """
    # A digest, since Python's own hash() of text differs from one process to the next.
    bucket = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") % 100
    if bucket < 5:
        return "heldout"
    return "tuning" if bucket < 10 else "train"


def make_problem(task: str, split: str, index: int, seed: int = 0) -> Problem:
    """The problem at index, a function of the arguments alone. Other indexes may repeat its key.

    Raises ValueError for an unknown task or split, and for a negative index or seed.
    """
    task_number = number_of("task", task, TASKS)
    split_number = number_of("split", split, SPLITS)
    _require_not_negative("index", index)
    _require_not_negative("seed", seed)
    rng = np.random.default_rng([seed, task_number, split_number, index])
    draw = DRAW[task]
    draft = draw(rng)
    while split_of(draft.key) != split:  # one in twenty is heldout
        draft = draw(rng)
    return draft.write(rng)


def make_problems(task: str, split: str, count: int, seed: int = 0) -> list[Problem]:
    """The first count problems with distinct keys, walking the indexes from 0.

    Raises ValueError as make_problem does, for a count that is negative or above MAX_COUNT, before
    any is drawn, and for one beyond what the split holds (MAX_REPEATS repeats in a row).
    """
    _require_not_negative("count", count)
    if count > MAX_COUNT:
        raise ValueError(f"count must be at most {MAX_COUNT}, got {count}")
    number_of("task", task, TASKS)
    number_of("split", split, SPLITS)
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


def _require_not_negative(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} must be 0 or more, got {value}")
