"""How every command ends: a line on standard error, and a status that a script can tell apart."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from d2f.errors import InputError, NonFiniteLogitsError, OutputError
from decode.commands.run_command import command

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


def test_a_status_of_its_own_stays_and_a_bug_is_seen():
    assert command(interrupted="")(lambda status: status)(7) == 7
    with pytest.raises(ZeroDivisionError):
        command(interrupted="")(lambda: 1 / 0)()


@pytest.mark.parametrize("module", ["decode.evaluate", "decode.tune"])
def test_a_reader_that_left_is_no_traceback(module, tmp_path):
    """As with `| head`: standard output is a pipe that nobody reads."""
    code = (
        f"import sys, {module} as m\n"
        "m.run = lambda *_, **__: (print('a line'), sys.stdout.flush())\n"
        "sys.exit(m.main(sys.argv[1:]))"
    )
    given = ["--output", str(tmp_path / "o")] if module == "decode.tune" else []
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", code, *given],
            stdout=pipe, stderr=subprocess.PIPE, cwd=ROOT, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, b"")
