"""Answers as the `openai` package's types: what clients read."""

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

from decode.engine.result import Result
from decode.server.fields import Wanted
from decode.server.generation import Choice, Generation
from decode.server.logprobs import (
    TokenLogprob,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

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
        self._wanted = wanted
        self._frames: dict[int, dict[str, Any]] = {}  # by choice, chunks without their text
        self._opening: dict[int, str] = {}
        if echo is not None:
            texts = [self._text(prompt) for prompt in echo]
            self._opening = {c.index: texts[c.index // generation.n] for c in generation.choices}

    def whole(self) -> Completion:
        """The answer to a request that does not stream."""
        choices = []
        for choice in self._generation.choices:
            assert choice.result is not None
            text = self._opening.get(choice.index, "") + (choice.result.text or "")
            found = self._of_prompt(choice) + self._of_response(choice)
            choices.append(self._choice(choice, text, finish_reason(choice.result), found))
        return self._answer(choices, usage=usage(self._generation))

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk before the first text of a choice, as JSON has it."""
        opening = self._opening.get(choice.index)
        if opening is None:
            return None
        return as_json(self._answer([self._choice(choice, opening, None, self._of_prompt(choice))]))

    def chunk(self, choice: Choice, text: str) -> dict[str, Any]:
        """The next text of a choice."""
        if choice.result is not None or self._wanted is not None:
            end = None if choice.result is None else finish_reason(choice.result)
            return as_json(
                self._answer([self._choice(choice, text, end, self._of_response(choice))])
            )
        # Most chunks differ in their text alone, and types are slow to make and to write.
        if choice.index not in self._frames:
            self._frames[choice.index] = as_json(self._answer([self._choice(choice, "", None, [])]))
        frame = self._frames[choice.index]
        return frame | {"choices": [frame["choices"][0] | {"text": text}]}

    def last(self) -> dict[str, Any]:
        """The chunk of the usage alone."""
        return as_json(self._answer([]))

    def _text(self, prompt: str | list[int]) -> str:
        tokenizer: Any = self._generation.served.model.tokenizer
        if isinstance(prompt, str) or tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return str(tokenizer.decode(prompt))

    def _choice(
        self, choice: Choice, text: str, finish: Finish | None, found: list[TokenLogprob]
    ) -> CompletionChoice:
        tokenizer, logprobs = self._generation.served.model.tokenizer, None
        if self._wanted is not None and tokenizer is not None:
            logprobs = completion_logprobs(found, tokenizer, top=self._wanted.top)
        return CompletionChoice.model_construct(
            index=choice.index, text=text, logprobs=logprobs, finish_reason=finish
        )

    def _of_prompt(self, choice: Choice) -> list[TokenLogprob]:
        if self._wanted is None or choice.index not in self._opening:
            return []
        tokenizer = self._generation.served.model.tokenizer
        return prompt_logprobs(tokenizer, choice.prompt, self._generation.likelihoods(choice))

    def _of_response(self, choice: Choice) -> list[TokenLogprob]:
        if self._wanted is None:
            return []
        shift, found = len(self._opening.get(choice.index, "")), choice.new_logprobs()
        if choice.result is not None and choice.result.finish_reason == "end":
            # As OpenAI's and vLLM's. lm-eval asks for a token after the prompt and leaves out the
            # last: where an end id had none, it would leave out one of the prompt.
            found = [*found, choice.end_logprob()]
        return [replace(one, offset=shift + one.offset) for one in found]

    def _answer(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        return Completion.model_construct(
            id=f"{self.prefix}-{self._generation.id}",
            object="text_completion",
            created=self._generation.created,
            model=self._generation.served.name,
            choices=choices,
            **more,
        )


class ChatAnswers:
    """/v1/chat/completions."""

    prefix = "chatcmpl"

    def __init__(self, generation: Generation, wanted: Wanted | None):
        """wanted: the log-probabilities that were asked for."""
        self._generation = generation
        self._wanted = wanted
        self._frames: dict[int, dict[str, Any]] = {}  # by choice, chunks without their text

    def whole(self) -> ChatCompletion:
        """The answer to a request that does not stream."""
        choices = []
        for choice in self._generation.choices:
            assert choice.result is not None
            message = ChatCompletionMessage(
                role="assistant", content=choice.result.text or "", refusal=None
            )
            choices.append(
                ChatChoice(
                    index=choice.index,
                    message=message,
                    logprobs=self._logprobs(choice),
                    finish_reason=finish_reason(choice.result),
                )
            )
        return ChatCompletion(
            **self._common(), object="chat.completion", choices=choices,
            usage=usage(self._generation),
        )  # fmt: skip

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk before the first text of a choice, as JSON has it: whose it is."""
        return as_json(self._chunk(choice, ChoiceDelta(role="assistant", content=""), None))

    def chunk(self, choice: Choice, text: str) -> dict[str, Any]:
        """The next text of a choice."""
        if choice.result is not None or self._wanted is not None:
            end = None if choice.result is None else finish_reason(choice.result)
            return as_json(self._chunk(choice, ChoiceDelta(content=text), end))
        if choice.index not in self._frames:  # as of completions
            empty = self._chunk(choice, ChoiceDelta(content=""), None)
            self._frames[choice.index] = as_json(empty)
        frame = self._frames[choice.index]
        one = frame["choices"][0]
        return frame | {"choices": [one | {"delta": one["delta"] | {"content": text}}]}

    def last(self) -> dict[str, Any]:
        """The chunk of the usage alone."""
        return as_json(self._answer([]))

    def _chunk(
        self, choice: Choice, delta: ChoiceDelta, finish: Finish | None
    ) -> ChatCompletionChunk:
        found = self._logprobs(choice) if delta.role is None else None
        one = ChunkChoice(index=choice.index, delta=delta, logprobs=found, finish_reason=finish)
        return self._answer([one])

    def _logprobs(self, choice: Choice) -> Any:
        """As an object of JSON: an answer and a chunk have a type of their own for it."""
        tokenizer = self._generation.served.model.tokenizer
        if self._wanted is None or tokenizer is None:
            return None
        found = chat_logprobs(choice.new_logprobs(), tokenizer, top=self._wanted.top)
        return {"content": [one.model_dump() for one in found], "refusal": None}

    def _answer(self, choices: list[ChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            **self._common(), object="chat.completion.chunk", choices=choices
        )

    def _common(self) -> dict[str, Any]:
        generation = self._generation
        return {
            "id": f"{self.prefix}-{generation.id}",
            "created": generation.created,
            "model": generation.served.name,
        }


Answers = CompletionAnswers | ChatAnswers
