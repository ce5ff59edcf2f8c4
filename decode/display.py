"""Show a command's work: the pipeline live, plain lines, a bar, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from d2f.errors import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from decode.jobs import Job, Record
    from decode.step import Event

LABEL_WIDTH = 12
NARROWEST = 10  # columns of text below which the states are left out
BORDER = 2  # lines of a panel's own
LEAST = BORDER + 1  # lines of a panel that shows something
FRAME_SECONDS = 1 / 12  # between refreshes where many prompts are decoded together
FIRST_PAUSE, ALL_PAUSES = 0.05, 3.0  # seconds, where none are asked for
LEAST_PAUSE = 0.01  # below it forwards are drawn at the limited rate
SETTLED = ("cached", "decoded")
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
    """Show nothing. Others show, or keep, what they are told while jobs are decoded."""

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
    """Print a line a result, without control codes."""

    def __init__(self, console: Console):
        self.console = console

    def finish(self, job: Job, record: Record) -> None:
        print(record.line, file=self.console.file, flush=True)


class LiveDisplay(Display):
    """Redraw the running requests' blocks as they advance; print a finished one above.

    pause: seconds that each forward stays on the screen, 0 for as short as it takes, with a limited
        rate of redrawing; None begins with `FIRST_PAUSE` and goes over into that, with `ALL_PAUSES`
        at most in all.
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
        pause = self.next_pause()
        if pause:
            self._draw()
            self.paused += pause
            time.sleep(pause)
        elif time.perf_counter() - self._drawn >= FRAME_SECONDS:
            self._draw()
        if event.result is not None:  # drawn for the last time; `finish` prints the answer
            del self._panels[event.request]

    def next_pause(self) -> float:
        """Return the seconds that the next forward stays on the screen."""
        if self.pause is not None:
            return self.pause
        # Each pause takes its share of what is left, so that the sum stays below ALL_PAUSES.
        pause = FIRST_PAUSE * (1 - self.paused / ALL_PAUSES)
        return pause if pause >= LEAST_PAUSE else 0.0

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
        shown = []
        for block in event.blocks:
            label = job.decoder.labels.get(block.state, block.state)
            text, focus = self._tokens(block.start, block.tokens, fresh)
            at = None if block.state in SETTLED else focus
            shown.append(ShownBlock(Text(label, STYLES[block.state]), text, at))
        where = one_line(job.source.where)
        return RequestPanel(
            Text(f"{where} · forward {event.forward} · {len(fresh)} revealed"), shown
        )

    def _tokens(
        self, start: int, tokens: tuple[int | None, ...], fresh: set[int]
    ) -> tuple[Text, int]:
        """Draw a block's tokens, masked ones as dots, new ones highlighted, ends discreet; and find
        the place of the first that is masked or new, in characters."""
        text, places = Text(overflow="fold"), []
        for position, token in enumerate(tokens, start):
            new = position in fresh
            if token is None or new:
                places.append(len(text))
            if token is None:
                text.append(MASKED, "dim")
            elif token in self.end_ids:
                text.append(END, "green dim" if new else "dim")
            else:
                text.append(self._piece(token), "black on green" if new else "")
        return text, places[0] if places else len(text)

    def _piece(self, token: int) -> str:
        if token not in self._pieces:  # every forward draws all tokens of a request again
            text = f"{token} " if self.tokenizer is None else str(self.tokenizer.decode([token]))
            self._pieces[token] = "↵".join(map(one_line, text.split("\n")))
        return self._pieces[token]


def _lines(text: str) -> Text:
    """Make text of several lines, without control characters."""
    return Text("\n".join(map(one_line, text.split("\n"))), overflow="fold")


# The running requests on a terminal of any size: what is being decoded stays in view, and the
# border says what does not fit.


@dataclass(frozen=True)
class ShownBlock:
    """A block as it is drawn. focus: where in its text decoding goes on, in characters; None where
    nothing of it may change any more."""

    label: Text
    text: Text
    focus: int | None


@dataclass(frozen=True)
class RequestPanel:
    """Draw a request's blocks, numbered from 1. title: what it is and how far."""

    title: Text
    blocks: Sequence[ShownBlock]

    def render(self, console: Console, width: int, height: int) -> tuple[RenderableType, int]:
        """Draw the panel in at most `height` lines, at least one; without a border where one would
        leave nothing inside. Return it with the lines that it takes."""
        framed = height >= LEAST
        room = height - BORDER if framed else height
        digits = len(str(len(self.blocks)))
        text = width - 4 - digits - 2  # borders and their padding, the gap
        labelled = text - LABEL_WIDTH - 2 >= NARROWEST
        text = max(1, text - LABEL_WIDTH - 2 if labelled else text)
        rows: list[tuple[int, Text, Text]] = []  # number and label of its block, and a line
        focus = None
        for number, block in enumerate(self.blocks, 1):
            parts = list(block.text.wrap(console, text, overflow="fold")) or [Text()]
            if focus is None and block.focus is not None:
                focus = len(rows) + _line_at(parts, block.focus)
            rows += [(number, block.label, part) for part in parts]
        # The oldest lines go first, but none from the one on where decoding goes on.
        first = max(0, min(len(rows) - 1 if focus is None else focus, len(rows) - room))
        shown = rows[first : first + room]
        table = Table.grid(padding=(0, 2))
        for columns in [digits, LABEL_WIDTH, text] if labelled else [digits, text]:
            table.add_column(width=columns, no_wrap=True, overflow="crop")
        before = 0
        for number, label, part in shown:
            named = [Text(str(number), "dim"), label] if number != before else [Text(), Text()]
            table.add_row(*named[: 1 + labelled], part)
            before = number
        if not framed:
            return table, len(shown)
        hidden = [f"{first} lines above, to block {shown[0][0]}"] if first else []
        if below := len(rows) - first - len(shown):
            hidden.append(f"{below} below, to block {len(self.blocks)}")
        note = Text("… " + "; ".join(hidden), "dim") if hidden else None
        panel = Panel(
            table, title=self.title, title_align="left", subtitle=note, border_style="dim"
        )
        return panel, len(shown) + BORDER


def _line_at(parts: Sequence[Text], place: int) -> int:
    """Find which line of a wrapped text has a character, the last one for a place behind it."""
    ends = 0
    for number, part in enumerate(parts):
        ends += len(part.plain) + 1  # a space may have gone with the break
        if place < ends:
            return number
    return len(parts) - 1


class Running:
    """Draw all running requests in the lines that the terminal has."""

    def __init__(self, panels: Sequence[RequestPanel]):
        self.panels = list(panels)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = max(1, console.height - 1)  # a line for the cursor
        shown = self.panels
        if len(shown) * LEAST > left:  # a line is left to say how many are not shown
            shown = shown[: max(1, (left - 1) // LEAST)]
        hidden = len(self.panels) - len(shown)
        left -= bool(hidden) and left > 1
        for place, panel in enumerate(shown):
            # What one leaves of its even share goes to those after it.
            share = max(1, left // (len(shown) - place))
            drawn, lines = panel.render(console, options.max_width, share)
            left -= lines
            yield drawn
        if hidden and console.height > 2:
            yield Text(f"… and {hidden} more", "dim", no_wrap=True, overflow="ellipsis")


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
        """Let the bar begin anew."""
        self.bar.reset(self.task, total=total, description=what)

    def advance(self, done: int = 1, what: str | None = None) -> None:
        """Count so much more as done. what: said beside the bar."""
        self.bar.update(self.task, advance=done, description=what)

    def say(self, line: str) -> None:
        """Print a line as it is, above the bar."""
        if self.is_live:
            self.bar.console.print(line, markup=False, highlight=False)
        elif self.console is not None:
            print(line, file=self.console.file, flush=True)
