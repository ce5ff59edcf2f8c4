"""python -m benchmarks.readme

Writes the README's table of the comparison anew from benchmarks/results/compare-tiny/report.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.decoder_table import fastest_of_vllm
from d2f.files import write_beside
from decode.compare.report import ComparisonReport

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "compare-tiny"
MARKS = ("<!-- comparison -->", "<!-- /comparison -->")


def table(report: ComparisonReport) -> str:
    """A line for each task and entry: its speed at each concurrency, with the ratio to the
    fastest of vLLM's ways there, and its right answers."""
    levels = sorted({row.concurrency for row in report.speeds})
    head = ["task", "entry", *(f"{level} in flight" for level in levels)]
    head += ["tokens a forward", "right"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for workload in report.workloads:
        for entry in dict.fromkeys(row.entry for row in report.speeds):
            rows = [r for r in report.speeds if (r.workload, r.entry) == (workload, entry)]
            cells = []
            for row in rows:
                load = (workload, row.concurrency)
                beside = [r for r in report.speeds if (r.workload, r.concurrency) == load]
                base = fastest_of_vllm(beside, report.baseline)
                ratio = f" ({row.throughput / base.throughput:.2f}x)"
                served = entry.startswith(report.baseline)
                cells.append(f"{row.throughput:,.0f}{'' if served else ratio}")
            found, forward = report.accuracy(entry, workload), rows[0].tokens_per_forward
            cells.append("-" if forward is None else f"{forward:.2f}")
            cells.append("-" if found is None else f"{found.right} of {found.problems}")
            lines.append(f"| {workload} | {entry} | {' | '.join(cells)} |")
    about = report.about
    versions = {k: v for k, v in about["versions"].items() if k in ("torch", "transformers")}
    versions["vLLM"] = about["entries"][report.baseline].get("vllm")
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lines += [
        "",
        "Visible tokens a second of all requests together, the median repetition, and in brackets "
        f"the ratio to the fastest of vLLM's ways at that load. {about['date']}, "
        f"{about['device']}, {said}, fp32.",
    ]
    return "\n".join(lines)


def with_table(readme: str, report: ComparisonReport) -> str:
    """The README with what lies between its two marks made anew."""
    before, _, rest = readme.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{table(report)}\n{MARKS[1]}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the README, as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)
    readme = ROOT / "README.md"
    report = ComparisonReport.load(RESULT / "report.json")
    write_beside(readme, with_table(readme.read_text(encoding="utf-8"), report))


if __name__ == "__main__":
    main()
