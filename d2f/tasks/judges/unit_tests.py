"""The judge `python`: runs what the model wrote, and then the problem's own tests."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from d2f.configuration import Switch
from d2f.errors import InputError
from d2f.quantities import Text
from d2f.tasks.execution.run_tests import Limits, passes, protection
from d2f.tasks.judges.judge import Judge
from d2f.tasks.problem import Problem
from d2f.tasks.templates import columns_of, render

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


class Python(Judge):
    """The program passes the tests: both are templates of the row, and the program of `response`
    too. HumanEval: ``program: "{{ prompt }}{{ response }}"``, ``tests: "{{ test }}\\n
    check({{ entry_point }})"``. MBPP: ``tests: "{{ test_list | join('\\n') }}"``. Only with
    `--allow-code-execution` (`d2f.tasks.execution` says what holds the code back)."""

    name: ClassVar[str] = "python"
    program: Text = "{{ response }}"
    """What is loaded."""
    tests: Annotated[str, Field(min_length=1, max_length=10_000)]
    """What runs then; it passes if nothing is raised."""
    fenced: Switch = True
    """Take the first block of code between ``` where the response has one."""
    seconds: Annotated[int, Field(ge=1, le=3600)] = 10
    """That a program with its tests may take."""
    memory_mb: Annotated[int, Field(ge=64, le=2**20)] = 1024
    """Address space of each of its processes."""

    @field_validator("program", "tests")
    @classmethod
    def _readable(cls, template: str) -> str:
        columns_of(template)
        return template

    def right(self, problem: Problem, text: str) -> bool:
        block = _FENCE.search(text) if self.fenced else None
        row = {**problem.row, "response": block[1] if block else text}
        limits = Limits(seconds=self.seconds, memory_mb=self.memory_mb)
        try:
            row["response"].encode()
        except UnicodeEncodeError:  # half a surrogate pair, which no program has
            return False
        return passes(render(self.program, row), render(self.tests, problem.row), limits)

    def check(self, problem: Problem) -> None:
        render(self.program, {**problem.row, "response": ""})
        render(self.tests, problem.row)

    @property
    def columns(self) -> set[str]:
        return (columns_of(self.program) | columns_of(self.tests)) - {"response"}

    @property
    def judging_seconds(self) -> float:
        """Above its own limit, which ends a program."""
        return self.seconds + 60.0

    @property
    def notice(self) -> str:
        return f"the code that the model writes is run here, in {protection()}"


def refuse_unasked() -> InputError:
    """What a task with this judge is told where it was not asked for."""
    return InputError(
        "the judge python runs what the model wrote on this machine: give "
        "--allow-code-execution (allow_code_execution: true in a configuration) if that is meant"
    )
