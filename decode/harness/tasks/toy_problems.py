"""Held-out problems of the generated tasks and their judge, as the task files name them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from datasets import Dataset

from d2f.tasks import Problem, check, make_problems

PROBLEMS = 500  # as decode.evaluate takes them; --limit for fewer


def heldout(toy_task: str, **others: Any) -> dict[str, Dataset]:
    """Make the splits of a task. others: lm-eval hands on the model's arguments, too."""
    problems = make_problems(toy_task, "heldout", PROBLEMS)
    return {"heldout": Dataset.from_list([asdict(problem) for problem in problems])}


def judge(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Judge a response by `d2f.tasks.check`."""
    return {"solved": float(check(Problem(**doc), results[0]))}
