"""What the command shows while it decodes: the pipeline live, plain lines, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from d2f.errors import one_line
from decode.jobs import PromptJob, Record, numbers, plain_line, shown_text, verdict
from decode.step import Event

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase


# The running requests on a terminal of any size: what is being decoded stays in view, and what
# does not fit is said in a line.

LABEL_WIDTH = 12
NARROWEST = 10  # columns of text below which the states are left out
BORDER = 2  # lines of a panel's own
LEAST = BORDER + 1  # lines of a panel that shows something


@dataclass(frozen=True)
class ShownBlock:
    """A block as it is drawn. settled: whether nothing of it may change any more. focus: where in
    its text decoding goes on, in characters."""

    number: int
    label: str
    style: str
    text: Text
    settled: bool
    focus: int


@dataclass(frozen=True)
class Line:
    """A line of a block that was broken to the width."""

    block: ShownBlock
    text: Text


@dataclass(frozen=True)
class RequestPanel:
    """A request's blocks, numbered from 1. title: what it is and how far."""

    title: Text
    blocks: Sequence[ShownBlock]

    def lines(self, console: Console, width: int) -> tuple[list[Line], int]:
        """All lines at a width, and the place of the one where decoding goes on: in the first block
        that is not settled, else at the end."""
        found: list[Line] = []
        focus = None
        for block in self.blocks:
            parts = block.text.wrap(console, self._widths(width)[2], overflow="fold")
            if not block.settled and focus is None:
                ends, focus = 0, len(found) + max(0, len(parts) - 1)
                for place, part in enumerate(parts):
                    ends += len(part.plain) + 1  # a space may have gone with the break
                    if block.focus < ends:
                        focus = len(found) + place
                        break
            found += [Line(block, part) for part in parts] or [Line(block, Text())]
        return found, len(found) - 1 if focus is None else focus

    def render(self, console: Console, width: int, height: int) -> RenderableType:
        """The panel in at most `height` lines, at least one; without a border where one would
        leave nothing inside."""
        framed = height >= LEAST
        found, focus = self.lines(console, width)
        room = height - BORDER if framed else height
        first, stop = window(len(found), focus, room)
        parts: list[RenderableType] = []
        # With two lines or fewer all are for the blocks, as in `window`.
        if first and room > 2:
            parts.append(Text(_above(found, first), "dim", no_wrap=True, overflow="ellipsis"))
        parts.append(self._table(found[first:stop], width))
        if stop < len(found) and room > 2:
            more = f"… {len(found) - stop} more lines, to block {len(self.blocks)}"
            parts.append(Text(more, "dim", no_wrap=True, overflow="ellipsis"))
        if not framed:
            return Group(*parts)
        return Panel(Group(*parts), title=self.title, title_align="left", border_style="dim")

    def _widths(self, width: int) -> tuple[int, int, int]:
        """Columns of number, state and text."""
        number = len(str(len(self.blocks)))
        text = width - 4 - number - 2  # borders and their padding, the gap
        if text - LABEL_WIDTH - 2 >= NARROWEST:
            return number, LABEL_WIDTH, text - LABEL_WIDTH - 2
        return number, 0, max(1, text)

    def _table(self, lines: Sequence[Line], width: int) -> Table:
        widths = [part for part in self._widths(width) if part]
        table = Table.grid(padding=(0, 2))
        for part in widths:
            table.add_column(width=part, no_wrap=True, overflow="crop")
        before = None
        for line in lines:
            block, new = line.block, line.block is not before
            state = [Text(block.label if new else "", block.style)] if len(widths) == 3 else []
            table.add_row(Text(str(block.number) if new else "", "dim"), *state, line.text)
            before = block
        return table


class Running:
    """All running requests, in what lines the terminal has."""

    def __init__(self, panels: Sequence[RequestPanel]):
        self.panels = list(panels)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, max(1, console.height - 1)  # a line for the cursor
        shown = self.panels
        if len(shown) * LEAST > height:
            # A line is left to say how many are not shown.
            shown = shown[: max(1, (height - 1) // LEAST)]
        left = len(self.panels) - len(shown)
        needs = [BORDER + len(panel.lines(console, width)[0]) for panel in shown]
        for panel, room in zip(shown, shares(needs, height - bool(left)), strict=True):
            yield panel.render(console, width, max(1, room))
        if left and height > 1:
            yield Text(f"… and {left} more", "dim", no_wrap=True, overflow="ellipsis")


def window(count: int, focus: int, room: int) -> tuple[int, int]:
    """Which of `count` lines are shown, ``[first, stop)`` with `focus` among them: the oldest go
    first, but none from the focus on, then the last. A line is left for what is above and one for
    what is below, where there are more than two."""
    if count <= room:
        return 0, count
    if room <= 2:
        first = min(focus, count - room)
        return first, first + room
    first = min(focus, count - (room - 1))
    if first == 0:
        return 0, room - 1
    stop = first + room - 1
    return first, stop if stop >= count else stop - 1


def shares(needs: Sequence[int], height: int) -> list[int]:
    """Lines for each: what it needs where that is less than an even share of what is left."""
    found = [0] * len(needs)
    left = height
    # From the smallest need on: what one leaves of its even share goes to the others.
    for done, i in enumerate(sorted(range(len(needs)), key=lambda i: needs[i])):
        found[i] = min(needs[i], left // (len(needs) - done))
        left -= found[i]
    return found


def _above(lines: Sequence[Line], first: int) -> str:
    """What the lines before `first` were: whole blocks by their numbers and state."""
    kept = lines[first].block
    above = [line.block for line in lines[:first] if line.block is not kept]
    gone = list(dict.fromkeys(block.number for block in above))
    labels = {block.label for block in above}
    if not gone:
        return f"… {first} lines of block {kept.number} above"
    state = labels.pop() if len(labels) == 1 else "done"
    blocks = f"block {gone[0]}" if len(gone) == 1 else f"blocks {gone[0]}-{gone[-1]}"
    return f"{blocks} {state}"


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


class Silent:
    """A display that shows nothing. The others have its methods."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to close."""

    def show(self, job: PromptJob, event: Event) -> None:
        """One forward of a request."""

    def finish(self, job: PromptJob, record: Record) -> None:
        """A request that is done."""


class Plain(Silent):
    """A line a result, without control codes."""

    def __init__(self, console: Console):
        self.console = console

    def finish(self, job: PromptJob, record: Record) -> None:
        print(plain_line(record), file=self.console.file, flush=True)


class LiveDisplay(Silent):
    """The running requests' blocks, redrawn as they advance; a finished one is printed above.

    total: number of prompts. pause: seconds that each forward stays on the screen, 0 for as
    short as it takes, with a limited rate of redrawing; None begins with `FIRST_PAUSE` and goes
    over into that, with `ALL_PAUSES` at most in all.
    """

    def __init__(
        self,
        console: Console,
        tokenizer: PreTrainedTokenizerBase | None,
        end_ids: tuple[int, ...],
        *,
        total: int,
        pause: float | None,
    ):
        self.console = console
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.total, self.pause, self.paused = total, pause, 0.0
        # Drawn by this thread when an event comes: a refreshing thread would take time from
        # decoding.
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self._panels: dict[int, RequestPanel] = {}
        self._pieces: dict[int, str] = {}
        self._done = 0
        self._drawn = float("-inf")

    def __enter__(self) -> LiveDisplay:
        self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.live.stop()

    def show(self, job: PromptJob, event: Event) -> None:
        self._panels[event.request] = self._panel(job, event)
        pause = self.next_pause()
        if pause:
            self._draw()
            self.paused += pause
            time.sleep(pause)
        elif time.perf_counter() - self._drawn >= FRAME_SECONDS:
            self._draw()
        if event.result is not None:
            # Drawn for the last time above; `finish` prints the answer.
            del self._panels[event.request]

    def next_pause(self) -> float:
        """Seconds that the next forward stays on the screen."""
        if self.pause is not None:
            return self.pause
        # Each pause takes its share of what is left, so that the sum stays below ALL_PAUSES.
        pause = FIRST_PAUSE * (1 - self.paused / ALL_PAUSES)
        return pause if pause >= LEAST_PAUSE else 0.0

    def finish(self, job: PromptJob, record: Record) -> None:
        self._done += 1
        self._draw()
        title = Text(f"{one_line(job.source.where)} · {self._done} of {self.total}", "bold")
        table = Table.grid(padding=(0, 2))
        if record.question is not None:
            table.add_row(Text("question", "dim"), _lines(record.question))
        table.add_row(Text("answer", "dim"), _lines(shown_text(record)))
        style = {True: "bold green", False: "bold red", None: "bold"}[record.right]
        table.add_row(Text(verdict(record), style), Text(numbers(record)))
        self.console.print(Group(title, table, Text()))

    def _draw(self) -> None:
        self.live.update(Running(list(self._panels.values())), refresh=True)
        self._drawn = time.perf_counter()

    def _panel(self, job: PromptJob, event: Event) -> RequestPanel:
        fresh = {revealed.position for revealed in event.revealed}
        labels = job.decoder.labels
        shown = []
        for number, block in enumerate(event.blocks, 1):
            label, settled = labels.get(block.state, block.state), block.state in SETTLED
            text, focus = self._tokens(block.start, block.tokens, fresh)
            shown.append(ShownBlock(number, label, STYLES[block.state], text, settled, focus))
        where = one_line(job.source.where)
        title = Text(f"{where} · forward {event.forward} · {len(fresh)} revealed")
        return RequestPanel(title, shown)

    def _tokens(
        self, start: int, tokens: tuple[int | None, ...], fresh: set[int]
    ) -> tuple[Text, int]:
        """A block's tokens: masked ones as dots, new ones highlighted, ends discreet; and the
        place of the first that is masked or new, in characters."""
        text, places = Text(overflow="fold"), []
        for position, token in enumerate(tokens, start):
            if token is None or position in fresh:
                places.append(len(text))
            if token is None:
                text.append(MASKED, "dim")
            elif token in self.end_ids:
                text.append(END, "green dim" if position in fresh else "dim")
            else:
                text.append(self._piece(token), "black on green" if position in fresh else "")
        return text, places[0] if places else len(text)

    def _piece(self, token: int) -> str:
        # Kept by token: every forward draws all tokens of a request again.
        if token not in self._pieces:
            text = f"{token} " if self.tokenizer is None else str(self.tokenizer.decode([token]))
            self._pieces[token] = "↵".join(map(one_line, text.split("\n")))
        return self._pieces[token]


def _lines(text: str) -> Text:
    """Text of several lines without control characters."""
    return Text("\n".join(map(one_line, text.split("\n"))), overflow="fold")


# What a long command shows while it works: lines, and in a terminal a bar of what is left.


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
