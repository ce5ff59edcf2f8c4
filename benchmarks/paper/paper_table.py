"""A table of a paper: what was measured how, and the figures published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from d2f.config import Name, Section, Switch, Text, check, read_mapping
from d2f.errors import InputError
from d2f.shipped import DECODING, find_config
from decode.cli import DecoderSettings, split
from decode.decoders import find_decoder

FOLDER = Path(__file__).parent
Figure = Annotated[float, Field(gt=0, le=1e6)]


class Published(Section):
    """What the paper says of one method on one task."""

    tps: Figure
    """Tokens a second, as the paper counts tokens."""
    latency: Figure
    """Seconds a response."""
    length: Figure
    """Tokens a response."""
    score: Annotated[float, Field(ge=0, le=100)]
    """Right responses in percent."""


class Row(Section):
    """One method on one task."""

    config: Text
    """Decoder options by file or name, as of --config."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Over those."""
    paper: Published

    def settings(self, max_new_tokens: int | None, *, end_early: bool) -> DecoderSettings:
        """The decoder. max_new_tokens: at most so many. end_early: whether a response ends with its
        end token; the official codes decode on. Raises InputError."""
        path = find_config(self.config, *DECODING)
        values = read_mapping(path) | self.options | {"early_exit": end_early}
        if max_new_tokens is not None:
            values["max_new_tokens"] = min(max_new_tokens, values["max_new_tokens"])
        name, given = split(values, str(path))
        find_decoder(name)
        return DecoderSettings(name, given)


class PaperTask(Section):
    """A task with a row a method."""

    task: Text
    """Its task file, by path or name."""
    changes: dict[str, Any] = Field(default_factory=dict)
    """Keys of the task file that are other than there."""
    rows: dict[Name, Row]


class Method(Section):
    """A model with a way to decode it."""

    title: Text
    """As in the report."""
    adapter: Switch = False
    """Whether the adapter is on the model."""


class Table(Section):
    """Methods are compared with the first of them."""

    title: Text
    source: Text
    """Paper, table, hardware."""
    notes: tuple[Text, ...] = ()
    """Where what is run here is chosen, or other than there."""
    model: Text
    adapter: Text
    cut_at_end: Switch = False
    """Whether the official evaluation counts no token behind an end token."""
    methods: Annotated[dict[Name, Method], Field(min_length=1)]
    tasks: Annotated[dict[Name, PaperTask], Field(min_length=1)]

    @model_validator(mode="after")
    def _full(self) -> Table:
        for name, task in self.tasks.items():
            if list(task.rows) != list(self.methods):
                raise ValueError(f"tasks.{name}.rows must be those of {', '.join(self.methods)}")
        return self

    def only(self, methods: str | None, tasks: str | None) -> Table:
        """The part of the table that a command line names, with commas. Raises InputError."""
        kept = _named("--methods", methods, list(self.methods))
        chosen = {name: self.tasks[name] for name in _named("--tasks", tasks, list(self.tasks))}
        return self.model_copy(
            update={
                "methods": {name: self.methods[name] for name in kept},
                "tasks": {
                    name: task.model_copy(update={"rows": {k: task.rows[k] for k in kept}})
                    for name, task in chosen.items()
                },
            }
        )


def tables() -> list[str]:
    """The names of the tables."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_table(name: str) -> Table:
    """The table of that name. Raises InputError."""
    if name not in tables():
        raise InputError(f"--table must be one of {', '.join(tables())}, got {name!r}")
    path = FOLDER / f"{name}.yaml"
    return check(Table, read_mapping(path), str(path))


def _named(option: str, text: str | None, known: list[str]) -> list[str]:
    given = known if text is None else text.split(",")
    if not set(given) <= set(known) or len(set(given)) < len(given):
        raise InputError(f"{option} must be some of {', '.join(known)}, each once, got {text!r}")
    return [name for name in known if name in given]
