"""Log-probabilities of a response's tokens, in OpenAI's formats.

Of a token that was decoded it is the logarithm of its confidence: its probability under the full
softmax, without temperature, top_k and top_p, in the forward that decided it. Where a decoder took
a token back, the forward that decided it last. Nothing is kept of the tokens that lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs
from transformers import PreTrainedTokenizerBase

from decode.engine.result import Event, Result, TokenLikelihood
from decode.server.settled_text import growing_text

LEAST = -9999.0  # OpenAI's for a probability of 0; JSON has no infinity


@dataclass(frozen=True)
class TokenLogprob:
    """A token of a text. logprob: None of the first of a prompt, which nothing predicts. offset:
    where its characters begin in the text. top: the likeliest token in its place, and its
    log-probability; None where that is not known."""

    token: int
    logprob: float | None
    offset: int
    top: tuple[int, float] | None = None


class ResponseLogprobs:
    """The tokens of one response with their log-probabilities, in pieces beside those of
    `decode.server.settled_text.SettledText`: `take` each event, then ask for what goes with the
    text that was sent. All pieces together are of `Result.tokens`; end: of the end id after them,
    once it is settled."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, end_ids: Iterable[int]):
        self._end_ids = frozenset(end_ids)
        self._growing = growing_text(tokenizer)
        self._confidence: dict[int, float] = {}  # by position, of what was decided last
        self._found: list[TokenLogprob] = []
        self._whole: list[int] = []  # characters up to each token, where they are whole; else -1
        self._length = self._sent = 0  # characters that are final, tokens that were sent
        self.end: TokenLogprob | None = None

    def take(self, event: Event) -> None:
        """Note what a forward decided and settled."""
        for one in event.revealed:
            self._confidence[one.position] = one.confidence
        for position in range(len(self._found), len(event.settled)):
            token = event.settled[position]
            found = TokenLogprob(token, log(self._confidence[position]), self._length)
            if token in self._end_ids:
                self.end = found
                return
            self._found.append(found)
            self._length += len(self._growing.add([token]))
            self._whole.append(self._length if self._growing.whole else -1)

    def within(self, sent: int) -> list[TokenLogprob]:
        """New tokens whose text lies in the first `sent` characters: no stop string hides them."""
        end = self._sent
        for i in range(self._sent, len(self._found)):
            if 0 <= self._whole[i] <= sent:
                end = i + 1
        return self._until(end)

    def finish(self, result: Result) -> list[TokenLogprob]:
        """The rest of them."""
        return self._until(len(result.tokens))

    def _until(self, end: int) -> list[TokenLogprob]:
        first, self._sent = self._sent, end
        return self._found[first:end]


def log(probability: float) -> float:
    """Its natural logarithm, `LEAST` for 0."""
    return math.log(probability) if probability > 0 else LEAST


def prompt_logprobs(
    tokenizer: PreTrainedTokenizerBase | None,
    ids: Sequence[int],
    likelihoods: Iterable[TokenLikelihood],
) -> list[TokenLogprob]:
    """All tokens of a prompt. Offsets are in its text with special tokens."""
    known = {one.position: one for one in likelihoods}
    growing, offset, found = growing_text(tokenizer, special=True), 0, []
    for position, token in enumerate(ids):
        one = known.get(position)
        if one is None:
            found.append(TokenLogprob(token, None, offset))
        else:
            top = one.top, max(one.top_logprob, LEAST)
            found.append(TokenLogprob(token, max(one.logprob, LEAST), offset, top))
        offset += len(growing.add([token]))
    return found


def completion_logprobs(
    found: Sequence[TokenLogprob],
    tokenizer: PreTrainedTokenizerBase,
    *,
    top: bool,
) -> Logprobs:
    """Those of /v1/completions. top: whether the likeliest token is listed too; where it is not
    known, the one that was chosen."""
    names = [token_name(tokenizer, one.token) for one in found]
    tops = None
    if top:
        tops = [_tops(tokenizer, one, name) for one, name in zip(found, names, strict=True)]
    # The types know no None within these lists, which is what OpenAI sends of a first token.
    return Logprobs.model_construct(
        tokens=names,
        token_logprobs=[one.logprob for one in found],
        top_logprobs=tops,
        text_offset=[one.offset for one in found],
    )


def _tops(
    tokenizer: PreTrainedTokenizerBase, one: TokenLogprob, name: str
) -> dict[str, float] | None:
    if one.logprob is None:
        return None
    listed = {name: one.logprob}
    if one.top is not None:
        token, logprob = one.top
        other = token_name(tokenizer, token)
        # Two tokens may have one name: the likelier counts, as the list is of the likeliest.
        listed[other] = max(logprob, listed.get(other, logprob))
    return listed


def chat_logprobs(
    found: Sequence[TokenLogprob], tokenizer: PreTrainedTokenizerBase, *, top: bool
) -> list[ChatCompletionTokenLogprob]:
    """Those of /v1/chat/completions, as `content` of a choice's logprobs."""
    content = []
    for one in found:
        assert one.logprob is not None  # a response has something before it
        name, raw = token_name(tokenizer, one.token), list(token_bytes(tokenizer, one.token))
        chosen = TopLogprob(token=name, bytes=raw, logprob=one.logprob)
        content.append(
            ChatCompletionTokenLogprob(
                token=name, bytes=raw, logprob=one.logprob, top_logprobs=[chosen] if top else []
            )
        )
    return content


def token_name(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token's text; of one that is only a part of a character its bytes, as OpenAI writes them:
    ``bytes:\\xf0\\x9f``."""
    raw = token_bytes(tokenizer, token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """What a token writes, special ones too."""
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode()
    name = str(tokenizer.convert_ids_to_tokens(token))
    if name.startswith("<0x"):
        return bytes([int(name[1:-1], 16)])
    if all(letter in _BYTE_OF for letter in name):
        return bytes(_BYTE_OF[letter] for letter in name)
    return text.encode()


def _byte_of() -> dict[str, int]:
    """The byte that each letter of a byte-level token's name stands for: printable ones, of
    Latin-1, for themselves, the others in turn for the letters from 256 on (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_of()
