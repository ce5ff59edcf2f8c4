"""python -m benchmarks.gpu.native_tests kernels

Runs tests of this checkout on the GPU and counts what passed, failed and was skipped in each file:

    kernels    tests/kernels: every kernel against its reference
    marked     the tests marked `gpu`, wherever they are; only files with such a test are imported
    slots      those of tests/kernels that split keys or write slots: few, for compute-sanitizer
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.files import write_beside

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
OUTCOMES = ("passed", "failed", "skipped")
BETWEEN = 1.0  # seconds from one writing of the counts to the next


def files_marked() -> list[str]:
    """Test files in which something is marked `gpu`."""
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(
        str(path.relative_to(ROOT)) for path in found if "mark.gpu" in path.read_text("utf-8")
    )


def chosen(which: str) -> list[str]:
    """What pytest is told to run."""
    if which == "marked":
        return ["-m", "gpu", *files_marked()]
    if which == "slots":
        return ["-k", "split or slots", "tests/kernels"]
    return ["tests/kernels"]


class Counts:
    """A plugin of pytest that counts outcomes by file, and writes them while the tests run."""

    def __init__(self, path: Path | None):
        self.path, self.written = path, 0.0
        self.files: dict[str, dict[str, int]] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's setup, call or teardown is over."""
        if report.when != "call" and report.passed:
            return
        counts = self.files.setdefault(report.nodeid.split("::")[0], dict.fromkeys(OUTCOMES, 0))
        counts[report.outcome] += 1
        if report.failed:
            self.failed.append(report.nodeid)
        if time.monotonic() > self.written + BETWEEN:
            self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file was imported, or could not be."""
        if report.failed:
            self.files.setdefault(report.nodeid, dict.fromkeys(OUTCOMES, 0))["failed"] += 1
            self.failed.append(report.nodeid)

    def write(self) -> None:
        """What was counted until now."""
        self.written = time.monotonic()
        if self.path is not None:
            rows = [{"file": name, **counts} for name, counts in self.files.items()]
            failed = [{"failed": name} for name in self.failed]
            found: dict[str, Any] = {"measured": rows, "failed": failed}
            write_beside(self.path, json.dumps(found) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and count; pytest's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.native_tests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("which", choices=("kernels", "marked", "slots"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, where pytest-xdist is")
    parser.add_argument("--json", type=Path, help="file for the counts")
    options = parser.parse_args(arguments)
    if options.which == "marked" and not files_marked():
        print("error: expected tests marked gpu below tests/, found none", file=sys.stderr)
        return 2
    if options.which == "slots":
        # Each tensor its own allocation: what is touched beyond one is then noticed.
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    import pytest

    given = [*chosen(options.which), "-p", "no:cacheprovider", "-o", "minversion=1", "-rf"]
    if options.jobs > 1 and importlib.util.find_spec("xdist"):
        given += ["-n", str(options.jobs)]
    counts = Counts(options.json)
    status = pytest.main(["--rootdir", str(ROOT), *given], plugins=[counts])
    counts.write()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
