"""Running a command inside a fuzzer: what it would not do for an example is cut off."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

from d2f.errors import InputError

REACHED = "the expensive part"


class Reached(BaseException):
    """The command line was accepted: what comes next loads weights, trains or measures."""


def reached(*_: Any, **__: Any) -> Any:
    raise Reached


def run_command(main: Callable[[list[str]], int | None], arguments: list[str]) -> str:
    """What an accepted command line printed, or `REACHED`. Raises InputError where it was refused,
    as a command says so, and SystemExit as it comes."""
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            status = main(arguments)
        except Reached:
            return REACHED
        except SystemExit as end:
            if isinstance(end.code, str) or end.code in (0, None):
                raise
            status = end.code if isinstance(end.code, int) else 1
    if status in (0, None):
        return printed.getvalue()
    lines = [line for line in said.getvalue().splitlines() if not _is_usage(line)]
    assert status in (1, 2) and len(lines) == 1, (status, said.getvalue()[:2000])
    before, mark, message = lines[0].partition("error: ")
    assert mark and re.fullmatch(r"|d2f[a-z ]*: |[a-z -]*[a-z.]+\S*: ", before), said.getvalue()
    raise InputError(message)


def flags_of(main: Callable[[list[str]], int | None]) -> list[str]:
    """Every option that a command's --help names."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(["--help"])
    return sorted(set(re.findall(r"--[a-z][a-z0-9-]+", printed.getvalue())))


def _is_usage(line: str) -> bool:
    return line.startswith(("usage: ", " ", "notice: ")) or not line
