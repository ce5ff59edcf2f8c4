"""A task whose judge does what a response says. Without torch, since each judging process imports
it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from d2f.tasks import Problem, Task

PROBLEM = Problem("made-up", "?", "yes", "key")


@dataclass
class MadeUp(Task):
    """Says "yes" is right, and does what other responses say."""

    judging_seconds: float | None = 60.0
    name: str = "made-up"

    def problems(self, split, count, seed=0):
        raise NotImplementedError

    def answer(self, text):
        raise NotImplementedError

    def right(self, problem, text):
        if text == "crash":
            os._exit(3)
        if text == "hang":
            time.sleep(600)
        if text == "slow":
            time.sleep(0.3)
        if text == "raise":
            raise ZeroDivisionError("no")
        if text.startswith("process "):
            return os.getpid() == int(text.split()[1])
        return text in (problem.answer, "slow")
