"""Answers as the `openai` package's types: what clients read.

The types are slow to make and to write, so each is written once, empty, and an answer is a copy
with its own values: it has the fields of the type, in their order.
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
from decode.server.protocol import Wanted
from decode.server.text import TokenLogprob, chat_logprobs, completion_logprobs, prompt_logprobs
from decode.step import Result

Finish = Literal["stop", "length"]


def finish_reason(result: Result) -> Finish:
    """An end id and a stop string are one to OpenAI."""
    return "length" if result.finish_reason == "length" else "stop"


def usage(generation: Generation) -> CompletionUsage:
    """Tokens so far, and what they cost (`d2f`): of several choices the sums, seconds since the
    request came, the seed that those of the choices are made from."""
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
    return CompletionUsage(
        prompt_tokens=generation.prompt_tokens,
        completion_tokens=tokens,
        total_tokens=generation.prompt_tokens + tokens,
        **found,
    )


def as_json(answer: BaseModel) -> dict[str, Any]:
    """What JSON is to have of it."""
    return answer.model_dump(mode="json", exclude_unset=True)


_COMPLETION = as_json(
    Completion.model_construct(id="", object="text_completion", created=0, model="", choices=[])
)
_COMPLETION_CHOICE = as_json(
    CompletionChoice.model_construct(index=0, text="", logprobs=None, finish_reason=None)
)
_CHAT = as_json(ChatCompletion(id="", object="chat.completion", created=0, model="", choices=[]))
_CHAT_CHOICE = as_json(
    ChatChoice(
        index=0,
        message=ChatCompletionMessage(role="assistant", content="", refusal=None),
        logprobs=None,
        finish_reason="stop",
    )
)
_CHAT_CHUNK = as_json(
    ChatCompletionChunk(id="", object="chat.completion.chunk", created=0, model="", choices=[])
)
_CHUNK_CHOICE = as_json(
    ChunkChoice(index=0, delta=ChoiceDelta(), logprobs=None, finish_reason=None)
)


class CompletionAnswers:
    """/v1/completions."""

    prefix = "cmpl"

    def __init__(
        self,
        generation: Generation,
        wanted: Wanted | None,
        echo: Sequence[str | list[int]] | None = None,
    ):
        """wanted: the log-probabilities that were asked for. echo: the prompts, where each answer
        is to begin with its own."""
        self._generation = generation
        self.wanted = wanted
        self._opening: dict[int, str] = {}
        if echo is not None:
            texts = [self._text(prompt) for prompt in echo]
            self._opening = {c.index: texts[c.index // generation.n] for c in generation.choices}

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream, as JSON has it."""
        choices = []
        for choice in self._generation.choices:
            assert choice.result is not None
            text = self._opening.get(choice.index, "") + (choice.result.text or "")
            found = self._of_prompt(choice) + self._of_response(choice)
            choices.append(self._choice(choice, text, finish_reason(choice.result), found))
        return self._answer(choices) | {"usage": as_json(usage(self._generation))}

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk before the first text of a choice, as JSON has it."""
        opening = self._opening.get(choice.index)
        if opening is None:
            return None
        return self._answer([self._choice(choice, opening, None, self._of_prompt(choice))])

    def chunk(self, choice: Choice, text: str) -> dict[str, Any]:
        """The next text of a choice."""
        end = None if choice.result is None else finish_reason(choice.result)
        return self._answer([self._choice(choice, text, end, self._of_response(choice))])

    def last(self) -> dict[str, Any]:
        """The chunk of the usage alone."""
        return self._answer([])

    def _text(self, prompt: str | list[int]) -> str:
        tokenizer: Any = self._generation.served.model.tokenizer
        if isinstance(prompt, str) or tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return str(tokenizer.decode(prompt))

    def _choice(
        self, choice: Choice, text: str, finish: Finish | None, found: list[TokenLogprob]
    ) -> dict[str, Any]:
        tokenizer, logprobs = self._generation.served.model.tokenizer, None
        if self.wanted is not None and tokenizer is not None:
            logprobs = as_json(completion_logprobs(found, tokenizer, top=self.wanted.top))
        return _COMPLETION_CHOICE | {
            "index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish,
        }  # fmt: skip

    def _of_prompt(self, choice: Choice) -> list[TokenLogprob]:
        if self.wanted is None or choice.index not in self._opening:
            return []
        tokenizer = self._generation.served.model.tokenizer
        return prompt_logprobs(tokenizer, choice.prompt, self._generation.likelihoods(choice))

    def _of_response(self, choice: Choice) -> list[TokenLogprob]:
        if self.wanted is None:
            return []
        shift, found = len(self._opening.get(choice.index, "")), choice.new_logprobs()
        if choice.result is not None and choice.result.finish_reason == "end":
            # As OpenAI's and vLLM's. lm-eval asks for a token after the prompt and leaves out the
            # last: where an end id had none, it would leave out one of the prompt.
            found = [*found, choice.end_logprob()]
        return [replace(one, offset=shift + one.offset) for one in found]

    def _answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return _COMPLETION | _whose(self._generation, self.prefix) | {"choices": choices}


class ChatAnswers:
    """/v1/chat/completions."""

    prefix = "chatcmpl"

    def __init__(self, generation: Generation, wanted: Wanted | None):
        """wanted: the log-probabilities that were asked for."""
        self._generation = generation
        self.wanted = wanted

    def whole(self) -> dict[str, Any]:
        """The answer to a request that does not stream, as JSON has it."""
        choices = []
        for choice in self._generation.choices:
            assert choice.result is not None
            own = {
                "index": choice.index,
                "message": _CHAT_CHOICE["message"] | {"content": choice.result.text or ""},
                "logprobs": self._logprobs(choice),
                "finish_reason": finish_reason(choice.result),
            }
            choices.append(_CHAT_CHOICE | own)
        answer = _CHAT | _whose(self._generation, self.prefix) | {"choices": choices}
        return answer | {"usage": as_json(usage(self._generation))}

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk before the first text of a choice, as JSON has it: whose it is."""
        return self._chunk(choice, {"content": "", "role": "assistant"}, None, None)

    def chunk(self, choice: Choice, text: str) -> dict[str, Any]:
        """The next text of a choice."""
        end = None if choice.result is None else finish_reason(choice.result)
        return self._chunk(choice, {"content": text}, end, self._logprobs(choice))

    def last(self) -> dict[str, Any]:
        """The chunk of the usage alone."""
        return self._answer([])

    def _chunk(
        self, choice: Choice, delta: dict[str, str], finish: Finish | None, logprobs: Any
    ) -> dict[str, Any]:
        own = {"delta": delta, "finish_reason": finish, "index": choice.index, "logprobs": logprobs}
        return self._answer([_CHUNK_CHOICE | own])

    def _logprobs(self, choice: Choice) -> Any:
        """As an object of JSON: an answer and a chunk have a type of their own for it."""
        tokenizer = self._generation.served.model.tokenizer
        if self.wanted is None or tokenizer is None:
            return None
        found = chat_logprobs(choice.new_logprobs(), tokenizer, top=self.wanted.top)
        return {"content": [one.model_dump() for one in found], "refusal": None}

    def _answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return _CHAT_CHUNK | _whose(self._generation, self.prefix) | {"choices": choices}


def _whose(generation: Generation, prefix: str) -> dict[str, Any]:
    """The fields that all chunks of an answer have."""
    return {
        "id": f"{prefix}-{generation.id}",
        "created": generation.created,
        "model": generation.served.name,
    }


Answers = CompletionAnswers | ChatAnswers
