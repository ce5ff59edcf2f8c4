"""Tiny verifiable tasks: problems generated from a seed, and a checker for generated text.

The tokenizer that goes with them is made by `d2f.tasks.tokenizer.train_tokenizer`.
"""

from d2f.tasks.problem import Problem
from d2f.tasks.registry import TASKS, check
from d2f.tasks.splits import SPLITS, make_problem, make_problems, split_of

__all__ = [
    "SPLITS",
    "TASKS",
    "Problem",
    "check",
    "make_problem",
    "make_problems",
    "split_of",
]
