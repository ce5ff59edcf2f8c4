"""Tasks: problems with a judge of the responses. Tiny ones are generated from a seed; any file or
data set is one with a judge (`d2f.tasks.data_task`).

The tokenizer that goes with the tiny ones is made by `d2f.tasks.tokenizer.train_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from d2f.config import check as check_config
from d2f.config import read_mapping
from d2f.errors import InputError, did_you_mean, not_one_of
from d2f.shipped import EVALUATION, find_config, shipped
from d2f.tasks.data_task import DataTask, TaskFile
from d2f.tasks.judges import CodeExecution, make_judge
from d2f.tasks.problem import Problem
from d2f.tasks.task import (
    DEFAULT_TASKS,
    GENERATED,
    SPLITS,
    TASKS,
    Task,
    before_stop,
    check,
    make_problem,
    make_problems,
    split_of,
)


def find_task(
    given: str,
    *,
    allow_code_execution: CodeExecution = False,
    data_files: Mapping[str, str] | None = None,
) -> Task:
    """Find a task by its name or YAML file; its data is not read yet.

    allow_code_execution: may a judge run what a model wrote? data_files: local files by the split
    of the data set that each stands for. Raises InputError.
    """
    if given in GENERATED:
        if data_files:
            raise InputError(f"{given} is generated: --data-files is for tasks that read data")
        return GENERATED[given]
    try:
        path = find_config(given, *EVALUATION)
    except InputError as error:
        known = [*GENERATED, *shipped(*EVALUATION)]
        raise InputError(
            f"there is no task or task file {given!r:.200}{did_you_mean(given, known)}; expected "
            f"one of {', '.join(known)}, or a task file"
        ) from error
    file = check_config(TaskFile, read_mapping(path), str(path))
    judge = make_judge(
        file.judge, str(path), allow_code_execution=allow_code_execution, from_file=True
    )
    allowed = "--unsafe" if allow_code_execution == "unsafe" else "--allow-code-execution"
    words = ("--tasks", given, *([allowed] if judge.name == "python" else []))
    if data_files:
        words += ("--data-files", ",".join(f"{split}={at}" for split, at in data_files.items()))
    return _named(DataTask(file, judge, path.stem, words, path.parent, data_files), str(path))


def find_tasks(
    given: Sequence[Task | str],
    *,
    allow_code_execution: CodeExecution = False,
    data_files: Mapping[str, str] | None = None,
) -> tuple[Task, ...]:
    """Find several tasks, each once; a Task stays as it is. Raises InputError, also for a data file
    that none of them reads."""
    tasks = tuple(
        find_task(one, allow_code_execution=allow_code_execution, data_files=data_files)
        if isinstance(one, str)
        else one
        for one in given
    )
    names = [task.name for task in tasks]
    if not tasks or len(set(names)) < len(names):
        raise InputError(f"expected tasks, each once, got {','.join(names)!r}")
    files = data_files or {}
    known = {split for task in tasks if isinstance(task, DataTask) for split in task.data_splits}
    for split in files:
        if split not in known:
            raise InputError(f"{','.join(names)}: --data-files: {not_one_of(split, sorted(known))}")
    if len(set(files.values())) < len(files):
        raise InputError(
            "--data-files must be disjoint: give parts, test=PATH[10:],train=PATH[:10]"
        )
    return tasks


def task_of_data(data: str, judge: str, *, allow_code_execution: CodeExecution = False) -> Task:
    """Make a task of a file or data set and a judge. Raises InputError."""
    file = check_config(TaskFile, {"data": data, "judge": judge}, f"--data {data}")
    made = make_judge(judge, "--judge", allow_code_execution=allow_code_execution)
    words = ("--data", data, "--judge", judge)
    return _named(DataTask(file, made, Path(data).stem, words), f"--data {data}")


def _named(task: DataTask, where: str) -> DataTask:
    if task.name in GENERATED:
        raise InputError(f"{where}: {task.name} is the name of a generated task: give another name")
    return task


__all__ = [
    "DEFAULT_TASKS",
    "SPLITS",
    "TASKS",
    "Problem",
    "Task",
    "before_stop",
    "check",
    "find_task",
    "find_tasks",
    "make_problem",
    "make_problems",
    "split_of",
    "task_of_data",
]
