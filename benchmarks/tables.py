"""python -m benchmarks.tables

Write the generated tables of README.md and docs/ anew: from the summaries in benchmarks/results,
the evaluations beside the bundled models, and what quantisations say of themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import parser
from benchmarks.gpu import markdown, read_runs
from benchmarks.make_models import results_table
from benchmarks.sizes import decoding_table, weights_table
from d2f.files import write_beside
from d2f.quantize import QUANTISATIONS
from decode.report import markdown_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BASELINE = "vLLM"


@dataclass(frozen=True)
class Summary:
    """A comparison as it is kept in the repository: what was measured, on what.

    speeds: a row for each workload, concurrency and entry; throughput counts visible tokens a
    second of all requests together, the median repetition. accuracies: a row for each workload and
    entry. failures: entries with failed requests. It is the summary.json of `d2f compare`.
    """

    about: dict[str, Any]
    speeds: list[dict[str, Any]]
    accuracies: list[dict[str, Any]]
    failures: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, name: str) -> Summary:
        """Read benchmarks/results/`name`/summary.json."""
        return cls(**json.loads((RESULTS / name / "summary.json").read_text(encoding="utf-8")))

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(row["workload"] for row in self.speeds))

    def at(self, workload: str, concurrency: int) -> dict[str, dict[str, Any]]:
        """Return the speeds at one load, by entry."""
        return {
            row["entry"]: row
            for row in self.speeds
            if (row["workload"], row["concurrency"]) == (workload, concurrency)
        }

    def right(self, entry: str, workload: str) -> tuple[int, int] | None:
        """Right answers and problems, None where nothing was judged."""
        for row in self.accuracies:
            if (row["entry"], row["workload"]) == (entry, workload):
                return row["right"], row["problems"]
        return None

    def measured(self) -> str:
        """When and on what this was measured."""
        tasks = " and ".join(self.workloads)
        about = self.about
        return (
            f"{tasks}: {about['date']}, {about['device']}, torch {about['versions']['torch']}, "
            "fp32."
        )


def fastest_of_vllm(speeds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Find the fastest of the ways to serve with vLLM (entries whose names begin like it)."""
    served = [row for entry, row in speeds.items() if entry.startswith(BASELINE)]
    return max(served, key=lambda row: row["throughput"])


def frontier() -> str:
    """Say what D2F and verified WeDLM gain over vLLM's fastest way, a sentence a task."""
    found = [Summary.load("frontier-tiny"), Summary.load("frontier-code")]
    lines = [_gain(summary, task) for summary in found for task in summary.workloads]
    return "\n".join([*lines, "", *(summary.measured() for summary in found)])


def _gain(summary: Summary, task: str) -> str:
    speeds = summary.at(task, 1)
    base, plain = fastest_of_vllm(speeds), speeds["autoregressive"]
    fastest = max(speeds.values(), key=lambda row: row["throughput"])

    def right(entry: str) -> str:
        count = summary.right(entry, task)
        assert count is not None
        return f"{count[0] / count[1]:.1%}"

    def times(entry: str) -> float:
        return speeds[entry]["throughput"] / base["throughput"]

    return (
        f"- `{task}`: D2F **{times('D2F'):.1f} times** {base['entry']} "
        f"({speeds['D2F']['throughput']:,.0f} against {base['throughput']:,.0f} visible tokens a "
        f"second) and {speeds['D2F']['throughput'] / plain['throughput']:.1f} times the same model "
        f"in this toolkit's engine ({plain['throughput']:,.0f}), right in {right('D2F')} against "
        f"{right(base['entry'])}; surer {times('D2F surer'):.1f} times, right in "
        f"{right('D2F surer')}; lossless, verified WeDLM {times('WeDLM verified'):.1f} times "
        f"({speeds['WeDLM verified']['throughput']:,.0f}), right in {right('WeDLM verified')}. "
        f"The fastest here: {fastest['entry']} ({fastest['throughput']:,.0f}), right in "
        f"{right(fastest['entry'])}."
    )


def comparison() -> str:
    """Every entry's speed at each load, beside the fastest of vLLM's ways there."""
    summary = Summary.load("compare-tiny")
    levels = sorted({row["concurrency"] for row in summary.speeds})
    rows = []
    for workload in summary.workloads:
        for entry in dict.fromkeys(row["entry"] for row in summary.speeds):
            cells = []
            for level in levels:
                speeds = summary.at(workload, level)
                if entry not in speeds:
                    cells.append("-")
                    continue
                speed, base = speeds[entry]["throughput"], fastest_of_vllm(speeds)["throughput"]
                ratio = "" if entry.startswith(BASELINE) else f" ({speed / base:.2f}x)"
                cells.append(f"{speed:,.0f}{ratio}")
            forward = summary.at(workload, levels[0]).get(entry, {}).get("tokens_per_forward")
            count = summary.right(entry, workload)
            cells.append("-" if forward is None else f"{forward:.2f}")
            cells.append("-" if count is None else f"{count[0]} of {count[1]}")
            rows.append((workload, entry, *cells))
    head = ["task", "entry", *(f"{level} in flight" for level in levels)]
    about = summary.about
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
    "frontier": ("README.md", frontier),
    "comparison": ("README.md", comparison),
    "results": ("README.md", results_table),
    "quantisations": ("docs/low-precision.md", quantisations),
    "weights and cache": ("docs/gpu.md", weights_table),
    "decoding": ("docs/gpu.md", decoding_table),
    "measured": ("docs/gpu.md", measured_on_gpus),
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
