"""Settle the text of a response while it is decoded: what was sent is never taken back.

Settled ids (`decode.step.Event`) only grow, but their text may not be sent as it stands.
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
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from decode.step import Event, Result, TokenLikelihood

_BYTE = re.compile("<0x[0-9A-F]{2}>")
# The byte that each letter of a byte-level token's name stands for.
_BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}
# Decoders of the library tokenizers whose text of a token depends on those before it at most.
_LOCAL = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
# `clean_up_tokenization` replaces ten patterns of 2 to 4 characters one after the other. Each may
# wait for its length - 1 more characters: more than these at the end it never changes.
_CLEANED = 19
LEAST = -9999.0  # OpenAI's for a probability of 0; JSON has no infinity


@dataclass(frozen=True)
class TokenLogprob:
    """Keep the log-probability of one token of a text."""

    token: int
    logprob: float | None  # None for the first token of a prompt, which nothing predicts
    offset: int  # where its characters begin in the text
    top: tuple[int, float] | None = None  # the likeliest token in its place, where it is known


class ResponseText:
    """Settle the text of one response in pieces: together they are `Result.text`. No piece has any
    part of a stop string, not even a beginning that is completed later, nor of what is at or behind
    an end id.

    With `logprobs`, `new_logprobs` gives the tokens that go with the pieces. A token's logprob is
    the logarithm of its probability under the full softmax, without temperature, top_k and top_p,
    in the forward that decided it (last, where a decoder took it back). Nothing is kept of the
    tokens that lost.

    tokenizer: the model's; None where only tokens are counted, and no text before the end.
    stop, end_ids: those of the request.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Sequence[str] = (),
        end_ids: Iterable[int] = (),
        *,
        logprobs: bool = False,
    ):
        self._growing = GrowingText(tokenizer)
        self._stop, self._end_ids = tuple(stop), frozenset(end_ids)
        self._logprobs = logprobs
        self.settled = 0  # tokens that are final, up to an end token
        self.end: TokenLogprob | None = None  # of the end id, once it is settled
        self._ended = False
        self._length = 0  # characters that are final
        self._sent = 0  # of them
        self._unsent = ""  # the others: a stop string may begin in them
        self._confidence: dict[int, float] = {}  # by position, of what was decided last
        self._tokens: list[TokenLogprob] = []
        self._ends: list[int] = []  # characters up to each token, where they are whole; else -1
        self._given = 0  # of the tokens
        self._result: Result | None = None

    def take(self, event: Event) -> str:
        """Return the text that an event made final, perhaps none."""
        new = [] if self._ended else list(event.settled[self.settled :])
        ends = next((i for i, token in enumerate(new) if token in self._end_ids), len(new))
        new, end = new[:ends], new[ends : ends + 1]
        if self._logprobs:
            self._confidence |= {one.position: one.confidence for one in event.revealed}
        # Token by token where it matters which characters are whose.
        for part in [[token] for token in new] if self._logprobs else [new]:
            if self._logprobs:
                self._tokens.append(self._logprob(part[0]))
            self.settled += len(part)
            text = self._growing.add(part)
            self._unsent += text
            self._length += len(text)
            self._ends.append(self._length if self._growing.whole else -1)
        if end:
            self._ended = True
            self.end = self._logprob(end[0]) if self._logprobs else None
        if event.result is not None:
            self._result = event.result
            return (event.result.text or "")[self._sent :]
        # No stop string begins in what was sent: it would have been held back.
        cut = min((_beginning(self._unsent, stop) for stop in self._stop), default=None)
        piece = self._unsent[:cut]
        self._unsent = self._unsent[len(piece) :]
        self._sent += len(piece)
        return piece

    def _logprob(self, token: int) -> TokenLogprob:
        """Look up the next token to settle."""
        confidence = self._confidence[self.settled]
        logprob = math.log(confidence) if confidence > 0 else LEAST
        return TokenLogprob(token, logprob, self._length)

    def new_logprobs(self) -> list[TokenLogprob]:
        """Return the log-probabilities of the text since the last call; at the end, of all that is
        left. Before it a token waits until its whole text was sent: no stop string hides it."""
        first = self._given
        if self._result is not None:
            self._given = len(self._result.tokens)
        else:
            sent = [i for i in range(first, len(self._ends)) if 0 <= self._ends[i] <= self._sent]
            self._given = max(sent, default=first - 1) + 1
        return self._tokens[first : self._given]


def _beginning(text: str, stop: str) -> int:
    """Find where `stop` begins in the text, or may at its end; otherwise the text's length."""
    found = text.find(stop)
    if found >= 0:
        return found
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return len(text) - length
    return len(text)


class GrowingText:
    """Decode ids that come bit by bit, and give out text once it is final. Of a tokenizer whose
    decoder is not known all text is held back.

    special: write special tokens out.
    whole: all of the text is final.
    """

    whole = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, special: bool = False):
        self._tokenizer: Any = tokenizer
        self._skip = not special
        kind = _kind_of(tokenizer)
        bytes_alone, self._is_known = kind == "bytes", kind != ""
        cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._cleaned = _CLEANED if cleans else 0
        self._forgets = bytes_alone and not cleans
        self._has_runs = not bytes_alone
        # A special token, which is left out, does not end a run of bytes.
        added = {} if bytes_alone else getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {token for token, what in added.items() if what.special}
        self._ids: list[int] = []
        self._given = 0  # characters of their text that were given out

    def add(self, new: list[int]) -> str:
        """Return the text that became final with these ids."""
        if not self._is_known:
            return ""
        self._ids += new
        end = len(self._ids)
        while end and self._has_runs and self._may_go_on(self._ids[end - 1]):
            end -= 1
        # The core is called by `tokenizer.decode`, which takes ten times as long.
        core = self._tokenizer.backend_tokenizer if self._forgets else self._tokenizer
        text = core.decode(self._ids[:end], skip_special_tokens=self._skip)
        # An incomplete character is one U+FFFD, however many of its bytes are there; any before it
        # are of bytes that nothing can mend.
        final = text.removesuffix("\ufffd")
        final = final[: max(self._given, len(final) - self._cleaned)]
        piece, self._given = final[self._given :], len(final)
        self.whole = end == len(self._ids) and final == text
        if self.whole and self._forgets:
            self._ids, self._given = [], 0
        return piece

    def _may_go_on(self, token: int) -> bool:
        """Tell whether the next token may be of the same run of bytes."""
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        return token in self._special or bool(_BYTE.fullmatch(name))


def _kind_of(tokenizer: Any) -> Literal["bytes", "runs", ""]:
    """Tell how a tokenizer's text grows: by bytes in a row, by tokens and runs of byte tokens, or
    in a way that is not known, as where its decoder is not the library's."""
    if tokenizer is None or type(tokenizer)._decode is not PreTrainedTokenizerFast._decode:
        return ""
    decoder = tokenizer.backend_tokenizer.decoder
    state: Any = {"type": ""} if decoder is None else json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return "bytes"

    def is_local(part: dict[str, Any]) -> bool:
        """Tell whether what it makes of some tokens stays when more of them come."""
        # A longer pattern than one character may be completed, what is stripped at the end may not
        # be the end.
        pattern = part.get("pattern", {"String": " "}).get("String", "")
        return part["type"] in _LOCAL and len(pattern) == 1 and not part.get("stop", 0)

    return "runs" if parts and all(map(is_local, parts)) else ""


def prompt_logprobs(
    tokenizer: PreTrainedTokenizerBase | None,
    ids: Sequence[int],
    likelihoods: Iterable[TokenLikelihood],
) -> list[TokenLogprob]:
    """List the tokens of a prompt. Offsets are in its text with special tokens."""
    known = {one.position: one for one in likelihoods}
    growing, offset, found = GrowingText(tokenizer, special=True), 0, []
    for position, token in enumerate(ids):
        one = TokenLogprob(token, None, offset)
        if position in known:
            its = known[position]
            top = its.top, max(its.top_logprob, LEAST)
            one = replace(one, logprob=max(its.logprob, LEAST), top=top)
        found.append(one)
        offset += len(growing.add([token]))
    return found


def completion_logprobs(
    found: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase, *, top: bool
) -> dict[str, Any]:
    """Write the `logprobs` of a choice of /v1/completions. top: list the likeliest token, too;
    where it is not known, the chosen one."""
    names = [token_name(tokenizer, one.token) for one in found]
    tops: list[dict[str, float] | None] = []
    for one, name in zip(found, names, strict=True):
        listed = None if one.logprob is None else {name: one.logprob}
        if listed is not None and one.top is not None:
            likeliest, logprob = token_name(tokenizer, one.top[0]), one.top[1]
            # Two tokens may have one name: the likelier counts.
            listed[likeliest] = max(logprob, listed.get(likeliest, logprob))
        tops.append(listed)
    return {
        "text_offset": [one.offset for one in found],
        "token_logprobs": [one.logprob for one in found],
        "tokens": names,
        "top_logprobs": tops if top else None,
    }


def chat_logprobs(
    found: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase, *, top: bool
) -> list[dict[str, Any]]:
    """Write the `logprobs.content` of a choice of /v1/chat/completions."""
    content = []
    for one in found:
        name, raw = token_name(tokenizer, one.token), list(token_bytes(tokenizer, one.token))
        chosen = {"token": name, "bytes": raw, "logprob": one.logprob}
        content.append(chosen | {"top_logprobs": [chosen] if top else []})
    return content


def token_name(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return a token's text; its bytes where it is only a part of a character, as OpenAI does:
    ``bytes:\\xf0\\x9f``."""
    raw = token_bytes(tokenizer, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return the bytes that a token writes, those of special tokens too."""
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode()
    name = str(tokenizer.convert_ids_to_tokens(token))
    if _BYTE.fullmatch(name):
        return bytes([int(name[1:-1], 16)])
    if all(letter in _BYTE_OF for letter in name):
        return bytes(_BYTE_OF[letter] for letter in name)
    return text.encode()
