"""The end of the command: a table a task, and how to use what was chosen."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from decode.tuning.outcome import FINAL_COLUMNS, final_cells
from decode.tuning.space import described
from decode.tuning.tuning_report import TuningReport

PLAIN_WIDTH = 160  # columns, where the output is not a terminal


def show(report: TuningReport, console: Console) -> None:
    """Print what was chosen, whether it holds up, and the command that uses it."""
    for outcome in report.outcomes:
        _print(
            console,
            [
                f"{outcome.task}: {outcome.goal.text}",
                *outcome.search_text,
                outcome.verdict_text,
                outcome.against_defaults,
                *(
                    f"{', '.join(f.roles)}: {described(f.setting) or 'as it is'}"
                    for f in outcome.finals
                ),
            ],
        )
        table = Table(box=SIMPLE, pad_edge=False)
        columns = [(i, name) for i, name in enumerate(FINAL_COLUMNS) if name != "setting"]
        for i, name in columns:
            table.add_column(name, justify="right" if i else "left")
        for final in outcome.finals:
            cells = final_cells(final)
            table.add_row(*(cells[i] for i, _ in columns))
        console.print(table)
    _print(console, [report.counted, "", f"written: {report.folder}"])
    _print(console, ["use it:", *(f"  {report.use(o.task)}" for o in report.outcomes)])


def _print(console: Console, lines: list[str]) -> None:
    """Lines as they are, not wrapped: a command must stay in one."""
    for line in lines:
        print(line, file=console.file)
