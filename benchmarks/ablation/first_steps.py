"""What an ablation has made before its runs: a teacher, rollouts."""

from __future__ import annotations

import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ablation.ablation_config import First, Run
from benchmarks.ablation.run_processes import processes
from d2f.errors import InputError


def needed(first: Sequence[First], runs: Sequence[Run]) -> list[First]:
    """What these runs read, and what that reads in turn, in the order of `first`."""
    read = {text for run in runs for text in _texts(run)}
    found: list[First] = []
    for step in reversed(first):
        if step.makes in read:
            found.insert(0, step)
            read.update(shlex.split(step.run))
    return found


def make(steps: Sequence[First]) -> None:
    """Carry out one after another, each in a process of its own, which is told to end where this
    one was killed. Raises InputError where one failed or did not make what it should."""
    for step in steps:
        print(f"first: python -m {step.run}", flush=True)
        with processes(1) as pool:
            status = pool.submit(_call, step.run).result()
        if status:
            raise InputError(f"python -m {step.run} ended with {status}: it says why above")
        if not Path(step.makes).exists():
            raise InputError(
                f"python -m {step.run} ended and {step.makes} is not there: if it was stopped, the "
                "same command goes on; if not, expected a `first` that makes it"
            )


def _call(words: str) -> int | None:
    """Run a module with arguments; its exit status, None or 0 where it is done. What it ends with
    instead of a number is printed, and is 1."""
    sys.argv = shlex.split(words)
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code
    return None


def _texts(run: Run) -> Iterator[str]:
    """Every text in what a run is of."""
    left: list[Any] = [run.model, run.config.model_dump(mode="json") if run.config else None]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
