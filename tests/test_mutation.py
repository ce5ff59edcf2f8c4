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
SAID = """
def test_said():
    assert len("TIMES") == 5
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    root = tmp_path_factory.mktemp("project")
    for folder, files in [
        ("made_up", {"code.py": CODE, "times.py": TIMES}),
        (
            "tests",
            {
                "test_code.py": TESTS,
                "test_quick.py": QUICK,
                "test_said.py": SAID,
                "test_other.py": "def test_other(): pass",
                "helper.py": HELPER,
            },
        ),
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
    """Also through a fixture of the module or in another process; then what may not have been
    measured: the others of the file that names the module, and for what runs at the import all."""
    reaching = {row["line"]: row["reaching"] for row in measured[0]}
    assert reaching == {1: 8, 7: 6, 11: 5, 15: 5, 19: 5}


def test_tests_of_each_kind_come_in_turns(measured):
    """There is a limit of time, and tests of other modules may be many and quick, or slow."""
    _, root = measured
    (kept,) = (root / "runs").iterdir()
    reach = Reach(kept, root)
    fault = next(fault for fault in sample(root, ["made_up"], 0) if fault.line == 7)
    times = {"first": 1.0, "scaled": 1.1, "in_a_process": 3.0, "quick": 2.0, "biggest": 1.5}
    times |= {"in_a_process_that_is_not_measured": 2.5, "said": 4.5, "other": 3.0}
    for test, about in reach.tests.items():
        about["seconds"] = times[test.partition("::test_")[2]]
    found = [test.partition("::test_")[2] for test in reach.tests_of(fault)]
    # 1, 2.1 and 5.1 s of those that reach it and name its module, 2 of one that does not name it,
    # 1.5 and 4 of those that only name it.
    assert found == ["first", "biggest", "quick", "scaled",
                     "in_a_process_that_is_not_measured", "in_a_process"]  # fmt: skip
    # What runs at the import any test may see: one that says TIMES has a turn of its own.
    fault = next(fault for fault in sample(root, ["made_up"], 0) if fault.line == 1)
    found = [test.partition("::test_")[2] for test in reach.tests_of(fault)]
    assert found.index("said") < found.index("biggest")


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
