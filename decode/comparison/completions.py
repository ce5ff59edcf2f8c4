"""What is believed of an OpenAI-compatible completion: each field is checked before it is used."""

from __future__ import annotations

import json
from typing import Any

from d2f.errors import one_line
from decode.comparison.answers import Answer
from decode.comparison.http import UnusableError

QUOTED = 300  # characters of an answer that cannot be used
ALLOWED_BYTES = 2**16  # of an answer, and for each token asked for:
ALLOWED_BYTES_A_TOKEN = 2**12  # a streamed one has about 300
# Text that is encoded again may have more tokens than were made, a broken character up to three.
ALLOWED_TOKENS_A_TOKEN = 4


def allowed_bytes(max_new_tokens: int) -> int:
    """The most bytes that an answer of so many tokens may have, streamed or whole."""
    return ALLOWED_BYTES + ALLOWED_BYTES_A_TOKEN * max_new_tokens


def read_whole(data: bytes, answer: Answer) -> None:
    """Fill in the text and count of an answer that came at once. Raises UnusableError."""
    values = _parse(data)
    text, own = _text(_choice(values, data), data), _completion_tokens(values, data)
    if text is None:
        raise UnusableError(f"an answer without text: {quote(data)}")
    _check_unicode(text)
    answer.text, answer.own_tokens = text, own


def read_pieces(pieces: list[tuple[float, bytes]], answer: Answer) -> None:
    """Fill in text, counts and times of a finished stream of server-sent events, given as lines
    with the times at which they came. Raises UnusableError."""
    texts: list[str] = []
    reason, own, done = None, None, False
    prefill = first = last = None
    for arrived, line in pieces:
        if line.startswith(b":"):  # a comment, sent to keep the connection alive
            continue
        if not line.startswith(b"data:"):
            raise UnusableError(f"expected a data line, got {quote(line)}")
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        values = _parse(data)
        found = _completion_tokens(values, data)
        own = own if found is None else found
        if values.get("choices") == []:  # the usage alone
            continue
        choice = _choice(values, data)
        # Even a piece without text says that the prompt has been read.
        prefill = arrived if prefill is None else prefill
        piece = _text(choice, data)
        if piece and first is None:
            first = arrived
        texts += [] if piece is None else [piece]
        reason = choice.get("finish_reason") or reason
        last = arrived
    # A connection that breaks looks like an end: only both together say that all is there.
    if reason is None or not done:
        raise UnusableError(f"the stream was cut short after {len(pieces)} lines")
    if not texts:
        raise UnusableError(f"an answer without text: {quote(pieces[0][1])}")
    text = "".join(texts)
    _check_unicode(text)
    answer.text, answer.own_tokens = text, own
    answer.prefill, answer.finished = prefill, last
    answer.first = first if first is not None else last
    answer.first_tokens = 1


def ignored_limit(answer: Answer, tokens: int, max_new_tokens: int) -> str | None:
    """How an answer shows that the longest answer was ignored, None where it does not. tokens: of
    its text, by the model's own tokenizer."""
    if answer.own_tokens is not None and answer.own_tokens > max_new_tokens:
        return f"ignored max_tokens: says {answer.own_tokens} tokens, asked for {max_new_tokens}"
    if tokens > ALLOWED_TOKENS_A_TOKEN * max_new_tokens:
        return f"ignored max_tokens: sent {tokens} tokens, asked for {max_new_tokens}"
    return None


def quote(data: bytes) -> str:
    """The beginning of what a server sent, in one printable line."""
    return one_line(data[:QUOTED].decode("utf-8", "backslashreplace"))


def parse_json(data: bytes) -> Any:
    """The value. Raises UnusableError."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"malformed JSON: {quote(data)}") from error


def _parse(data: bytes) -> dict[str, Any]:
    values = parse_json(data)
    if not isinstance(values, dict):
        raise UnusableError(f"expected a JSON object, got {quote(data)}")
    if "error" in values:
        raise UnusableError(f"the server says {quote(data)}")
    return values


def _choice(values: dict[str, Any], data: bytes) -> dict[str, Any]:
    choices = values.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise UnusableError(f"expected choices, got {quote(data)}")
    return choices[0]


def _text(choice: dict[str, Any], data: bytes) -> str | None:
    text = choice.get("text")
    if text is not None and not isinstance(text, str):
        raise UnusableError(f"text that is no string: {quote(data)}")
    return text


def _check_unicode(text: str) -> None:
    """Raise UnusableError for half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableError(f"text that is not Unicode: {error.reason}") from error


def _completion_tokens(values: dict[str, Any], data: bytes) -> int | None:
    usage = values.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if count is not None and (type(count) is not int or count < 0):
        raise UnusableError(f"completion_tokens must be a whole number, got {quote(data)}")
    return count
