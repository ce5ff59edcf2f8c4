"""What tests of a group share is made once: with a pytest that the installed pytest-xdist does not
know, groups are ignored without a word, and the suite takes minutes more."""

from __future__ import annotations

import os
import subprocess
import sys

MODULE = """
import os
from pathlib import Path
import pytest

pytestmark = pytest.mark.xdist_group("one")

@pytest.mark.parametrize("i", range(8))
def test_of_the_group(i):
    Path(__file__).with_name(f"{os.environ['PYTEST_XDIST_WORKER']}.ran").touch()
"""


def test_a_group_runs_in_one_process(tmp_path):
    (tmp_path / "test_grouped.py").write_text(MODULE)
    words = ["-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.glob("*.ran"))) == 1
