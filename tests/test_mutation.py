"""The measure of the tests themselves: benchmarks.mutation on a made-up package."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.mutation.__main__ import measure, report
from benchmarks.mutation.mutants import sample
from benchmarks.mutation.reach import Reach

TIMES = "TIMES = 3\n"
CODE = '''"""A text for people."""

from made_up.times import TIMES


def scaled(x: int) -> int:
    return x * TIMES


def biggest(x: int, y: int) -> int:
    return x if x > y else y


def in_a_process() -> None:
    print(scaled(2))


def unseen() -> None:
    print(1)
'''
TESTS = """
import os, subprocess, sys
import pytest
from made_up.code import biggest, scaled

@pytest.fixture(scope="module")
def six():
    return scaled(2)

def test_first(six):
    pass

def test_scaled(six):
    assert six == 6

def test_biggest():
    assert biggest(1, 2)

def printed(name, **more):
    command = [sys.executable, "-c", f"from made_up import code; code.{name}()"]
    return subprocess.run(command, capture_output=True, check=True, **more).stdout

def test_in_a_process():
    assert printed("in_a_process") == b"6\\n"

def test_in_a_process_that_is_not_measured():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    assert printed("unseen", env=environment) == b"1\\n"
"""
HELPER = "from made_up.code import scaled\n"
QUICK = """
from helper import scaled

def test_quick():
    assert scaled(3)
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    root = tmp_path_factory.mktemp("project")
    for folder, files in [
        ("made_up", {"code.py": CODE, "times.py": TIMES}),
        ("tests", {"test_code.py": TESTS, "test_quick.py": QUICK, "helper.py": HELPER}),
    ]:
        (root / folder).mkdir()
        for name, text in files.items():
            (root / folder / name).write_text(text)
    options = Namespace(
        folders=["made_up"], tests=["tests"], mutants=10, seed=0, jobs=1, seconds=60.0
    )
    return measure(options, root, root / "runs"), root


def test_a_fault_that_a_test_notices_is_killed_and_another_named(measured):
    results, root = measured
    found = {row["line"]: row for row in results}
    assert sorted(found) == [1, 7, 11, 15, 19]
    assert {line for line, row in found.items() if row["killed"]} == {1, 7, 15, 19}
    said = report(results, seed=0)
    assert "made_up/code.py:11" in said and "+    return x if" in said
    assert "killed 4 of 5 mutants, 80.0% (95 % interval 37.6% to 96.4%; seed 0" in said
    assert (root / "made_up" / "code.py").read_text() == CODE


def test_the_tests_that_run_are_those_that_reach_the_line(measured):
    """Also through a fixture of the module or in another process, and first, as there is a limit
    of time, those whose file names the module; then what may not have been measured: the others of
    that file, and for what runs at the import all."""
    _, root = measured
    (kept,) = (root / "runs").iterdir()
    reach = Reach(kept, root)
    faults = {fault.line: fault for fault in sample(root, ["made_up"], 0)}
    code = {f"tests/test_code.py::test_{name}" for name in ("first", "scaled", "in_a_process")}
    quick, missed = "tests/test_quick.py::test_quick", "test_in_a_process_that_is_not_measured"
    tests = reach.tests_of(faults[7])
    assert set(tests[:3]) == code and tests[3] == quick and len(tests) == 6
    assert [len(reach.tests_of(faults[line])) for line in (1, 11, 15, 19)] == [6, 5, 5, 5]
    assert reach.tests_of(faults[11])[0] == "tests/test_code.py::test_biggest"
    assert f"tests/test_code.py::{missed}" in reach.tests_of(faults[19])


def test_how_json_is_laid_out_and_what_only_a_gpu_runs_have_no_faults(tmp_path):
    (tmp_path / "made_up").mkdir()
    (tmp_path / "made_up" / "code.py").write_text("""
def text(values, indent):
    return dumps(values, indent=2) + dumps(values, indent=indent)

def capture(self, graph):
    with torch.cuda.graph(graph, pool=self.pool):
        self.compute()
""")
    faults = [fault for seed in range(40) for fault in sample(tmp_path, ["made_up"], seed)]
    assert {fault.line for fault in faults} == {3}
    assert all("indent=2" in fault.source for fault in faults)
    assert not all("indent=indent" in fault.source for fault in faults)
