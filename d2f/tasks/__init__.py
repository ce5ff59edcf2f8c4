"""Tasks: problems with a judge of the responses. Tiny ones are generated from a seed; any file or
data set is one with a judge (`d2f.tasks.task_file`).

The tokenizer that goes with the tiny ones is made by `d2f.tasks.tokenizer.train_tokenizer`.
"""

from d2f.tasks.find_task import find_task, find_tasks, task_of_data
from d2f.tasks.problem import Problem
from d2f.tasks.registry import DEFAULT_TASKS, TASKS, check
from d2f.tasks.splits import SPLITS, make_problem, make_problems, split_of
from d2f.tasks.task import Task, before_stop

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
