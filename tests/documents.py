"""Commands that stand in documents, run in small and in this process."""

from __future__ import annotations

import contextlib
import io
import shlex
from importlib import import_module
from pathlib import Path
from unittest import mock

from accelerate.state import AcceleratorState

from d2f.command import COMMANDS

ROOT = Path(__file__).parent.parent


def run(command: str, folder: Path, smaller: dict[str, str] | None = None) -> str:
    """Run a command in a folder, with more behind it where it starts with a key of `smaller`;
    return what it printed."""
    words = shlex.split(command)
    for start, more in (smaller or {}).items():
        if command.startswith(start) and "--prompt" not in command:
            words += more.split()
    if words[0] == "d2f":
        module, words = COMMANDS[words[1]][0], words[2:]
    elif words[:2] == ["python", "-m"]:
        module, words = words[2], words[3:]
    else:
        raise AssertionError(f"a document has a command that no test knows: {command}")
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in words]
    AcceleratorState._reset_state(reset_partial_state=True)  # of another test's training
    with contextlib.chdir(folder):
        out = printed([module, *words])
    AcceleratorState._reset_state(reset_partial_state=True)
    return out


def printed(words: list[str]) -> str:
    """Run a module's main with these arguments; return what it printed on standard output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), mock.patch("sys.argv", words):
        try:
            assert not import_module(words[0]).main(), out.getvalue()
        except SystemExit as end:  # after --help
            assert not end.code
    return out.getvalue()
