"""A record of a file or data set as chat messages and a response."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from d2f.data_records import BadRecord
from distill.data.data_config import Columns

_MESSAGES = Columns(messages="messages")
_PAIR = Columns(prompt="prompt", response="response")
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxdict = _REPR.maxlist = 3
_REPR.maxlevel = 2
_ROLES = {"human": "user", "gpt": "assistant"}  # as ShareGPT's files call them


@dataclass(frozen=True)
class Pair:
    """What is asked, as chat messages, and the text that answers it."""

    messages: list[dict[str, str]]
    response: str


def needed(columns: Columns) -> list[str]:
    """The columns that a record must have."""
    names = (columns.prompt, columns.response, columns.messages, columns.system)
    return [name for name in names if name is not None]


def read_pair(record: Any, columns: Columns | None) -> Pair:
    """A record's prompt and response. columns: None takes `messages` where the record has them,
    else `prompt` and `response`. Raises BadRecord."""
    if not isinstance(record, Mapping):
        raise BadRecord(
            f"expected an object of prompt and response or of messages, got {_short(record)}"
        )
    layout = columns or (_MESSAGES if record.get("messages") is not None else _PAIR)
    system: list[dict[str, str]] = []
    if layout.system is not None and record.get(layout.system):
        system = [{"role": "system", "content": _text(record, layout.system)}]
    if layout.messages is not None:
        asked, response = _last_turn(record, layout)
        return Pair(system + asked, response)
    assert layout.prompt is not None and layout.response is not None
    lacking = [name for name in (layout.prompt, layout.response) if name not in record]
    if lacking:
        raise BadRecord(
            f"expected {layout.prompt} and {layout.response}, got the keys "
            f"{', '.join(map(str, record))[:200] or 'none'}; data.columns names others"
        )
    asked = [{"role": "user", "content": _text(record, layout.prompt)}]
    return Pair(system + asked, _text(record, layout.response))


def _last_turn(record: Mapping[str, Any], layout: Columns) -> tuple[list[dict[str, str]], str]:
    """The turns before the last assistant turn, and that turn; what follows it is not read."""
    turns = record.get(layout.messages or "")
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{layout.messages} must be a list of messages, got {_short(turns)}")
    messages: list[dict[str, str]] = []
    for turn in turns:
        if not isinstance(turn, Mapping) or layout.role not in turn:
            raise BadRecord(
                f"a message must have {layout.role} and {layout.content}, got {_short(turn)}"
            )
        role = _text(turn, layout.role)
        # A template knows user and assistant; what it does with any other role is for it to say.
        messages.append({"role": _ROLES.get(role, role), "content": _text(turn, layout.content)})
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise BadRecord(f"{layout.messages} has no assistant turn, which would be the response")
    if answers[-1] == 0:
        raise BadRecord(f"{layout.messages} has nothing before the assistant's turn")
    return messages[: answers[-1]], messages[answers[-1]]["content"]


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadRecord(f"{name} must be non-empty text, got {_short(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can write it, no tokenizer can read it
        raise BadRecord(
            f"{name} must be text, got half a surrogate pair at character {error.start}: "
            f"{_short(value[error.start :])}"
        ) from error
    return value


def _short(value: Any) -> str:
    """A value as an error shows it: what is long or nested is not written out whole."""
    return _REPR.repr(value)
