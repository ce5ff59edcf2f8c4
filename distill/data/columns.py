"""A row of a file or data set as chat messages and a response."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distill.data.data_config import Columns

_MESSAGES = Columns(messages="messages")
_PAIR = Columns(prompt="prompt", response="response")
_LONGEST = 400  # characters of why a row is bad
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxdict = _REPR.maxlist = 3
_REPR.maxlevel = 2
_ROLES = {"human": "user", "gpt": "assistant"}  # as ShareGPT's files call them


class BadRow(Exception):
    """A row that cannot be trained on, and why, in one line that can be printed; who reads the row
    knows where it is."""

    def __init__(self, why: str):
        line = " ".join(why.split())
        super().__init__(line.encode("utf-8", "backslashreplace").decode()[:_LONGEST])


@dataclass(frozen=True)
class Pair:
    """What is asked, as chat messages, and the text that answers it."""

    messages: list[dict[str, str]]
    response: str


def needed(columns: Columns) -> list[str]:
    """The columns that a row must have."""
    names = (columns.prompt, columns.response, columns.messages, columns.system)
    return [name for name in names if name is not None]


def read_pair(row: Any, columns: Columns | None) -> Pair:
    """A row's prompt and response. columns: None takes `messages` where the row has them, else
    `prompt` and `response`. Raises BadRow."""
    if not isinstance(row, Mapping):
        raise BadRow(f"expected an object of prompt and response or of messages, got {_short(row)}")
    layout = columns or (_MESSAGES if row.get("messages") is not None else _PAIR)
    system: list[dict[str, str]] = []
    if layout.system is not None and row.get(layout.system):
        system = [{"role": "system", "content": _text(row, layout.system)}]
    if layout.messages is not None:
        asked, response = _last_turn(row, layout)
        return Pair(system + asked, response)
    assert layout.prompt is not None and layout.response is not None
    lacking = [name for name in (layout.prompt, layout.response) if name not in row]
    if lacking:
        raise BadRow(
            f"expected {layout.prompt} and {layout.response}, got the keys "
            f"{', '.join(map(str, row))[:200] or 'none'}; data.columns names others"
        )
    asked = [{"role": "user", "content": _text(row, layout.prompt)}]
    return Pair(system + asked, _text(row, layout.response))


def _last_turn(row: Mapping[str, Any], layout: Columns) -> tuple[list[dict[str, str]], str]:
    """The turns before the last assistant turn, and that turn; what follows it is not read."""
    turns = row.get(layout.messages or "")
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{layout.messages} must be a list of messages, got {_short(turns)}")
    messages: list[dict[str, str]] = []
    for turn in turns:
        if not isinstance(turn, Mapping) or layout.role not in turn:
            raise BadRow(
                f"a message must have {layout.role} and {layout.content}, got {_short(turn)}"
            )
        role = _text(turn, layout.role)
        messages.append({"role": _ROLES.get(role, role), "content": _text(turn, layout.content)})
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise BadRow(f"{layout.messages} has no assistant turn, which would be the response")
    if answers[-1] == 0:
        raise BadRow(f"{layout.messages} has nothing before the assistant's turn")
    return messages[: answers[-1]], messages[answers[-1]]["content"]


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{name} must be non-empty text, got {_short(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can write it, no tokenizer can read it
        raise BadRow(
            f"{name} must be text, got half a surrogate pair at character {error.start}: "
            f"{_short(value[error.start :])}"
        ) from error
    return value


def _short(value: Any) -> str:
    """A value as an error shows it: what is long or nested is not written out whole."""
    return _REPR.repr(value)
