"""How every command ends: a line on standard error, and a status that a script can tell apart."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from d2f.errors import InputError, NonFiniteLogitsError, OutputError
from decode.cli import command

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (InputError("bad"), 2, "error: bad\n"),
        (OutputError("full"), 2, "error: full\n"),
        (FloatingPointError("of this command"), 2, "error: of this command\n"),
        (NonFiniteLogitsError("nan"), 1, "error: nan\n"),
        (KeyboardInterrupt(), 130, "stopped, it goes on\n"),
    ],
)
def test_what_is_raised_is_a_line_and_a_status(capsys, error, status, said):
    @command(FloatingPointError, interrupted="stopped, it goes on")
    def main():
        if error is not None:
            raise error

    assert main() == status
    assert capsys.readouterr().err == said


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


@pytest.mark.parametrize("module", ["decode.pipeline", "decode.tune"])
@pytest.mark.parametrize("output", ["unread", "full"])
def test_an_output_that_cannot_be_written_is_no_traceback(module, output, tmp_path):
    """As with `| head`: standard output is a pipe that nobody reads; or it lies on a full disk. A
    command that writes files goes on."""
    code = (
        f"import sys, {module} as m\n"
        "m.run = lambda *_, **__: print('a line')\n"
        "sys.exit(m.main(sys.argv[1:]))"
    )
    files = module == "decode.tune"
    given = ["--output", str(tmp_path / "o")] if files else []
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread, open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *given],
            stdout=unread if output == "unread" else full,
            stderr=subprocess.PIPE, cwd=ROOT, check=False, text=True,
        )  # fmt: skip
    assert done.returncode == (0 if files else 1)
    said = "standard output: No space left on device"
    lost = f"notice: {said}: the rest of it is lost\n" if files else f"error: {said}\n"
    assert done.stderr == ("" if output == "unread" else lost)
