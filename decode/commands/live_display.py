"""What the command shows while it decodes: the pipeline live, plain lines, or nothing."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from d2f.errors import one_line
from decode.commands.panels import RequestPanel, Running, ShownBlock
from decode.commands.prompt_jobs import PromptJob
from decode.engine.result import Event
from decode.reporting.record import Record, numbers, plain_line, shown_text, verdict

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
