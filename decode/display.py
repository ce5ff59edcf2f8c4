"""Show a command's work: the pipeline live, plain lines, a bar, or nothing."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from d2f.errors import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from decode.jobs import Job, Record
    from decode.step import Event

BORDER = 2  # lines of a panel's own; its columns are twice as many
FRAME_SECONDS = 1 / 12  # between refreshes where no forward is paused for
PAUSE, ALL_PAUSES = 0.05, 3.0  # seconds, where none are asked for
MASKED, END = "·", "▪"
STYLES = {
    "semi-active": "yellow",
    "fully active": "bold green",
    "to cache": "blue",
    "cached": "dim cyan",
    "waiting": "dim",
    "decoded": "blue",
}


def standard_output(plain_width: int | None = None) -> Console:
    """Return standard output; only a real terminal counts as one. plain_width: columns
    elsewhere."""
    live = sys.stdout.isatty()  # rich also believes variables such as FORCE_COLOR
    width = None if live else plain_width
    return Console(force_terminal=live, width=width, highlight=False, markup=False, emoji=False)


def is_live(console: Console) -> bool:
    """Tell whether lines that are shown there can be drawn again."""
    return console.is_terminal and not console.is_dumb_terminal


class Display:
    """Show nothing. Subclasses show or keep what happens while jobs are decoded."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the display."""

    def begin(self, total: int) -> None:
        """Learn how many requests there are."""

    def show(self, job: Job, event: Event) -> None:
        """Show one forward of a request."""

    def finish(self, job: Job, record: Record) -> None:
        """Show a request that is done."""


class Plain(Display):
    """Print what was asked, the answer and its numbers, without control codes."""

    def __init__(self, console: Console):
        self.console = console

    def finish(self, job: Job, record: Record) -> None:
        rows = {"question": record.question, "answer": record.shown, record.verdict: record.numbers}
        name = one_line(str(record.id))
        for label, text in rows.items():
            if text is not None:
                print(f"{name:<12} {label:<8}  {shortened(text)}", file=self.console.file)
        self.console.file.flush()


def shortened(text: str, most: int = 1000) -> str:
    """Put text into one line without control characters; cut a long one."""
    line = one_line(text[: most + 1])
    return line if len(text) <= most else f"{line[:most]}…"


class LiveDisplay(Display):
    """Redraw the running requests' blocks as they advance; print a finished one above.

    pause: seconds that each forward stays on the screen, 0 for as short as it takes, with a limited
        rate of redrawing; None is `PAUSE` until these have been `ALL_PAUSES` in all, then 0.
    """

    def __init__(
        self,
        console: Console,
        tokenizer: PreTrainedTokenizerBase | None,
        end_ids: tuple[int, ...],
        *,
        pause: float | None,
    ):
        self.console = console
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.pause, self.paused = pause, 0.0
        # Drawn when an event comes: a thread that refreshes would take time from decoding.
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self._panels: dict[int, RequestPanel] = {}
        self._pieces: dict[int, str] = {}
        self._total, self._done, self._drawn = 0, 0, float("-inf")

    def __enter__(self) -> LiveDisplay:
        self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.live.stop()

    def begin(self, total: int) -> None:
        self._total = total

    def show(self, job: Job, event: Event) -> None:
        self._panels[event.request] = self._panel(job, event)
        pause = self.pause
        if pause is None:
            pause = PAUSE if self.paused < ALL_PAUSES else 0.0
        if pause or time.perf_counter() - self._drawn >= FRAME_SECONDS:
            self._draw()
        if pause:
            self.paused += pause
            time.sleep(pause)
        if event.result is not None:  # drawn for the last time; `finish` prints the answer
            del self._panels[event.request]

    def finish(self, job: Job, record: Record) -> None:
        self._done += 1
        self._draw()
        title = Text(f"{one_line(job.source.where)} · {self._done} of {self._total}", "bold")
        table = Table.grid(padding=(0, 2))
        if record.question is not None:
            table.add_row(Text("question", "dim"), _lines(record.question))
        table.add_row(Text("answer", "dim"), _lines(record.shown))
        style = {True: "bold green", False: "bold red", None: "bold"}[record.right]
        table.add_row(Text(record.verdict, style), Text(record.numbers))
        self.console.print(Group(title, table, Text()))

    def _draw(self) -> None:
        self.live.update(Running(list(self._panels.values())), refresh=True)
        self._drawn = time.perf_counter()

    def _panel(self, job: Job, event: Event) -> RequestPanel:
        fresh = {revealed.position for revealed in event.revealed}
        blocks = []
        for block in event.blocks:
            label = job.decoder.labels.get(block.state, block.state)
            text = self._tokens(block.start, block.tokens, fresh)
            blocks.append((Text(label, STYLES[block.state]), text))
        where = one_line(job.source.where)
        return RequestPanel(f"{where} · forward {event.forward} · {len(fresh)} revealed", blocks)

    def _tokens(self, start: int, tokens: tuple[int | None, ...], fresh: set[int]) -> Text:
        """Draw a block's tokens: masked ones as dots, new ones highlighted, ends discreet."""
        text = Text(overflow="fold")
        for position, token in enumerate(tokens, start):
            new = position in fresh
            if token is None:
                text.append(MASKED, "dim")
            elif token in self.end_ids:
                text.append(END, "green dim" if new else "dim")
            else:
                text.append(self._piece(token), "black on green" if new else "")
        return text

    def _piece(self, token: int) -> str:
        if token not in self._pieces:  # every forward draws all tokens of a request again
            text = f"{token} " if self.tokenizer is None else str(self.tokenizer.decode([token]))
            self._pieces[token] = "↵".join(map(one_line, text.split("\n")))
        return self._pieces[token]


def _lines(text: str) -> Text:
    """Make text of several lines, without control characters."""
    return Text("\n".join(map(one_line, text.split("\n"))), overflow="fold")


@dataclass(frozen=True)
class RequestPanel:
    """A request: what it is and how far, and the state and tokens of each block."""

    title: str
    blocks: list[tuple[Text, Text]]


class Running:
    """Draw all running requests in the lines that the terminal has: what is being decoded stays in
    view, and the border says what does not fit."""

    def __init__(self, panels: list[RequestPanel]):
        self.panels = panels

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = console.height - 2  # a line for the cursor, where Ctrl-C shows, and what it adds
        shown = self.panels[: max(1, (height - 1) // (BORDER + 1))]
        hidden = len(self.panels) - len(shown)
        inside = options.update_width(max(1, options.max_width - 2 * BORDER))
        drawn = []
        for panel in shown:
            table = Table.grid(padding=(0, 2))
            for number, (state, text) in enumerate(panel.blocks, 1):
                table.add_row(Text(str(number), "dim"), state, text)
            drawn.append(console.render_lines(table, inside))
        rooms, left = {}, height - bool(hidden) - BORDER * len(shown)
        # What short panels leave free is for the long ones.
        for done, n in enumerate(sorted(range(len(shown)), key=lambda n: len(drawn[n]))):
            rooms[n] = max(1, min(len(drawn[n]), left // (len(shown) - done)))
            left -= rooms[n]
        for n, (panel, lines) in enumerate(zip(shown, drawn, strict=True)):
            room = rooms[n]
            # The oldest lines go first, but none from the one on where decoding goes on.
            masked = [i for i, line in enumerate(lines) if any(MASKED in s.text for s in line)]
            first = max(0, min(len(lines) - room, *masked[:1], len(lines)))
            note = None
            if len(lines) > room:
                note = Text(f"lines {first + 1} to {first + room} of {len(lines)}", "dim")
            yield Panel(
                SegmentLines(lines[first : first + room], new_lines=True),
                title=Text(panel.title),
                title_align="left",
                subtitle=note,
                border_style="dim",
            )
        if hidden:
            yield Text(f"… and {hidden} more", "dim", no_wrap=True, overflow="ellipsis")
        yield Text()


class Rate(ProgressColumn):
    """Show how many are done a second, or a minute where it is fewer than one."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed or 0.0
        return Text(f"{speed:.1f}/s" if speed >= 1 or not speed else f"{60 * speed:.1f}/min")


class ShownProgress:
    """Print lines, and draw a bar of what is left in a terminal; do nothing without a console.
    unit: what is counted."""

    def __init__(self, console: Console | None, unit: str):
        self.console = console
        self.is_live = console is not None and is_live(console)
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
            Rate(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self.is_live,
        )
        self.task = self.bar.add_task("", total=None)

    def __enter__(self) -> ShownProgress:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def begin(self, total: int, what: str = "") -> None:
        """Start the bar again."""
        self.bar.reset(self.task, total=total, description=what)

    def advance(self, done: int = 1, what: str | None = None) -> None:
        """Count so much more as done. what: shown beside the bar."""
        self.bar.update(self.task, advance=done, description=what)

    def say(self, line: str) -> None:
        """Print a line as it is, above the bar."""
        if self.is_live:
            self.bar.console.print(line, markup=False, highlight=False)
        elif self.console is not None:
            print(line, file=self.console.file, flush=True)
