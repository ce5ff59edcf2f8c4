"""python -m benchmarks.adaptive

Writes the tables of README.md and docs/decoders.md on lossless decoding whose width the engine
chooses, from the reports in benchmarks/results/adaptive: folders that begin with the number of
cores, made by

    d2f compare --config adaptive-tiny --output benchmarks/results/adaptive/4-cores
    d2f compare --config adaptive-code --output benchmarks/results/adaptive/4-cores-code
    taskset -c 0,1 d2f compare --config adaptive-tiny --output benchmarks/results/adaptive/2-cores

(of two cores, coding goes to 2-cores-code in the same way), from width-choice-2-cores.json there
and its like, made by benchmarks.width_choice, and from made-up-costs.json, made by
benchmarks.made_up_costs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

from benchmarks.decoder_table import between, fastest_of_vllm, measured
from benchmarks.width_choice import best_window, compared
from d2f.files import write_beside
from decode.compare.report import ComparisonReport, Speed

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "adaptive"
ADAPTIVE = "WeDLM verified"
BEGIN = "<!-- adaptive: written by python -m benchmarks.adaptive -->\n"
STANDINGS = "<!-- standings: written by python -m benchmarks.adaptive -->\n"
CHOICES = "<!-- choices: written by python -m benchmarks.adaptive -->\n"
MADE_UP = "<!-- made up: written by python -m benchmarks.adaptive -->\n"
NEAR = 0.97


def reports() -> dict[str, list[ComparisonReport]]:
    """What was measured, by the number of cores, most cores first."""
    found: dict[str, list[ComparisonReport]] = {}
    for path in sorted(RESULTS.glob("*/report.json"), key=lambda path: path.parent.name):
        cores = path.parent.name.partition("-")[0]
        found.setdefault(cores, []).append(ComparisonReport.load(path))
    return dict(sorted(found.items(), key=lambda item: -int(item[0])))


def at(report: ComparisonReport, task: str, level: int) -> tuple[Speed, Speed, Speed]:
    """The adaptive entry, the fastest of the others, and of vLLM's ways the fastest, of a task with
    so many requests in flight."""
    here = [r for r in report.ranked if (r.workload, r.concurrency) == (task, level)]
    of = {speed.entry: speed for speed in here}
    others = [speed for speed in here if speed.entry != ADAPTIVE]
    fastest = max(others, key=lambda r: r.throughput)
    return of[ADAPTIVE], fastest, fastest_of_vllm(others, report.baseline)


def levels(report: ComparisonReport) -> list[int]:
    """The requests in flight that were measured."""
    return sorted({speed.concurrency for speed in report.speeds})


def speeds(reports: list[ComparisonReport]) -> str:
    """For each task visible tokens a second of the adaptive entry, of the fastest other and of
    vLLM's fastest way."""
    head = ["task", "entry", *(f"{level} in flight" for level in levels(reports[0]))]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for report in reports:
        for task in report.workloads:
            found = [at(report, task, level) for level in levels(report)]
            best = [f"{best.throughput:,.0f} ({best.entry})" for _, best, _ in found]
            base = [f"{vllm.throughput:,.0f}" for _, _, vllm in found]
            rows = {
                "verified, the engine chooses": [f"{own.throughput:,.0f}" for own, _, _ in found],
                "the fastest other": best,
                f"{report.baseline}, its fastest way": base,
            }
            lines += [f"| {task} | {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n" + measured(reports)


def ratios(found: dict[str, list[ComparisonReport]]) -> str:
    """The adaptive entry over the fastest other, and over vLLM's fastest way, for each report and
    task."""
    every = next(iter(found.values()))[0]
    head = ["cores", "task", "over", *(f"{level} in flight" for level in levels(every))]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for cores, report in ((cores, report) for cores, own in found.items() for report in own):
        fastest_way = f"{report.baseline}, its fastest way"
        for task in report.workloads:
            here = [at(report, task, level) for level in levels(report)]
            best = [f"{a.throughput / b.throughput:.2f} ({b.entry})" for a, b, _ in here]
            base = [f"{a.throughput / c.throughput:.2f}" for a, _, c in here]
            for over, cells in (("the fastest other", best), (fastest_way, base)):
                lines.append(f"| {cores} | {task} | {over} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def standings(found: dict[str, list[ComparisonReport]]) -> str:
    """Of each entry its speed over the fastest entry's at each task and load: the geometric mean,
    the worst, and at how many it is within 3 %."""
    head = ["cores", "entry", "mean", "worst", "within 3 %"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for cores, reports in found.items():
        ranked = [speed for report in reports for speed in report.ranked]
        fastest: dict[tuple[str, int], float] = {}
        for speed in ranked:
            point = (speed.workload, speed.concurrency)
            fastest[point] = max(fastest.get(point, 0.0), speed.throughput)
        shares: dict[str, list[float]] = {}
        for speed in ranked:
            share = speed.throughput / fastest[speed.workload, speed.concurrency]
            shares.setdefault(speed.entry, []).append(share)
        for entry, own in sorted(shares.items(), key=lambda item: -geometric_mean(item[1])):
            label = "the engine chooses" if entry == ADAPTIVE else entry
            near = sum(share >= NEAR for share in own)
            cells = (f"{geometric_mean(own):.2f}", f"{min(own):.2f}", f"{near} of {len(own)}")
            lines.append(f"| {cores} | {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def choices(files: list[dict[str, Any]]) -> str:
    """The engine's choice over the best fixed window (which), in the same process and round, with
    the interval of the median, by cores and task."""
    levels = sorted({row["in_flight"] for file in files for row in file["measured"]})
    head = ["cores", "task", *(f"{level} in flight" for level in levels)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for file in files:
        found = {(row["task"], row["in_flight"]): row["speeds"] for row in file["measured"]}
        for task in dict.fromkeys(task for task, _ in found):
            cells = []
            for level in levels:
                if (task, level) not in found:
                    cells.append("-")
                    continue
                window = best_window(found[task, level])
                share, low, high = compared(found[task, level], window)
                cells.append(f"{share:.2f} ({window}) {low:.2f} to {high:.2f}")
            lines.append(f"| {file['cores']} | {task} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def made_up(rows: list[dict[str, Any]]) -> str:
    """The engine's choice over the best fixed window, after the first round, by made-up machine."""
    speeds = {(r["machine"], r["task"], r["in_flight"]): r for r in rows}
    levels = sorted({level for _, _, level in speeds})
    head = ["machine", "task", *(f"{level} in flight" for level in levels)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for machine, task in dict.fromkeys((machine, task) for machine, task, _ in sorted(speeds)):
        cells = []
        for level in levels:
            row = speeds[machine, task, level]
            window, best = max(row["fixed"].items(), key=lambda item: item[1])
            cells.append(f"{mean(row['chosen'][1:]) / best:.2f} ({window})")
        lines.append(f"| {machine} | {task} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def blocks() -> list[tuple[Path, str, str]]:
    """Each page, the line that the block in it follows, and the block."""
    found = reports()
    simulated = json.loads((RESULTS / "made-up-costs.json").read_text(encoding="utf-8"))
    files = RESULTS.glob("width-choice-*.json")
    chosen = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    chosen.sort(key=lambda file: -file["cores"])
    readme, page = ROOT / "README.md", ROOT / "docs" / "decoders.md"
    latest = max(found.values(), key=lambda own: own[0].about["date"])
    return [
        (readme, BEGIN, speeds(latest)),
        (page, BEGIN, ratios(found)),
        (page, STANDINGS, standings(found)),
        (page, CHOICES, choices(chosen)),
        (page, MADE_UP, made_up(simulated["measured"])),
    ]


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.adaptive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    for page, begin, block in blocks():
        write_beside(page, between(page, begin, block))


if __name__ == "__main__":
    main()
