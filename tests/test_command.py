"""Every command: its name, its help without torch, how it ends, and its status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import d2f
from d2f import command as command_line
from d2f.command import COMMANDS, command, main
from d2f.errors import InputError, NonFiniteLogitsError, OutputError

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "accelerate", "peft", "triton", "datasets")


def started(code: str) -> list[str]:
    """The lines that a fresh Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_importing_a_package_brings_nothing_heavy():
    code = "import sys, d2f, decode, distill, triton_kernels, decode.decoders, decode.batch\n"
    assert started(f"{code}print(set(sys.modules) & set({HEAVY}))") == ["set()"]


def test_version_and_help_list_the_commands(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"d2f-toolkit {d2f.__version__}\n"
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in COMMANDS)
    assert main([]) == 2


def test_every_help_shows_its_command_and_comes_without_torch():
    code = f"""
import sys
from d2f.command import COMMANDS, main
for name in COMMANDS:
    sys.argv[1:] = [name, "--help"]
    try: main()
    except SystemExit as end: assert not end.code
    print("heavy:", *set(sys.modules) & set({HEAVY}))
"""
    lines = started(code)
    usages = [line for line in lines if line.startswith(("usage: d2f ", "d2f "))]
    assert all(any(f"d2f {name}" in line for line in usages) for name in COMMANDS)
    assert [line for line in lines if line.startswith("heavy:")] == ["heavy:"] * len(COMMANDS)


def test_a_command_gets_its_words_and_gives_its_status(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "_called_as", None)
    monkeypatch.setattr("sys.argv", ["d2f"])
    assert main(["configs", "tiny-d2f"]) == 0
    assert capsys.readouterr().out == f"{ROOT}/configs/training/tiny-d2f.yaml\n"
    assert main(["decode", "--batch-size", "0"]) == 2
    assert capsys.readouterr().err == "error: --batch-size must be at least 1, got 0\n"
    assert main(["deocde"]) == 2
    assert "no command 'deocde'; did you mean decode?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (InputError("bad"), 2, "error: bad\n"),
        (OutputError("full"), 2, "error: full\n"),
        (FloatingPointError("of this command"), 2, "error: of this command\n"),
        (NonFiniteLogitsError("nan"), 1, "error: nan\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "stopped, it goes on\n"),
    ],
)
def test_what_is_raised_is_a_line_and_a_status(capsys, monkeypatch, error, status, said):
    @command(FloatingPointError, interrupted="stopped, it goes on")
    def main():
        if error is not None:
            raise error

    assert main() == status
    assert capsys.readouterr().err == said
    if status == 130:  # of several processes one says it
        monkeypatch.setenv("RANK", "1")
        assert (main(), capsys.readouterr().err) == (130, "")


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda: torch.zeros(10**15), "can't allocate memory: you tried to allocate 4000000000000"),
        (lambda: np.zeros(10**15), "Unable to allocate"),
        (lambda: raised(torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")), "CUDA out of"),
    ],
)
def test_too_little_memory_is_a_line(capsys, fails, said):
    assert command(interrupted="")(fails)() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: ") and said in line


def raised(error):
    raise error


def test_a_status_of_its_own_stays_and_a_bug_is_seen():
    assert command(interrupted="")(lambda status: status)(7) == 7
    with pytest.raises(ZeroDivisionError):
        command(interrupted="")(lambda: 1 / 0)()


def test_a_reader_who_left_is_no_traceback():
    """As with `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread:
        done = subprocess.run(
            [sys.executable, "-m", "d2f", "configs"], stdout=unread, stderr=subprocess.PIPE,
            cwd=ROOT, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")


def test_public_names_are_there_when_asked_for():
    assert all(hasattr(d2f, name) for name in d2f.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lood'"):
        _ = d2f.lood
