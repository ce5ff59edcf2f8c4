"""python -m benchmarks.frontier

Writes what stands under README's first figure from benchmarks/results/frontier-*/report.json, which
`d2f compare --config frontier-tiny` and `--config frontier-code` make.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.decoder_table import between, fastest_of_vllm, measured
from d2f.files import write_beside
from decode.compare.report import ComparisonReport

ROOT = Path(__file__).parent.parent
REPORTS = [
    ROOT / "benchmarks" / "results" / name / "report.json"
    for name in ("frontier-tiny", "frontier-code")
]
BEGIN = "<!-- frontier: written by python -m benchmarks.frontier -->\n"
STUDENT, SURER, LOSSLESS, PLAIN = "D2F", "D2F surer", "WeDLM verified", "autoregressive"


def sentences(report: ComparisonReport) -> str:
    """What D2F and verified WeDLM have over vLLM's fastest way, and over its model in this
    engine, for each task."""
    of = {(speed.workload, speed.entry): speed for speed in report.ranked}
    lines = []
    for task in report.workloads:
        here = [speed for speed in report.ranked if speed.workload == task]
        first = max(here, key=lambda speed: speed.throughput)
        speed, surer, safe, plain = (of[task, e] for e in (STUDENT, SURER, LOSSLESS, PLAIN))
        base = fastest_of_vllm(here, report.baseline)
        times = [s.throughput / base.throughput for s in (speed, surer, safe)]
        lines.append(
            f"- `{task}`: D2F **{times[0]:.1f} times** {base.entry} "
            f"({speed.throughput:,.0f} against {base.throughput:,.0f} visible "
            f"tokens a second) and {speed.throughput / plain.throughput:.1f} times the same model "
            f"in this toolkit's engine ({plain.throughput:,.0f}), right in "
            f"{_right(report, STUDENT, task)} against {_right(report, base.entry, task)}; "
            f"surer {times[1]:.1f} times, right in {_right(report, SURER, task)}; "
            f"lossless, verified WeDLM {times[2]:.1f} times "
            f"({safe.throughput:,.0f}), right in {_right(report, LOSSLESS, task)}. "
            f"The fastest here: {first.entry} ({first.throughput:,.0f}), right in "
            f"{_right(report, first.entry, task)}."
        )
    return "\n".join(lines) + "\n"


def text() -> str:
    """All of it, from the reports."""
    reports = [ComparisonReport.load(path) for path in REPORTS]
    return "".join(map(sentences, reports)) + measured(reports)


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
    write_beside(page, between(page, BEGIN, text()))


if __name__ == "__main__":
    main()
