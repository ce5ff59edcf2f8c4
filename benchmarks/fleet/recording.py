"""What a model's requests do and how long its forwards take, recorded: a small JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from benchmarks.fleet.forward_time import ForwardTime
from d2f.checkpoint import read_object
from d2f.config import Section, explain
from d2f.errors import InputError
from d2f.files import write_beside


class Trace(Section):
    """One request, decoded alone. Its rows and tokens in any batch are the same, whatever runs
    beside it: that is what the engine promises, so a trace is exact under any load."""

    prompt: tuple[int, ...]
    """Token ids."""
    text: str
    """The answer."""
    right: bool
    """Whether it solves the problem."""
    forwards: tuple[tuple[int, int, int], ...] = Field(min_length=1)
    """Of each forward: rows fed, slots cached before, and visible tokens settled after it."""

    @property
    def first(self) -> int:
        """The forward, from 0, after which there is a token to show; the last where none is."""
        shown = (n for n, (_, _, visible) in enumerate(self.forwards) if visible)
        return next(shown, len(self.forwards) - 1)

    @property
    def tokens(self) -> int:
        return self.forwards[-1][2]


class Recording(Section):
    """The requests of one way to decode, and what a forward of it takes."""

    name: str
    """D2F, WeDLM or autoregressive."""
    model: str
    """As it is loaded and served."""
    options: dict[str, Any]
    """The decoder and its options, as a request to the server names them."""
    max_new_tokens: int
    """Longest answer."""
    about: dict[str, Any]
    """Machine, versions, date, task."""
    time: ForwardTime
    """Of a forward."""
    traces: tuple[Trace, ...] = Field(min_length=1)
    """The requests."""

    @property
    def tokens_per_forward(self) -> float:
        """Visible tokens a forward, over all traces."""
        return sum(t.tokens for t in self.traces) / sum(len(t.forwards) for t in self.traces)

    @property
    def summary(self) -> str:
        """It in a line."""
        right = sum(trace.right for trace in self.traces)
        chosen = ", ".join(f"{name} {value}" for name, value in self.options.items())
        about = self.about
        return (
            f"{self.name}: {self.model}, {chosen}; {len(self.traces)} held-out {about['task']} "
            f"problems, {right} right, {self.tokens_per_forward:.2f} tokens a forward; "
            f"{about['device']}, {about['threads']} threads, {about['date']}"
        )

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_beside(path, self.model_dump_json() + "\n")

    @staticmethod
    def load(path: Path) -> Recording:
        """Raises InputError for a file that is none."""
        values = read_object(path)
        try:
            found = Recording.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise InputError(f"{path} is no recording: {explain(error, values)}") from error
        found.time.check(f"{path}: time")
        if any(rows < 1 for trace in found.traces for rows, _, _ in trace.forwards):
            raise InputError(f"{path}: expected at least 1 row in each forward")
        return found
