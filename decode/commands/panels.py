"""The running requests on a terminal of any size: what is being decoded stays in view, and what
does not fit is said in a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

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
