"""python -m benchmarks.gpu.native_tests kernels|marked

Run tests of this checkout on the GPU and count what passed, failed and was skipped in each file:

    kernels    tests/kernels: every kernel against its reference
    marked     the tests marked `gpu`, wherever they are; only files with such a test are imported
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from d2f.files import write_beside

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]


def files_marked() -> list[str]:
    """Test files in which something is marked `gpu`."""
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(
        str(path.relative_to(ROOT)) for path in found if "mark.gpu" in path.read_text("utf-8")
    )


class Counts:
    """A plugin of pytest that counts outcomes by file and writes them after each."""

    def __init__(self, path: Path | None):
        self.path = path
        self.files: dict[str, dict[str, int]] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test's setup, call or teardown."""
        if report.when == "call" or not report.passed:
            self._count(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that could not be imported."""
        if report.failed:
            self._count(report.nodeid, "failed")

    def _count(self, name: str, outcome: str) -> None:
        file = name.split("::")[0]
        counts = self.files.setdefault(file, {"passed": 0, "failed": 0, "skipped": 0})
        counts[outcome] += 1
        if outcome == "failed":
            self.failed.append(name)
        if self.path is not None:
            rows = [{"file": name, **counts} for name, counts in self.files.items()]
            failed = [{"failed": name} for name in self.failed]
            write_beside(self.path, json.dumps({"measured": rows, "failed": failed}) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and count; return pytest's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.native_tests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("which", choices=("kernels", "marked"))
    parser.add_argument("--jobs", type=int, default=1, help="processes, where pytest-xdist is")
    parser.add_argument("--json", type=Path, help="file for the counts")
    options = parser.parse_args(arguments)
    import pytest

    chosen = ["-m", "gpu", *files_marked()] if options.which == "marked" else ["tests/kernels"]
    given = [*chosen, "-p", "no:cacheprovider", "-o", "minversion=1", "-rf"]
    if options.jobs > 1 and importlib.util.find_spec("xdist"):
        given += ["-n", str(options.jobs)]
    return int(pytest.main(["--rootdir", str(ROOT), *given], plugins=[Counts(options.json)]))


if __name__ == "__main__":
    sys.exit(main())
