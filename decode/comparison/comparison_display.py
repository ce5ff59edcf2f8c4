"""What the terminal shows of a comparison: a line a run, and the tables at the end."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from decode.comparison.comparison_report import ComparisonReport, number
from decode.comparison.measure import Planned
from decode.comparison.records import Record
from decode.comparison.runs_ledger import RunsLedger
from decode.reporting.shown_progress import ShownProgress

PLAIN_WIDTH = 140  # columns where standard output is no terminal


def say_resumed(display: ShownProgress, ledger: RunsLedger) -> None:
    """What is there already is not measured again."""
    last = ledger.resumed[-1]
    note = f"; {last['dropped']} of a repetition that was cut short come again"
    more = note if last["dropped"] else ""
    display.say(f"{last['kept']} runs are already in {ledger.path}{more}")


def show_run(display: ShownProgress, planned: Planned, record: Record | None) -> None:
    """Before a run (record None) and after it; a warm-up has no after."""
    where = f"{planned.workload.name}, concurrency {planned.concurrency}, "
    name = planned.contestant.entry.name
    if record is None:
        if planned.repetition is not None:
            what = f"repetition {planned.repetition + 1}"
        else:
            what = "warm-up" if planned.warmup else "accuracy"
        display.advance(1, f"{where}{what}: {name}")
        return
    failed = [answer for answer in record.answers if answer.error is not None]
    note = f", {len(failed)} of {len(record.answers)} failed" if failed else ""
    if planned.repetition is None:
        right = sum(bool(answer.right) for answer in record.answers)
        display.say(f"{where}{name}: {right} of {len(record.answers)} right{note}")
    else:
        display.say(f"{where}{name}: {record.tokens / record.seconds:,.0f} tokens/s{note}")
    for answer in failed[:1]:
        display.say(f"  e.g. request {answer.item}: {answer.error}")


def show_report(console: Console, report: ComparisonReport, folder: Path) -> None:
    """The tables, who won, and where the rest is."""
    for workload in report.workloads:
        table = Table(title=workload, title_justify="left")
        for name in ("concurrency", "entry"):
            table.add_column(name)
        for name in ("tokens/s", f"x {report.baseline}", "first, ms", "answer, ms",
                     "tokens/forward", "right", "MiB", "failed"):  # fmt: skip
            table.add_column(name, justify="right")
        for speed in report.speeds:
            if speed.workload != workload:
                continue
            ratio, found = report.speedup(speed), report.accuracy(speed.entry, workload)
            table.add_row(
                str(speed.concurrency),
                speed.entry,
                f"{speed.throughput:,.0f}",
                number(ratio, 2),
                number(speed.first and 1e3 * speed.first, 1),
                number(speed.finished and 1e3 * speed.finished, 1),
                number(speed.tokens_per_forward, 2),
                "-" if found is None else f"{found.right / found.problems:.1%}",
                number(speed.peak_bytes and speed.peak_bytes / 2**20),
                str(speed.failed),
            )
        console.print(table)
        for line in report.verdict(workload):
            console.print(line.replace("**", ""))
    console.print(f"report.md, report.json and figures: {folder}")
