"""What a long command shows while it works: lines, and in a terminal a bar of what is left."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def standard_output(plain_width: int | None = None) -> Console:
    """Standard output; only a real terminal counts as one. plain_width: columns elsewhere."""
    from rich.console import Console

    # Rich also believes variables of the environment, such as FORCE_COLOR.
    live = sys.stdout.isatty()
    return Console(
        force_terminal=live,
        width=None if live else plain_width,
        highlight=False,
        markup=False,
        emoji=False,
    )


def is_live(console: Console) -> bool:
    """Whether what is shown there can be drawn again."""
    return console.is_terminal and not console.is_dumb_terminal


class ShownProgress:
    """Shows nothing without a console. unit: what is counted."""

    def __init__(self, console: Console | None, unit: str):
        self.console = console
        self.bar = None
        if console is not None and is_live(console):
            from rich.progress import (
                BarColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self.task = self.bar.add_task("", total=None)

    def __enter__(self) -> ShownProgress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    @property
    def is_live(self) -> bool:
        """Whether there is a bar."""
        return self.bar is not None

    def begin(self, total: int, what: str = "") -> None:
        """Let the bar begin anew."""
        if self.bar is not None:
            self.bar.reset(self.task, total=total, description=what)

    def advance(self, done: int = 1, what: str | None = None) -> None:
        """So much more is done. what: said beside the bar."""
        if self.bar is not None:
            self.bar.update(self.task, advance=done, description=what)

    def say(self, line: str) -> None:
        """A line as it is, above the bar."""
        if self.bar is not None:
            self.bar.console.print(line, markup=False, highlight=False)
        elif self.console is not None:
            print(line, file=self.console.file, flush=True)
