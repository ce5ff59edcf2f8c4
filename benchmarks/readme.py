"""python -m benchmarks.readme

Writes the README's table of the comparison anew from benchmarks/results/compare-tiny/report.json.
"""

from __future__ import annotations

from pathlib import Path

from decode.cli.output import write_beside
from decode.comparison.report import Report

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "compare-tiny"
MARKS = ("<!-- comparison -->", "<!-- /comparison -->")


def table(report: Report) -> str:
    """The report's rows that a reader of the README needs, and what they were measured on."""
    lines = [
        f"| task | in flight | entry | tokens/s | x {report.baseline} | whole answer, ms | "
        "tokens a forward | right |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report.rows:
        ratio, found = report.speedup(row), report.accuracy(row.entry, row.workload)
        right = "" if found is None else f"{found.right} of {found.problems}"
        finished = "-" if row.finished is None else f"{1e3 * row.finished:,.0f}"
        forward = "-" if row.tokens_per_forward is None else f"{row.tokens_per_forward:.2f}"
        times = "-" if ratio is None else f"{ratio:.2f}"
        lines.append(
            f"| {row.workload} | {row.concurrency} | {row.entry} | {row.throughput:,.0f} "
            f"| {times} | {finished} | {forward} | {right} |"
        )
    lines.append("")
    for workload in report.workloads:
        lines += [f"{workload}:", "", *report.verdict(workload), ""]
    about = report.about
    versions = {k: v for k, v in about["versions"].items() if k in ("torch", "transformers")}
    versions["vLLM"] = about["entries"][report.baseline].get("vllm")
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lines.append(f"Measured {about['date']} on {about['device']}, {said}, fp32.")
    return "\n".join(lines)


def with_table(readme: str, report: Report) -> str:
    """The README with what lies between its two marks made anew."""
    before, _, rest = readme.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{table(report)}\n{MARKS[1]}{after}"


def main() -> None:
    readme = ROOT / "README.md"
    report = Report.load(RESULT / "report.json")
    write_beside(readme, with_table(readme.read_text(encoding="utf-8"), report))


if __name__ == "__main__":
    main()
