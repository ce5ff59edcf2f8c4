"""A judge of the user's own: a function at ``module:function``."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PrivateAttr

from d2f.errors import InputError, repr_of
from d2f.tasks.judges.judge import Judge
from d2f.tasks.problem import Problem


class Own(Judge):
    """The function says so, which is called as ``function(problem, text, **options)`` with a
    `d2f.tasks.Problem` (its `answer` is the reference, its `row` the row of data) and the
    response, and returns True or False. The files of the module and of the function are part of a
    run's identity, what they import is not."""

    name: ClassVar[str] = "module:function"
    _place: str = PrivateAttr()
    _function: Callable[..., object] = PrivateAttr()
    _options: dict[str, Any] = PrivateAttr(default_factory=dict)
    _source: str = PrivateAttr(default="")

    @classmethod
    def of(cls, place: str, options: Mapping[str, Any]) -> Own:
        """The judge at ``module:function``. Raises InputError."""
        module, _, name = place.partition(":")
        if "" not in sys.path:
            sys.path.append("")  # the working folder, after all that is installed
        try:
            found = getattr(import_module(module), name)
        except Exception as error:  # whatever the module raises
            raise InputError(
                f"judge {place}: cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if not callable(found):
            raise InputError(f"judge {place}: expected a function, got {repr_of(found)}")
        judge = cls()
        judge._place, judge._function, judge._options = place, found, dict(options)
        judge._source = _digest(module, found)
        return judge

    @property
    def source(self) -> str:
        return self._source

    def right(self, problem: Problem, text: str) -> bool:
        try:
            verdict = self._function(problem, text, **self._options)
            is_one = verdict in (True, False)
        except Exception as error:  # of the user's own: theirs to repair, so it ends the command
            raise InputError(
                f"judge {self._place}: raised {type(error).__name__}: {error} for the response "
                f"{text[:60]!r}"
            ) from error
        if not is_one:  # a text or a share would count as right, a forgotten return as wrong
            raise InputError(
                f"judge {self._place}: expected True or False, got {repr_of(verdict)} for the "
                f"response {text[:60]!r}"
            )
        return bool(verdict)


def _digest(module: str, function: object) -> str:
    """Of the files that a judge is written in: its module's, and that of the module that its
    function comes from. One without a file (a builtin) has none."""
    names = dict.fromkeys((module, getattr(function, "__module__", module)))
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    found = hashlib.sha256()
    for file in files:
        if file is not None and Path(file).is_file():
            found.update(Path(file).read_bytes())
    return found.hexdigest()
