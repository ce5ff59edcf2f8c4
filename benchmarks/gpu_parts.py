"""python -m benchmarks.gpu_parts kernels|marked|compare [--jobs N] [--output FOLDER]

Do a part of `benchmarks.gpu` that measures nothing by itself:

    kernels    run tests/kernels: every kernel against its reference
    marked     run the tests marked `gpu`, wherever they are; only files with one are imported
    compare    `decode.compare` of the bundled models with its local entries on the GPU, beside vLLM
               where the Python of an environment with vLLM for this GPU is given

Of tests is counted what passed, failed and was skipped in each file. A comparison that was cut off
goes on from what is in FOLDER; on a CPU one entry decodes one problem.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import parser
from d2f.config import read_mapping
from d2f.files import write_beside
from d2f.shipped import COMPARISON, find_config

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]
CONFIG = "compare-tiny"
LEAST = {"tasks": "[story]", "problems": "1", "accuracy_problems": "1", "concurrency": "[1]",
         "repetitions": "1", "warmup": "1"}  # fmt: skip


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
        counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.files.setdefault(name.split("::")[0], counts)[outcome] += 1
        self.failed += [name] * (outcome == "failed")
        if self.path is not None:
            rows = [{"file": file, **counts} for file, counts in self.files.items()]
            failed = [{"failed": one} for one in self.failed]
            write_beside(self.path, json.dumps({"measured": rows, "failed": failed}) + "\n")


def run_tests(marked: bool, jobs: int, path: Path | None) -> int:
    """Run tests on the GPU; return pytest's exit status."""
    import pytest

    chosen = ["tests/kernels"]
    if marked:
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        chosen = ["-m", "gpu", *(str(f) for f in files if "mark.gpu" in f.read_text("utf-8"))]
    chosen += ["-n", str(jobs)] if jobs > 1 and importlib.util.find_spec("xdist") else []
    given = ["--rootdir", str(ROOT), "-p", "no:cacheprovider", "-o", "minversion=1", "-rf",
             "--tb=short", "--show-capture=no"]  # fmt: skip
    return int(pytest.main([*given, *chosen], plugins=[Counts(path)]))


def comparison(output: Path, device: str, vllm_python: str | None) -> list[str]:
    """The command line of decode.compare."""
    values = read_mapping(find_config(CONFIG, *COMPARISON))
    entries = [e for e in values["entries"] if e["kind"] != "vllm" or vllm_python]
    if device == "cpu":
        entries = [{**e, "compile": False} for e in entries if e["name"] == "autoregressive"]
    for entry in entries:
        if entry["kind"] == "vllm":
            entry.pop("env", None)  # it is for CPUs
        else:
            entry["device"] = device
    names = [entry["name"] for entry in entries]
    given = {
        "output": str(output),
        "entries": json.dumps(entries),
        "baseline": values["baseline"] if values["baseline"] in names else "autoregressive",
        "figures": "false",
        **(LEAST if device == "cpu" else {}),
        **({"vllm-python": vllm_python} if vllm_python else {}),
    }
    return ["--config", CONFIG, *(part for k, v in given.items() for part in (f"--{k}", v))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the part; its exit status."""
    given = parser(__doc__)
    given.add_argument("part", choices=("kernels", "marked", "compare"))
    given.add_argument("--jobs", type=int, default=1, help="processes, where pytest-xdist is")
    given.add_argument("--output", type=Path, help="folder of the comparison's report")
    given.add_argument("--vllm-python", help="Python of an environment with vLLM for this GPU")
    given.add_argument("--json", type=Path, help="file for the counts, or the report's text")
    options = given.parse_args(arguments)
    if options.part != "compare":
        return run_tests(options.part == "marked", options.jobs, options.json)
    import torch

    from decode.compare.__main__ import main as compare

    device = "cuda" if torch.cuda.is_available() else "cpu"
    status = compare(comparison(options.output, device, options.vllm_python))
    report = options.output / "report.md"
    if options.json is not None and report.exists():
        text = report.read_text(encoding="utf-8")
        write_beside(options.json, json.dumps({"report": text}) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
