"""Write answers as the `openai` package's types do: their fields, in their order.

The types themselves are slow to make and to write, so answers are plain dicts, and a test compares
them with the types to the byte.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from decode.report import empty_notice
from decode.server.generation import Choice, Generation
from decode.server.protocol import AnyRequest, CompletionRequest
from decode.server.text import TokenLogprob, chat_logprobs, completion_logprobs, prompt_logprobs

Json = dict[str, Any]


def usage(generation: Generation) -> Json:
    """Count the tokens so far and, under `d2f`, their cost: sums over the choices, seconds since
    the request came, the seed that those of the choices are made from, and why choices may be empty
    where some are."""
    tokens, calls, decoder = generation.tokens, generation.calls, generation.decoder
    results = [choice.result for choice in generation.choices if choice.result is not None]
    empty = [result for result in results if result.raw_tokens and not result.tokens]
    longest = max((len(result.raw_tokens) for result in empty), default=0)
    return {
        "completion_tokens": tokens,
        "prompt_tokens": generation.prompt_tokens,
        "total_tokens": generation.prompt_tokens + tokens,
        "d2f": {
            "decoder": decoder.name,
            "forwards": len(calls),
            "tokens_per_forward": round(tokens / len(calls), 4) if calls else 0.0,
            "rows": sum(fed for fed, _ in calls),
            "reused_rows": sum(result.reused_rows for result in results),
            "seconds": round(generation.seconds, 6),
            "seed": None if decoder.greedy else decoder.seed,
            "notice": empty_notice(generation.served.model, len(empty), longest),
        },
    }


class Answers:
    """Write the answers to one request: whole, or in chunks."""

    prefix: str  # of the id
    kind: str
    chunk_kind: str

    def __init__(self, generation: Generation, request: AnyRequest):
        self._generation = generation
        self.request = request
        self._tokenizer: Any = generation.served.model.tokenizer
        # A model without a tokenizer has no names for tokens.
        self._tops = None if self._tokenizer is None else request.tops

    def whole(self) -> Json:
        """Write the answer to a request that does not stream."""
        choices = []
        for choice in self._generation.choices:
            assert choice.result is not None
            choices.append(self._choice(choice, choice.result.text or "", whole=True))
        return self._answer(self.kind, choices) | {"usage": usage(self._generation)}

    def first(self, choice: Choice) -> Json | None:
        """Write the chunk before the first text of a choice; None where there is none."""
        raise NotImplementedError

    def chunk(self, choice: Choice, text: str) -> Json:
        """Write the chunk of a choice's next text."""
        return self._answer(self.chunk_kind, [self._choice(choice, text, whole=False)])

    def last(self) -> Json:
        """Write the chunk that has the usage alone."""
        return self._answer(self.chunk_kind, [])

    def _choice(self, choice: Choice, text: str, *, whole: bool) -> Json:
        raise NotImplementedError

    def _answer(self, kind: str, choices: list[Json]) -> Json:
        own = self._generation
        return {
            "id": f"{self.prefix}-{own.id}",
            "choices": choices,
            "created": own.created,
            "model": own.served.name,
            "object": kind,
        }


class ChatAnswers(Answers):
    """Write the answers of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, choice: Choice) -> Json:
        delta = {"content": "", "role": "assistant"}
        one = {"delta": delta, "index": choice.index, "finish_reason": None, "logprobs": None}
        return self._answer(self.chunk_kind, [one])

    def _choice(self, choice: Choice, text: str, *, whole: bool) -> Json:
        logprobs = None
        if self._tops is not None:
            found = chat_logprobs(choice.text.new_logprobs(), self._tokenizer, top=self._tops > 0)
            logprobs = {"content": found, "refusal": None}
        index, end = choice.index, choice.finish_reason
        if not whole:
            delta = {"content": text}
            return {"delta": delta, "index": index, "finish_reason": end, "logprobs": logprobs}
        said = {"content": text, "refusal": None, "role": "assistant"}
        return {"finish_reason": end, "index": index, "logprobs": logprobs, "message": said}


class CompletionAnswers(Answers):
    """Write the answers of /v1/completions; with `echo` each begins with its prompt."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, generation: Generation, request: CompletionRequest):
        super().__init__(generation, request)
        self._echo = [self._text(prompt) for prompt in request.prompts] if request.echo else None

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return "" if self._tokenizer is None else str(self._tokenizer.decode(prompt))

    def first(self, choice: Choice) -> Json | None:
        if self._echo is None:
            return None
        one = self._written(choice, self._prompt(choice), self._of_prompt(choice), end=None)
        return self._answer(self.chunk_kind, [one])

    def _prompt(self, choice: Choice) -> str:
        """Return the text that an answer begins with."""
        return "" if self._echo is None else self._echo[choice.index // self._generation.n]

    def _choice(self, choice: Choice, text: str, *, whole: bool) -> Json:
        found = self._of_response(choice)
        if whole:
            text, found = self._prompt(choice) + text, self._of_prompt(choice) + found
        return self._written(choice, text, found, end=choice.finish_reason)

    def _written(
        self, choice: Choice, text: str, found: list[TokenLogprob], *, end: str | None
    ) -> Json:
        logprobs = None
        if self._tops is not None:
            logprobs = completion_logprobs(found, self._tokenizer, top=self._tops > 0)
        return {"finish_reason": end, "index": choice.index, "logprobs": logprobs, "text": text}

    def _of_prompt(self, choice: Choice) -> list[TokenLogprob]:
        if self._tops is None or self._echo is None:
            return []
        likelihoods = self._generation.likelihoods(choice)
        return prompt_logprobs(self._tokenizer, choice.prompt, likelihoods)

    def _of_response(self, choice: Choice) -> list[TokenLogprob]:
        if self._tops is None:
            return []
        found = choice.text.new_logprobs()
        if choice.result is not None and choice.result.finish_reason == "end":
            # OpenAI and vLLM do so too. lm-eval asks for a token after the prompt and leaves out
            # the last: without an entry for the end token, it would leave out one of the prompt.
            assert choice.text.end is not None
            found = [*found, choice.text.end]
        shift = len(self._prompt(choice))
        return [replace(one, offset=shift + one.offset) for one in found]
