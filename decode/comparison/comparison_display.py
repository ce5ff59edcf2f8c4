"""What the terminal shows: progress while it runs, plain lines elsewhere, the table at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from decode.comparison.comparison_config import AnyEntry
from decode.comparison.comparison_report import ComparisonReport
from decode.comparison.measure import Planned
from decode.comparison.records import Record
from decode.comparison.runs_ledger import RunsLedger

PLAIN_WIDTH = 140  # columns where standard output is no terminal


class Display:
    """Shows a comparison on standard output."""

    def __init__(self) -> None:
        live = sys.stdout.isatty()
        width = None if live else PLAIN_WIDTH
        self.console = Console(
            force_terminal=live, highlight=False, width=width, markup=False, emoji=False
        )
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def starting(self, entry: AnyEntry) -> None:
        self._say(f"starting {entry.name} ({entry.kind}: {entry.model})")

    def resuming(self, ledger: RunsLedger) -> None:
        """What is there already is not measured again."""
        last = ledger.resumed[-1]
        note = f"; {last['dropped']} of a repetition that was cut short come again"
        self._say(
            f"{last['kept']} runs are already in {ledger.path}{note if last['dropped'] else ''}"
        )

    @contextmanager
    def progress(self, total: int) -> Iterator[None]:
        """A bar over `total` runs, in a terminal."""
        if not self.console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            self._progress = progress
            self._task = progress.add_task("", total=total)
            try:
                yield
            finally:
                self._progress = None

    def show(self, planned: Planned, record: Record | None) -> None:
        """Before a run (record None) and after it; a warm-up has no after."""
        where = f"{planned.workload.name}, concurrency {planned.concurrency}, "
        name = planned.contestant.entry.name
        if record is None:
            if planned.repetition is not None:
                what = f"repetition {planned.repetition + 1}"
            else:
                what = "warm-up" if planned.warmup else "accuracy"
            if self._progress is not None and self._task is not None:
                self._progress.update(self._task, description=f"{where}{what}: {name}", advance=1)
            return
        failed = [answer for answer in record.answers if answer.error is not None]
        note = f", {len(failed)} of {len(record.answers)} failed" if failed else ""
        if planned.repetition is None:
            right = sum(bool(answer.right) for answer in record.answers)
            self._say(f"{where}{name}: {right} of {len(record.answers)} right{note}")
        else:
            speed = record.tokens / record.seconds
            self._say(f"{where}{name}: {speed:,.0f} tokens/s{note}")
        for answer in failed[:1]:
            self._say(f"  e.g. request {answer.item}: {answer.error}")

    def report(self, report: ComparisonReport, folder: Path) -> None:
        """The table, who won, and where the rest is."""
        for workload in report.workloads:
            table = Table(title=workload, title_justify="left")
            for name in ("concurrency", "entry"):
                table.add_column(name)
            for name in ("tokens/s", f"x {report.baseline}", "first, ms", "answer, ms",
                         "tokens/forward", "right", "MiB", "failed"):  # fmt: skip
                table.add_column(name, justify="right")
            for row in report.rows:
                if row.workload != workload:
                    continue
                ratio, found = report.speedup(row), report.accuracy(row.entry, workload)
                table.add_row(
                    str(row.concurrency),
                    row.entry,
                    f"{row.throughput:,.0f}",
                    "-" if ratio is None else f"{ratio:.2f}",
                    _or_dash(row.first and 1e3 * row.first),
                    _or_dash(row.finished and 1e3 * row.finished),
                    _or_dash(row.tokens_per_forward, 2),
                    "-" if found is None else f"{found.right / found.problems:.1%}",
                    _or_dash(row.peak_bytes and row.peak_bytes / 2**20, 0),
                    str(row.failed),
                )
            self.console.print(table)
            for line in report.verdict(workload):
                self.console.print(line.replace("**", ""))
        self.console.print(f"report.md, report.json and figures: {folder}")

    def _say(self, text: str) -> None:
        self.console.print(text)


def _or_dash(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
