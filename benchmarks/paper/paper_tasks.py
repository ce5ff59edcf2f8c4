"""The tasks of a table: its task files, on the hub's data or on other rows, decoded to the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.config import check
from d2f.errors import InputError
from d2f.shipped import EVALUATION, find_config
from d2f.tasks import Problem, Task, before_stop
from d2f.tasks.data_task import DataTask, TaskFile, read_task_file
from d2f.tasks.judges import make_judge

if TYPE_CHECKING:  # it loads torch, which takes seconds, and each process that judges imports this
    from benchmarks.paper.paper_table import PaperTask


class WholeResponse(Task):
    """A task whose responses are decoded to the end, as the papers' codes do, and cut at its stop
    strings (`cuts`) only when they are judged."""

    def __init__(self, task: Task):
        self.task, self.cuts = task, task.stop
        self.name, self.response_length, self.words = task.name, task.response_length, task.words
        self.notice, self.identity = task.notice, task.identity
        self.judging_seconds = task.judging_seconds

    def problems(self, split: str, count: int | None, seed: int = 0) -> list[Problem]:
        return self.task.problems(split, count, seed)

    def right(self, problem: Problem, text: str) -> bool:
        return self.task.right(problem, before_stop(text, self.cuts))

    def answer(self, text: str) -> str | None:
        return self.task.answer(before_stop(text, self.cuts))


def runs_code(task: PaperTask) -> bool:
    """Whether its judge runs what the model wrote. Raises InputError."""
    judge = _values(task)[0].get("judge")
    return (judge.get("name") if isinstance(judge, dict) else judge) == "python"


def make_task(name: str, task: PaperTask, data: str | None, *, allow_code_execution: bool) -> Task:
    """A task of the table. data: a file of rows, or a folder of save_to_disk, with the columns of
    the task's own data set and in its place. Raises InputError."""
    values, path = _values(task)
    if data is not None:
        values |= _instead(values, data)
    where = str(path)
    file = check(TaskFile, values, where)
    judge = make_judge(file.judge, where, allow_code_execution=allow_code_execution)
    return DataTask(file, judge, name, words=("--data", where), folder=path.parent)


def _values(task: PaperTask) -> tuple[dict[str, Any], Path]:
    path = find_config(task.task, *EVALUATION)
    return read_task_file(path) | task.changes, path


def _instead(values: dict[str, Any], data: str) -> dict[str, Any]:
    """The keys that other data changes. All rows of a file are problems, and examples are others of
    them; a folder has the splits of the data set that it stands for."""
    place = Path(data)
    if not place.exists():
        raise InputError(f"--data: {data}: there is no such file or folder")
    changed: dict[str, Any] = {"data": str(place.absolute()), "dataset_config": None}
    if place.is_file():
        changed |= {"splits": {"heldout": 1.0}}
        few = values.get("few_shot")
        if few is not None and "count" in few:
            changed["few_shot"] = few | {"split": "heldout"}
    return changed
