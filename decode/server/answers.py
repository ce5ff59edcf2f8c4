"""Answers with the fields of the `openai` package's types.

Those types are slow to make and to write, so each is written once, empty, and an answer is a copy
with its own values: it has the type's fields in the type's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice as ChatChoice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from pydantic import BaseModel

from decode.server.generation import Choice, Generation
from decode.server.text import TokenLogprob, chat_logprobs, completion_logprobs, prompt_logprobs

Finish = Literal["stop", "length"]
Json = dict[str, Any]


def usage(generation: Generation) -> Json:
    """Count the tokens so far and, under `d2f`, their cost: sums over the choices, seconds since
    the request came, and the seed that those of the choices are made from."""
    tokens, calls = generation.tokens, generation.calls
    results = [choice.result for choice in generation.choices if choice.result is not None]
    decoder = generation.decoder
    cost = {
        "decoder": decoder.name,
        "forwards": len(calls),
        "tokens_per_forward": round(tokens / len(calls), 4) if calls else 0.0,
        "rows": sum(fed for fed, _ in calls),
        "reused_rows": sum(result.reused_rows for result in results),
        "seconds": round(generation.seconds, 6),
        "seed": None if decoder.sampling.greedy else decoder.seed,
    }
    found: Any = {"d2f": cost}  # a field of ours: the type takes any
    prompt = generation.prompt_tokens
    return _written(
        CompletionUsage(
            completion_tokens=tokens, prompt_tokens=prompt, total_tokens=prompt + tokens, **found
        )
    )


def _written(answer: BaseModel) -> Json:
    return answer.model_dump(mode="json", exclude_unset=True)


_COMPLETION = _written(
    Completion.model_construct(id="", object="text_completion", created=0, model="", choices=[])
)
_COMPLETION_CHOICE = _written(
    CompletionChoice.model_construct(index=0, text="", logprobs=None, finish_reason=None)
)
_CHAT = _written(ChatCompletion(id="", object="chat.completion", created=0, model="", choices=[]))
_MESSAGE = ChatCompletionMessage(role="assistant", content="", refusal=None)
_CHAT_CHOICE = _written(ChatChoice(index=0, message=_MESSAGE, logprobs=None, finish_reason="stop"))
_CHAT_CHUNK = _written(
    ChatCompletionChunk(id="", object="chat.completion.chunk", created=0, model="", choices=[])
)
_CHUNK_CHOICE = _written(
    ChunkChoice(index=0, delta=ChoiceDelta(), logprobs=None, finish_reason=None)
)


class Answers:
    """The answers to one request: whole, or in chunks.

    tops: likeliest tokens to list beside each log-probability; None for no log-probabilities.
    """

    prefix: str  # of the id
    kind: Json
    choice_kind: Json
    chunk_kind: Json
    chunk_choice_kind: Json

    def __init__(self, generation: Generation, tops: int | None):
        self._generation = generation
        self._tokenizer: Any = generation.served.model.tokenizer
        # A model without a tokenizer has no names for tokens.
        self._tops = None if self._tokenizer is None else tops

    def whole(self) -> Json:
        """Build the answer to a request that does not stream."""
        choices = []
        for choice in self._generation.choices:
            assert choice.result is not None
            content = self._content(choice, choice.result.text or "", whole=True)
            choices.append(self.choice_kind | content | self._about(choice))
        return self._answer(self.kind, choices) | {"usage": usage(self._generation)}

    def first(self, choice: Choice) -> Json | None:
        """Build the chunk before the first text of a choice; None where there is none."""
        opening = self._opening(choice)
        if opening is None:
            return None
        own = self.chunk_choice_kind | opening | {"index": choice.index}
        return self._answer(self.chunk_kind, [own])

    def chunk(self, choice: Choice, text: str) -> Json:
        """Build the chunk of a choice's next text."""
        content = self._content(choice, text, whole=False)
        own = self.chunk_choice_kind | content | self._about(choice)
        return self._answer(self.chunk_kind, [own])

    def last(self) -> Json:
        """Build the chunk that has the usage alone."""
        return self._answer(self.chunk_kind, [])

    def _opening(self, choice: Choice) -> Json | None:
        raise NotImplementedError

    def _content(self, choice: Choice, text: str, *, whole: bool) -> Json:
        """Build the fields of a text and of the log-probabilities that go with it."""
        raise NotImplementedError

    def _about(self, choice: Choice) -> Json:
        return {"index": choice.index, "finish_reason": finish_reason(choice)}

    def _answer(self, kind: Json, choices: list[Json]) -> Json:
        own = self._generation
        return kind | {
            "id": f"{self.prefix}-{own.id}",
            "created": own.created,
            "model": own.served.name,
            "choices": choices,
        }


class ChatAnswers(Answers):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl"
    kind, choice_kind = _CHAT, _CHAT_CHOICE
    chunk_kind, chunk_choice_kind = _CHAT_CHUNK, _CHUNK_CHOICE

    def _opening(self, choice: Choice) -> Json:
        return {"delta": {"content": "", "role": "assistant"}}

    def _content(self, choice: Choice, text: str, *, whole: bool) -> Json:
        logprobs = None
        if self._tops is not None:
            found = chat_logprobs(choice.new_logprobs(), self._tokenizer, top=self._tops > 0)
            logprobs = {"content": found, "refusal": None}
        own = _CHAT_CHOICE["message"] | {"content": text} if whole else {"content": text}
        return {"message" if whole else "delta": own, "logprobs": logprobs}


class CompletionAnswers(Answers):
    """Answers of /v1/completions. echo: the prompts, where each answer begins with its own."""

    prefix = "cmpl"
    kind = chunk_kind = _COMPLETION
    choice_kind = chunk_choice_kind = _COMPLETION_CHOICE

    def __init__(
        self,
        generation: Generation,
        tops: int | None,
        echo: Sequence[str | list[int]] | None = None,
    ):
        super().__init__(generation, tops)
        self._echo = None if echo is None else [self._text(prompt) for prompt in echo]

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return "" if self._tokenizer is None else str(self._tokenizer.decode(prompt))

    def _prompt(self, choice: Choice) -> str:
        """Return the text that an answer begins with."""
        return "" if self._echo is None else self._echo[choice.index // self._generation.n]

    def _opening(self, choice: Choice) -> Json | None:
        if self._echo is None:
            return None
        return {"text": self._prompt(choice), "logprobs": self._logprobs(self._of_prompt(choice))}

    def _content(self, choice: Choice, text: str, *, whole: bool) -> Json:
        found = self._of_response(choice)
        if whole:
            text, found = self._prompt(choice) + text, self._of_prompt(choice) + found
        return {"text": text, "logprobs": self._logprobs(found)}

    def _logprobs(self, found: list[TokenLogprob]) -> Json | None:
        if self._tops is None:
            return None
        return completion_logprobs(found, self._tokenizer, top=self._tops > 0)

    def _of_prompt(self, choice: Choice) -> list[TokenLogprob]:
        if self._tops is None or self._echo is None:
            return []
        likelihoods = self._generation.likelihoods(choice)
        return prompt_logprobs(self._tokenizer, choice.prompt, likelihoods)

    def _of_response(self, choice: Choice) -> list[TokenLogprob]:
        if self._tops is None:
            return []
        found = choice.new_logprobs()
        if choice.result is not None and choice.result.finish_reason == "end":
            # As OpenAI and vLLM do. lm-eval asks for a token after the prompt and leaves out the
            # last: without an entry for the end token, it would leave out one of the prompt.
            assert choice.logprobs is not None and choice.logprobs.end is not None
            found = [*found, choice.logprobs.end]
        shift = len(self._prompt(choice))
        return [replace(one, offset=shift + one.offset) for one in found]


def finish_reason(choice: Choice) -> Finish | None:
    """Return OpenAI's word; an end token and a stop string are one to it."""
    if choice.result is None:
        return None
    return "length" if choice.result.finish_reason == "length" else "stop"
