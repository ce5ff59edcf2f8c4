"""python -m benchmarks.tables

Write the generated tables of README.md and docs/ anew: from the summaries in benchmarks/results,
the evaluations beside the bundled models, and what quantisations say of themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import parser
from benchmarks.gpu import markdown, read_runs
from benchmarks.make_models import results_table
from benchmarks.sizes import decoding_table, weights_table
from d2f.files import write_beside
from d2f.quantize import QUANTISATIONS
from decode.compare.report import Report
from decode.report import markdown_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BASELINE = "vLLM"


Speeds = dict[str, dict[str, Any]]


def load(name: str) -> Report:
    """Read a comparison of benchmarks/results."""
    return Report(**json.loads((RESULTS / name / "summary.json").read_text(encoding="utf-8")))


def speeds_at(report: Report, workload: str, concurrency: int) -> Speeds:
    """Return the speeds at one load, by entry."""
    level = workload, concurrency
    found = (row for row in report.speeds if (row["workload"], row["concurrency"]) == level)
    return {row["entry"]: row for row in found}


def right(report: Report, entry: str, workload: str) -> tuple[int, int] | None:
    """Return right answers and problems, None where nothing was judged."""
    for row in report.accuracies:
        if (row["entry"], row["workload"]) == (entry, workload):
            return row["right"], row["problems"]
    return None


def fastest_of_vllm(speeds: Speeds) -> dict[str, Any]:
    """Find the fastest of the ways to serve with vLLM (entries whose names begin like it)."""
    served = [row for entry, row in speeds.items() if entry.startswith(BASELINE)]
    return max(served, key=lambda row: row["throughput"])


# The README's table: its rows, and the names by which a comparison has them.
REAL = {
    "self-drafting, the model's own tokens": ("self-drafting",),
    "the same without an adapter": ("lookup",),
    "one token a forward, this toolkit": ("autoregressive",),
    "llama.cpp, BF16": ("llama.cpp BF16",),
    "llama.cpp, Q8_0 (other weights)": ("llama.cpp Q8_0",),
    "vLLM, one process": ("vLLM one process",),
    "transformers": ("transformers",),
}
SMALL = {
    "D2F": ("D2F",),
    "one token a forward, this toolkit": ("autoregressive",),
    "vLLM, its fastest way": ("vLLM", "vLLM streamed", "vLLM one process"),
}


def speeds() -> str:
    """Make the README's table: a real language model first, then the bundled ones. The fastest at
    each load is bold, whoever it is."""
    levels = (1, 4, 16)
    head = ("model and task", "decoded by", *(f"{n} at once" for n in levels), "right")
    rows = []
    for name, model, entries in (
        ("real-smollm2", "SmolLM2-135M, bf16", REAL),
        ("compare-tiny", "4M parameters, fp32", SMALL),
    ):
        report = load(name)
        for task in report.workloads:
            found = {
                shown: [
                    max(s[entry]["throughput"] for entry in names if entry in s)
                    for s in (speeds_at(report, task, n) for n in levels)
                ]
                for shown, names in entries.items()
            }
            best = [max(column) for column in zip(*found.values(), strict=True)]
            for shown, values in found.items():
                pairs = zip(values, best, strict=True)
                cells = [f"**{v:,.0f}**" if v == top else f"{v:,.0f}" for v, top in pairs]
                count = right(report, entries[shown][0], task)
                judged = name != "real-smollm2" and count is not None
                cells.append(f"{count[0] / count[1]:.1%}" if judged and count else "")
                rows.append((f"{model}: {task.removesuffix('-zero-shot')}", shown, *cells))
    return "\n".join(markdown_table(head, rows))


def frontier() -> str:
    """Say what D2F and verified WeDLM gain over vLLM's fastest way, a sentence a task."""
    found = [load("frontier-tiny"), load("frontier-code")]
    lines = [_gain(report, task) for report in found for task in report.workloads]
    for report in found:
        about, tasks = report.about, " and ".join(report.workloads)
        on = f"{about['date']}, {about['device']}, torch {about['versions']['torch']}"
        lines += [""] * (report is found[0]) + [f"{tasks}: {on}, fp32."]
    return "\n".join(lines)


def _gain(report: Report, task: str) -> str:
    speeds = speeds_at(report, task, 1)
    base, plain = fastest_of_vllm(speeds), speeds["autoregressive"]
    fastest = max(speeds.values(), key=lambda row: row["throughput"])

    def share(entry: str) -> str:
        count = right(report, entry, task)
        assert count is not None
        return f"{count[0] / count[1]:.1%}"

    def times(entry: str) -> float:
        return speeds[entry]["throughput"] / base["throughput"]

    return (
        f"- `{task}`: D2F **{times('D2F'):.1f} times** {base['entry']} "
        f"({speeds['D2F']['throughput']:,.0f} against {base['throughput']:,.0f} visible tokens a "
        f"second) and {speeds['D2F']['throughput'] / plain['throughput']:.1f} times the same model "
        f"in this toolkit's engine ({plain['throughput']:,.0f}), right in {share('D2F')} against "
        f"{share(base['entry'])}; surer {times('D2F surer'):.1f} times, right in "
        f"{share('D2F surer')}; lossless, verified WeDLM {times('WeDLM verified'):.1f} times "
        f"({speeds['WeDLM verified']['throughput']:,.0f}), right in {share('WeDLM verified')}. "
        f"The fastest here: {fastest['entry']} ({fastest['throughput']:,.0f}), right in "
        f"{share(fastest['entry'])}."
    )


def comparison() -> str:
    """Every entry's speed at each load, beside the fastest of vLLM's ways there."""
    report = load("compare-tiny")
    levels = sorted({row["concurrency"] for row in report.speeds})
    rows = []
    for workload in report.workloads:
        for entry in dict.fromkeys(row["entry"] for row in report.speeds):
            cells = []
            for level in levels:
                speeds = speeds_at(report, workload, level)
                if entry not in speeds:
                    cells.append("-")
                    continue
                speed, base = speeds[entry]["throughput"], fastest_of_vllm(speeds)["throughput"]
                ratio = "" if entry.startswith(BASELINE) else f" ({speed / base:.2f}x)"
                cells.append(f"{speed:,.0f}{ratio}")
            forward = (
                speeds_at(report, workload, levels[0]).get(entry, {}).get("tokens_per_forward")
            )
            count = right(report, entry, workload)
            cells.append("-" if forward is None else f"{forward:.2f}")
            cells.append("-" if count is None else f"{count[0]} of {count[1]}")
            rows.append((workload, entry, *cells))
    head = ["task", "entry", *(f"{level} in flight" for level in levels)]
    about = report.about
    versions = {k: v for k, v in about["versions"].items() if k in ("torch", "transformers")}
    versions["vLLM"] = about["entries"][BASELINE].get("vllm")
    said = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return "\n".join(
        [
            *markdown_table((*head, "tokens a forward", "right"), rows),
            "",
            "Visible tokens a second of all requests together, the median repetition, and in "
            f"brackets the ratio to the fastest of vLLM's ways at that load. {about['date']}, "
            f"{about['device']}, {said}, fp32.",
        ]
    )


def quantisations() -> str:
    """Make a row for each value of --quantize."""
    head = ("`--quantize`", "weights", "activations", "by", "CPU", "CUDA GPU")
    rows = []
    for name, q in QUANTISATIONS.items():
        cpu = "yes; slow without AVX512-VNNI or AMX" if name == "int8" else "yes"
        cpu = f"no: {q.no_cpu}" if q.no_cpu else cpu
        cuda = "yes"
        if q.capability is not None:
            major, minor = q.capability
            cuda = f"compute capability {major}.{minor}" + ", bfloat16" * q.bf16
        rows.append((f"`{name}`", q.weights, q.activations, q.library, cpu, cuda))
    return "\n".join(markdown_table(head, rows))


def measured_on_gpus() -> str:
    """Show the runs in benchmarks/results/gpu."""
    paths = sorted((RESULTS / "gpu").glob("*.json"))
    return markdown([run for path in paths for run in read_runs(path)])


BLOCKS: dict[str, tuple[str, Callable[[], str]]] = {
    "speeds": ("README.md", speeds),
    "frontier": ("docs/evaluation.md", frontier),
    "comparison": ("docs/evaluation.md", comparison),
    "results": ("docs/models.md", results_table),
    "quantisations": ("docs/performance.md", quantisations),
    "weights and cache": ("docs/performance.md", weights_table),
    "decoding": ("docs/performance.md", decoding_table),
    "measured": ("docs/performance.md", measured_on_gpus),
}
"""The page of each block and what makes it. A block stands between two comments of its name."""


def with_block(text: str, name: str, block: str) -> str:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->`` in a page."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"expected {begin} and {end} in the page")
    return re.sub(f"{begin}\n.*?{end}", lambda _: f"{begin}\n{block}\n{end}", text, flags=re.DOTALL)


def main() -> None:
    """Rewrite every block."""
    parser(__doc__).parse_args()
    for name, (place, make) in BLOCKS.items():
        page = ROOT / place
        write_beside(page, with_block(page.read_text(encoding="utf-8"), name, make()))


if __name__ == "__main__":
    main()
