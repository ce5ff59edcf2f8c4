"""Judges by name: what says whether a response solves a problem of a file or data set."""

from __future__ import annotations

from typing import Any

from d2f.configuration import check
from d2f.errors import InputError
from d2f.tasks.judges.judge import Judge
from d2f.tasks.judges.mathematics import Math
from d2f.tasks.judges.own import Own
from d2f.tasks.judges.texts import Contains, Exact, Regex
from d2f.tasks.judges.unit_tests import Python, refuse_unasked
from d2f.tasks.judges.worked_answers import Choice, Numeric

JUDGES: dict[str, type[Judge]] = {
    judge.name: judge for judge in (Exact, Numeric, Choice, Regex, Math, Contains, Python)
}


def make_judge(given: str | dict[str, Any], where: str, *, allow_code_execution: bool) -> Judge:
    """The judge of a name, or of a mapping of `name` and its options. where: said first in errors.
    Raises InputError."""
    options: dict[str, Any] = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name", None)
    try:
        if isinstance(name, str) and name.count(":") == 1:
            return Own.of(name, options)
        if name not in JUDGES:
            raise InputError(
                f"judge must be one of {', '.join(JUDGES)}, or a function of your own as "
                f"module:function, got {name!r:.60}"
            )
        if name == Python.name and not allow_code_execution:
            raise refuse_unasked()
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    return check(JUDGES[name], options, f"{where}: judge {name}")
