"""What a command shows while it works: the pipeline live, plain lines, a bar, or nothing."""

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
from decode.jobs import PromptJob, Record
from decode.step import Event

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    """Whether what is shown there can be drawn again."""
    return console.is_terminal and not console.is_dumb_terminal


class Silent:
    """A display that shows nothing. The others have its methods."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the display."""

    def show(self, job: PromptJob, event: Event) -> None:
        """Show one forward of a request."""

    def finish(self, job: PromptJob, record: Record) -> None:
        """Show a request that is done."""


class Plain(Silent):
    """A line a result, without control codes."""

    def __init__(self, console: Console):
        self.console = console

    def finish(self, job: PromptJob, record: Record) -> None:
        print(record.line, file=self.console.file, flush=True)


class LiveDisplay(Silent):
    """The running requests' blocks, redrawn as they advance; a finished one is printed above.

    total: number of prompts.
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
        total: int,
        pause: float | None,
    ):
        self.console = console
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.total, self.pause, self.paused = total, pause, 0.0
        # Drawn when an event comes: a thread that refreshes would take time from decoding.
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self._panels: dict[int, RequestPanel] = {}
        self._pieces: dict[int, str] = {}
        self._done, self._drawn = 0, float("-inf")

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
        if event.result is not None:  # drawn for the last time; `finish` prints the answer
            del self._panels[event.request]

    def next_pause(self) -> float:
        """Return the seconds that the next forward stays on the screen."""
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
        table.add_row(Text("answer", "dim"), _lines(record.shown))
        style = {True: "bold green", False: "bold red", None: "bold"}[record.right]
        table.add_row(Text(record.verdict, style), Text(record.numbers))
        self.console.print(Group(title, table, Text()))

    def _draw(self) -> None:
        self.live.update(Running(list(self._panels.values())), refresh=True)
        self._drawn = time.perf_counter()

    def _panel(self, job: PromptJob, event: Event) -> RequestPanel:
        fresh = {revealed.position for revealed in event.revealed}
        shown = []
        for number, block in enumerate(event.blocks, 1):
            label = job.decoder.labels.get(block.state, block.state)
            text, focus = self._tokens(block.start, block.tokens, fresh)
            settled = block.state in SETTLED
            shown.append(ShownBlock(number, label, STYLES[block.state], text, settled, focus))
        where = one_line(job.source.where)
        return RequestPanel(
            Text(f"{where} · forward {event.forward} · {len(fresh)} revealed"), shown
        )

    def _tokens(
        self, start: int, tokens: tuple[int | None, ...], fresh: set[int]
    ) -> tuple[Text, int]:
        """A block's tokens: masked ones as dots, new ones highlighted, ends discreet; and the
        place of the first that is masked or new, in characters."""
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
    """Text of several lines without control characters."""
    return Text("\n".join(map(one_line, text.split("\n"))), overflow="fold")


# The running requests on a terminal of any size: what is being decoded stays in view, and what does
# not fit is said in a line.


@dataclass(frozen=True)
class ShownBlock:
    """A block as it is drawn. settled: nothing of it may change any more. focus: where in its text
    decoding goes on, in characters."""

    number: int
    label: str
    style: str
    text: Text
    settled: bool
    focus: int


@dataclass(frozen=True)
class RequestPanel:
    """A request's blocks, numbered from 1. title: what it is and how far."""

    title: Text
    blocks: Sequence[ShownBlock]

    def lines(self, console: Console, width: int) -> tuple[list[tuple[ShownBlock, Text]], int]:
        """Break the blocks to a width; return the lines and the place of the one where decoding
        goes on: in the first block that is not settled, else at the end."""
        found: list[tuple[ShownBlock, Text]] = []
        focus = None
        for block in self.blocks:
            parts = list(block.text.wrap(console, self._widths(width)[-1], overflow="fold"))
            if not block.settled and focus is None:
                ends, focus = 0, len(found) + max(0, len(parts) - 1)
                for place, part in enumerate(parts):
                    ends += len(part.plain) + 1  # a space may have gone with the break
                    if block.focus < ends:
                        focus = len(found) + place
                        break
            found += [(block, part) for part in parts or [Text()]]
        return found, len(found) - 1 if focus is None else focus

    def render(self, console: Console, width: int, height: int) -> RenderableType:
        """Draw the panel in at most `height` lines, at least one; without a border where one would
        leave nothing inside."""
        framed = height >= LEAST
        found, focus = self.lines(console, width)
        room = height - BORDER if framed else height
        first, stop = window(len(found), focus, room)
        parts: list[RenderableType] = [self._table(found[first:stop], width)]
        if first and room > 2:  # else all lines are for the blocks, as in `window`
            parts.insert(0, _dim(_above(found, first)))
        if stop < len(found) and room > 2:
            parts.append(_dim(f"… {len(found) - stop} more lines, to block {len(self.blocks)}"))
        if not framed:
            return Group(*parts)
        return Panel(Group(*parts), title=self.title, title_align="left", border_style="dim")

    def _widths(self, width: int) -> list[int]:
        """Columns of number, state (left out where it is narrow) and text."""
        number = len(str(len(self.blocks)))
        text = width - 4 - number - 2  # borders and their padding, the gap
        if text - LABEL_WIDTH - 2 >= NARROWEST:
            return [number, LABEL_WIDTH, text - LABEL_WIDTH - 2]
        return [number, max(1, text)]

    def _table(self, lines: Sequence[tuple[ShownBlock, Text]], width: int) -> Table:
        widths = self._widths(width)
        table = Table.grid(padding=(0, 2))
        for part in widths:
            table.add_column(width=part, no_wrap=True, overflow="crop")
        before = None
        for block, text in lines:
            number = Text(str(block.number) if block is not before else "", "dim")
            label = Text(block.label if block is not before else "", block.style)
            table.add_row(*([number, label, text] if len(widths) == 3 else [number, text]))
            before = block
        return table


class Running:
    """All running requests, in what lines the terminal has."""

    def __init__(self, panels: Sequence[RequestPanel]):
        self.panels = list(panels)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, max(1, console.height - 1)  # a line for the cursor
        shown = self.panels
        if len(shown) * LEAST > height:  # a line is left to say how many are not shown
            shown = shown[: max(1, (height - 1) // LEAST)]
        hidden = len(self.panels) - len(shown)
        needs = [BORDER + len(panel.lines(console, width)[0]) for panel in shown]
        for panel, room in zip(shown, shares(needs, height - bool(hidden)), strict=True):
            yield panel.render(console, width, max(1, room))
        if hidden and height > 1:
            yield _dim(f"… and {hidden} more")


def window(count: int, focus: int, room: int) -> tuple[int, int]:
    """Choose which of `count` lines are shown, ``[first, stop)`` with `focus` among them: the
    oldest go first, but none from the focus on, then the last. A line is left for what is above and
    one for what is below, where there are more than two."""
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
    """Give each the lines that it needs, where that is less than an even share of what is left."""
    found, left = [0] * len(needs), height
    # From the smallest need on: what one leaves of its even share goes to the others.
    for done, i in enumerate(sorted(range(len(needs)), key=lambda i: needs[i])):
        found[i] = min(needs[i], left // (len(needs) - done))
        left -= found[i]
    return found


def _dim(text: str) -> Text:
    return Text(text, "dim", no_wrap=True, overflow="ellipsis")


def _above(lines: Sequence[tuple[ShownBlock, Text]], first: int) -> str:
    """Say what the lines before `first` were: whole blocks by their numbers and state."""
    kept = lines[first][0]
    above = [block for block, _ in lines[:first] if block is not kept]
    if not above:
        return f"… {first} lines of block {kept.number} above"
    labels = {block.label for block in above}
    state = labels.pop() if len(labels) == 1 else "done"
    ends = above[0].number, above[-1].number
    return (
        f"block {ends[0]} {state}" if ends[0] == ends[1] else f"blocks {ends[0]}-{ends[1]} {state}"
    )


class ShownProgress:
    """Lines, and in a terminal a bar of what is left; nothing without a console. unit: what is
    counted."""

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
