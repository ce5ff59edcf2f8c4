"""What may be sent of a response while it is decoded: text that is never taken back.

Settled ids (`decode.engine.result.Event`) only grow, but their text may not be sent as it stands.
With the stop string "END"::

    settled    text of all of them    may be sent
    a          "2 "                   "2 "
    a b        "2 �"                   "2 "           b has two of the four bytes of an emoji
    a b c      "2 🙂E"                 "2 🙂"         an END may begin here
    a b c d    "2 🙂Eve"               "2 🙂Eve"

What the text of more ids may still change depends on the tokenizer:

- byte-level, as those of all diffusion families: the text is that of the bytes in a row, so only
  an incomplete last character changes, and what is before a complete one is never looked at again.
- SentencePiece's kinds: the first token loses its space, and a run of byte tokens is text only if
  the whole run is: a run at the end waits. The ids are decoded anew each time.
- any other: nothing is sent before the end.

`tokenizers.decoders.DecodeStream` sends a run of bytes that the next byte may break, loses what is
incomplete at the end and knows no stop strings: its pieces are not always `Result.text`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decode.engine.result import Result

_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Decoders of the library tokenizers whose text of a token depends on those before it at most.
_LOCAL = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
# `clean_up_tokenization` replaces ten patterns of 2 to 4 characters one after the other. Each may
# wait for its length - 1 more characters: more than these at the end it never changes.
_CLEANED = 19


class SettledText:
    """The text of one response, in pieces. `add` gives what became final, `finish` the rest: all
    pieces together are `Result.text`. Of a stop string nothing is in any piece, not even a
    beginning that is completed later, nor of what is at or behind an end id.

    stop, end_ids: those of the request. tokenizer: the model's; None, and all text is empty. sent:
    characters of the pieces so far.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Sequence[str],
        end_ids: Iterable[int],
    ):
        self._growing = growing_text(tokenizer)
        self._stop, self._end_ids = tuple(stop), frozenset(end_ids)
        self._taken = 0  # ids that were looked at
        self._ended = False
        self.sent = 0
        self._unsent = ""  # final too, but a stop string may begin in it

    def add(self, settled: Sequence[int]) -> str:
        """New final text, perhaps none. settled: all ids so far, which begin with those of the
        call before."""
        if self._ended:
            return ""
        new = list(settled[self._taken :])
        self._taken += len(new)
        ends = [i for i, token in enumerate(new) if token in self._end_ids]
        if ends:
            self._ended, new = True, new[: ends[0]]
        # No stop string begins in what was sent: it would have been held back.
        text = self._unsent + self._growing.add(new)
        cut = min((_beginning(text, stop) for stop in self._stop), default=len(text))
        self._unsent = text[cut:]
        self.sent += cut
        return text[:cut]

    def finish(self, result: Result) -> str:
        """What `Result.text` has beyond the pieces so far; of a request that failed, nothing."""
        piece = (result.text or "")[self.sent :]
        self.sent += len(piece)
        return piece


def _beginning(text: str, stop: str) -> int:
    """Where `stop` begins in the text, or may at its end; the text's length where it does not."""
    found = text.find(stop)
    if found >= 0:
        return found
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return len(text) - length
    return len(text)


class GrowingText(Protocol):
    """Text of ids that come bit by bit. whole: whether all of it is final."""

    whole: bool

    def add(self, new: list[int]) -> str:
        """What became final with these."""


class _Bytes:
    """Of a byte-level tokenizer. Ids before the last complete character are done with."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip: bool):
        core: Any = tokenizer
        # What `tokenizer.decode` calls, which takes ten times as long.
        self._decode = core.backend_tokenizer.decode
        self._skip = skip
        self.whole = True
        self._open: list[int] = []  # the last of them may have the beginning of a character
        self._given = 0  # characters of their text that were given out

    def add(self, new: list[int]) -> str:
        self._open += new
        text = str(self._decode(self._open, skip_special_tokens=self._skip))
        # An incomplete character is one U+FFFD, however many of its bytes are there; any before it
        # are of bytes that nothing can mend.
        final = text.removesuffix("\ufffd")
        piece = final[self._given :]
        self._given = len(final)
        self.whole = final == text
        if self.whole:
            self._open, self._given = [], 0
        return piece


class _Whole:
    """Of a SentencePiece tokenizer, or one that cleans its text up."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip: bool):
        self._tokenizer, self._skip = tokenizer, skip
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token for token, what in added if what.special}
        self._cleaned = _CLEANED if _cleans(tokenizer) else 0
        self.whole = True
        self._ids: list[int] = []
        self._given = 0  # characters

    def add(self, new: list[int]) -> str:
        self._ids += new
        end = len(self._ids)
        while end and self._continues(self._ids[end - 1]):
            end -= 1
        text = str(self._tokenizer.decode(self._ids[:end], skip_special_tokens=self._skip))
        final = text.removesuffix("\ufffd")
        final = final[: max(self._given, len(final) - self._cleaned)]
        self.whole = end == len(self._ids) and final == text
        piece, self._given = final[self._given :], len(final)
        return piece

    def _continues(self, token: int) -> bool:
        """Whether the next token may be of the same run of bytes. A special token, which is left
        out, does not end one."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        return token in self._special or bool(_BYTE.fullmatch(str(name)))


class _Held:
    """Of a tokenizer that nothing is known of, or of none."""

    whole = False

    def add(self, new: list[int]) -> str:
        return ""


def growing_text(
    tokenizer: PreTrainedTokenizerBase | None, *, special: bool = False
) -> GrowingText:
    """By the kind of the tokenizer. special: whether special tokens are written out."""
    own = tokenizer is not None and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
    decoder: Any = tokenizer.backend_tokenizer.decoder if tokenizer is not None and own else None
    if tokenizer is None or decoder is None:
        return _Held()
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    if [part["type"] for part in parts] == ["ByteLevel"]:
        kind = _Whole if _cleans(tokenizer) else _Bytes
        return kind(tokenizer, not special)
    return _Whole(tokenizer, not special) if all(map(_is_local, parts)) else _Held()


def _is_local(part: dict[str, Any]) -> bool:
    """Whether what a decoder makes of some tokens stays when more of them come."""
    # A longer pattern than one character may be completed, what is stripped at the end may not be
    # the end.
    pattern = part.get("pattern", {"String": " "}).get("String", "")
    return part["type"] in _LOCAL and len(pattern) == 1 and not part.get("stop", 0)


def _cleans(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
