"""Who has files for its results goes on where its output is not read, is full or is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
from d2f.quiet import unread_output
with unread_output():
    for stream in (sys.stdout, sys.stderr):
        for line in range(3000):
            print("line", line, file=stream, flush=line % 7 == 0)
    open(sys.argv[1], "w").write("done")
"""


@pytest.mark.parametrize("redirected", ["| head -1", "2>&1 | head -1", ">/dev/full", ">&-", "2>&-"])
def test_the_work_is_done_and_nothing_fails(tmp_path, redirected):
    shell = f'"$0" -c "$1" "$2" {redirected}; echo "${{PIPESTATUS[0]}}" >"$2.status"'
    command = ["bash", "-c", shell, sys.executable, PROGRAM, str(tmp_path / "file")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (tmp_path / "file").read_text() == "done"
    assert (tmp_path / "file.status").read_text() == "0\n"
    said = [line for line in ran.stderr.splitlines() if not line.startswith("line ")]
    lost = "notice: standard output: No space left on device: the rest of it is lost"
    assert said == ([lost] if redirected == ">/dev/full" else [])


def test_what_can_be_written_is(capsys):
    from d2f.quiet import unread_output

    with unread_output():
        print("one")
        print("two", file=sys.stderr)
    print("three")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("one\nthree\n", "two\n")
