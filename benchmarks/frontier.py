"""python -m benchmarks.frontier

Writes what stands under README's first figure from benchmarks/results/frontier-tiny/report.json,
which `d2f compare --config frontier-tiny` makes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.decoder_table import between
from d2f.files import write_beside
from decode.comparison.comparison_report import ComparisonReport

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "benchmarks" / "results" / "frontier-tiny" / "report.json"
BEGIN = "<!-- frontier: written by python -m benchmarks.frontier -->\n"
STUDENT, LOSSLESS, PLAIN = "D2F", "WeDLM verified", "autoregressive"


def sentences(report: ComparisonReport) -> str:
    """What D2F and verified WeDLM have over the baseline, and over its model in this engine, for
    each task."""
    of = {(speed.workload, speed.entry): speed for speed in report.ranked}
    lines = []
    for task in report.workloads:
        own, base = (_right(report, entry, task) for entry in (STUDENT, report.baseline))
        here = [speed for speed in report.ranked if speed.workload == task]
        first = max(here, key=lambda speed: speed.throughput)
        speed, safe, plain = (of[task, entry] for entry in (STUDENT, LOSSLESS, PLAIN))
        lines.append(
            f"- `{task}`: D2F **{report.speedup(speed):.1f} times** {report.baseline} "
            f"({speed.throughput:,.0f} against {of[task, report.baseline].throughput:,.0f} visible "
            f"tokens a second) and {speed.throughput / plain.throughput:.1f} times the same model "
            f"in this toolkit's engine ({plain.throughput:,.0f}), right in {own} against {base}; "
            f"lossless, verified WeDLM {report.speedup(safe):.1f} times {report.baseline} "
            f"({safe.throughput:,.0f}), right in {_right(report, LOSSLESS, task)}. "
            f"The fastest here: {first.entry} ({first.throughput:,.0f}), right in "
            f"{_right(report, first.entry, task)}."
        )
    about = report.about
    lines += ["", f"{about['date']}, {about['device']}, torch {about['versions']['torch']}, fp32."]
    return "\n".join(lines) + "\n"


def _right(report: ComparisonReport, entry: str, task: str) -> str:
    found = report.accuracy(entry, task)
    assert found is not None
    return f"{found.right / found.problems:.1%}"


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.frontier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    page = ROOT / "README.md"
    write_beside(page, between(page, BEGIN, sentences(ComparisonReport.load(REPORT))))


if __name__ == "__main__":
    main()
