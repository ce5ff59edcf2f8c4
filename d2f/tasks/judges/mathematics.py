"""The judge `math`: whether two mathematical expressions are equal, by math-verify."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any, ClassVar

from pydantic import model_validator

from d2f.data_records import BadRecord
from d2f.tasks.judges.judge import Judge
from d2f.tasks.problem import Problem


class Math(Judge):
    r"""The expression that the response ends with equals that of the reference: LaTeX in
    ``\boxed{}`` or ``$...$``, or a plain number or formula. Needs math-verify (the extra
    `evaluation`)."""

    name: ClassVar[str] = "math"

    @model_validator(mode="after")
    def _installed(self) -> Math:
        if find_spec("math_verify") is None:
            raise ValueError(
                "the judge math needs math-verify: pip install 'd2f-toolkit[evaluation]'"
            )
        return self

    def right(self, problem: Problem, text: str) -> bool:
        from math_verify import verify

        wanted, found = _parsed(_marked(problem.answer)), _parsed(text)
        return bool(wanted and found and verify(wanted, found))

    def check(self, problem: Problem) -> None:
        if not _parsed(_marked(problem.answer)):
            raise BadRecord(f"the reference is no expression: {problem.answer[-60:]!r}")

    @property
    def judging_seconds(self) -> float:
        """Above math-verify's own limits, 5 s each to read two texts and to compare them, which do
        not end what sympy computes in one long operation."""
        return 60.0

    def answer(self, text: str) -> str | None:
        found = _parsed(text)
        return str(found[0]) if found else None


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    # It logs each text that it cannot read, which responses are full of.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return list(parse(text))


def _marked(reference: str) -> str:
    """A reference that is the expression alone as LaTeX that says so."""
    is_marked = "\\boxed" in reference or "$" in reference
    return reference if is_marked else f"\\boxed{{{reference}}}"
