"""Write answers as the `openai` package's types do, whole or as a stream of server-sent events.

The types themselves are slow to make and to write, so answers are plain dicts, and a test compares
them with the types to the byte. A stream::

    engine's thread -> Generation -> take        each event, as it comes
    _data -> EventSourceResponse                 as fast as the client reads
    the connection -> EventSourceResponse        cancels all of it once the client is gone

While the client does not read, text is joined, so that what waits is never more than the answer::

    the client reads        "2 "  "🙂"  "E"         three chunks
    it does not, then does  "2 "  "🙂E"             two

Descriptions of forwards (``"events": true``) cannot be joined; they are bounded instead.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anyio
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send

from decode.report import empty_notice
from decode.server.generation import Choice, Generation
from decode.server.options import Options
from decode.server.protocol import (
    AnyRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
)
from decode.server.text import TokenLogprob, chat_logprobs, completion_logprobs, prompt_logprobs
from decode.step import Event

Json = dict[str, Any]
# A signal does not cut streams off: `run.Server` lets them finish, then cancels them.
AppStatus.disable_automatic_graceful_drain()


def usage(generation: Generation) -> Json:
    """Count the tokens so far and, under `d2f`, their cost: sums over the choices, seconds since
    the request came, the seed that those of the choices are made from, and why choices may be empty
    where some are."""
    tokens, calls, decoder = generation.tokens, generation.calls, generation.decoder
    results = [choice.result for choice in generation.choices if choice.result is not None]
    empty = [len(one.raw_tokens) for one in results if one.raw_tokens and not one.tokens]
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
            "notice": empty_notice(generation.served.model, len(empty), max(empty, default=0)),
        },
    }


class Answers:
    """Write the answers to one request: whole, or in chunks; with `echo` each begins with its
    prompt."""

    def __init__(self, generation: Generation, request: AnyRequest):
        self.generation, self.request = generation, request
        self.tokenizer: Any = generation.served.model.tokenizer
        # A model without a tokenizer has no names for tokens.
        self._tops = None if self.tokenizer is None else request.tops
        self._chat = isinstance(request, ChatRequest)
        self._echo: list[str] = []
        if isinstance(request, CompletionRequest) and request.echo:
            self._echo = [self._text(prompt) for prompt in request.prompts]

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return "" if self.tokenizer is None else str(self.tokenizer.decode(prompt))

    def whole(self) -> Json:
        """Write the answer to a request that does not stream."""
        choices = []
        for choice in self.generation.choices:
            assert choice.result is not None
            text = self._prompt(choice) + (choice.result.text or "")
            logprobs = self._logprobs([*self._of_prompt(choice), *self._new(choice)])
            one = {"finish_reason": choice.finish_reason, "index": choice.index}
            said = {"content": text, "refusal": None, "role": "assistant"}
            own = {"message": said} if self._chat else {"text": text}
            choices.append(one | {"logprobs": logprobs} | own)
        return self._answer("chat.completion", choices) | {"usage": usage(self.generation)}

    def first(self, choice: Choice) -> Json | None:
        """Write the chunk before the first text of a choice; None where there is none."""
        if self._chat:
            return self._chunk(choice, {"content": "", "role": "assistant"}, None, None)
        logprobs = self._logprobs(self._of_prompt(choice))
        return self._chunk(choice, self._prompt(choice), None, logprobs) if self._echo else None

    def chunk(self, choice: Choice, text: str) -> Json:
        """Write the chunk of a choice's next text."""
        logprobs = self._logprobs(self._new(choice))
        what = {"content": text} if self._chat else text
        return self._chunk(choice, what, choice.finish_reason, logprobs)

    def last(self) -> Json:
        """Write the chunk that has the usage alone."""
        return self._answer("chat.completion.chunk", [])

    def _chunk(self, choice: Choice, what: Any, end: str | None, logprobs: Json | None) -> Json:
        index = choice.index
        one = {"delta": what, "index": index, "finish_reason": end, "logprobs": logprobs}
        if not self._chat:
            one = {"finish_reason": end, "index": index, "logprobs": logprobs, "text": what}
        return self._answer("chat.completion.chunk", [one])

    def _answer(self, kind: str, choices: list[Json]) -> Json:
        own = self.generation
        return {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{own.id}",
            "choices": choices,
            "created": own.created,
            "model": own.served.name,
            "object": kind if self._chat else "text_completion",
        }

    def _prompt(self, choice: Choice) -> str:
        """Return the text that an answer begins with."""
        return self._echo[choice.index // self.generation.n] if self._echo else ""

    def _logprobs(self, found: list[TokenLogprob]) -> Json | None:
        if self._tops is None:
            return None
        if self._chat:
            content = chat_logprobs(found, self.tokenizer, top=self._tops > 0)
            return {"content": content, "refusal": None}
        return completion_logprobs(found, self.tokenizer, top=self._tops > 0)

    def _of_prompt(self, choice: Choice) -> list[TokenLogprob]:
        """List the tokens of an echoed prompt."""
        if self._tops is None or not self._echo:
            return []
        likelihoods = self.generation.likelihoods(choice)
        return prompt_logprobs(self.tokenizer, choice.prompt, likelihoods)

    def _new(self, choice: Choice) -> list[TokenLogprob]:
        """List the tokens of the response since the last time."""
        if self._tops is None:
            return []
        found, end = choice.text.new_logprobs(), choice.text.end
        if choice.result is not None and choice.result.finish_reason == "end" and not self._chat:
            # OpenAI and vLLM do so too. lm-eval asks for a token after the prompt and leaves out
            # the last: without an entry for the end token, it would leave out one of the prompt.
            assert end is not None
            found = [*found, end]
        shift = len(self._prompt(choice))
        return [replace(one, offset=shift + one.offset) for one in found]


class SlowClientError(Exception):
    """Say that the client did not take what it was sent."""


class StreamedAnswer(EventSourceResponse):
    """Stream the answers to a request, whose generation calls `take`. It is cancelled when the
    client leaves, takes nothing for --send-timeout seconds, or does not read while more than
    --max-unsent bytes of forwards wait; the last two raise SlowClientError, and nothing follows: no
    end may make what was sent look whole."""

    def __init__(self, answers: Answers, options: Options):
        self._answers, self._generation = answers, answers.generation
        self._usage = answers.request.stream_options or StreamOptions()
        self._most = options.max_unsent
        self._decided: dict[Choice, dict[int, int]] = {}  # ids by position, where events are asked
        self._names: dict[int, str] = {}  # texts of single tokens
        self._opened: set[Choice] = set()
        self._texts: dict[Choice, str] = {}  # that wait to be chunks
        self._lines: deque[str] = deque()
        self._size = 0  # characters of the lines
        self._wake = asyncio.Event()
        self._sending = anyio.CancelScope()
        self.dropped = False
        super().__init__(
            self._data(),
            sep="\n",
            send_timeout=options.send_timeout,
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._sending:
                await super().__call__(scope, receive, send)
        except TimeoutError as error:
            raise SlowClientError from error
        finally:
            self._generation.cancel()
        if self.dropped:
            raise SlowClientError

    def take(self, choice: Choice, event: Event, text: str) -> None:
        """Add what an event says."""
        if self._answers.request.events:
            self._write(choice, text, event)
            if self._size > self._most:
                self.dropped = True
                self._sending.cancel()
        else:
            self._texts[choice] = self._texts.get(choice, "") + text
        self._wake.set()

    async def _data(self) -> AsyncIterator[str]:
        """Yield the data of the stream's events, to its end."""
        decoding = asyncio.create_task(self._generation.run())
        decoding.add_done_callback(lambda _: self._wake.set())
        try:
            ended = False
            while not ended:
                await self._wake.wait()
                self._wake.clear()
                ended = decoding.done()
                texts, self._texts = self._texts, {}
                for choice, text in texts.items():
                    if text or choice.result is not None:
                        self._write(choice, text)
                while self._lines:
                    self._size -= len(self._lines[0])
                    yield self._lines.popleft()
                    if self.dropped:
                        raise SlowClientError
            decoding.result()
            if self._usage.include_usage:
                self._add(self._answers.last())
                yield self._lines.popleft()
            yield "[DONE]"
        except ApiError as error:
            yield json.dumps(error.content)
        finally:
            decoding.cancel()

    def _write(self, choice: Choice, text: str, event: Event | None = None) -> None:
        first = None if choice in self._opened else self._answers.first(choice)
        self._opened.add(choice)
        if first is not None:
            self._add(first)
        about = {} if event is None else {"d2f": self._described(choice, event)}
        self._add(self._answers.chunk(choice, text) | about)

    def _add(self, chunk: Json) -> None:
        wanted = self._usage
        if wanted.continuous_usage_stats or (wanted.include_usage and not chunk["choices"]):
            chunk["usage"] = usage(self._generation)
        elif wanted.include_usage:
            chunk["usage"] = None
        line = json.dumps(chunk, separators=(",", ":"))
        self._lines.append(line)
        self._size += len(line)

    def _described(self, choice: Choice, event: Event) -> Json:
        """Describe what a forward did to a choice, as JSON, for a client that draws it."""
        before = self._decided.get(choice, {})
        now = self._decided[choice] = {
            position: token
            for block in event.blocks
            for position, token in enumerate(block.tokens, block.start)
            if token is not None
        }
        fed, cached = event.call
        return {
            "choice": choice.index,
            "forward": event.forward,
            "fed": fed,
            "cached": cached,
            "seconds": round(self._generation.seconds, 6),
            "blocks": [
                vars(block) | {"texts": [self._name(token) for token in block.tokens]}
                for block in event.blocks
            ],
            "revealed": [
                vars(one) | {"text": self._name(one.token), "confidence": round(one.confidence, 6)}
                for one in event.revealed
            ],
            "revoked": [p for p, token in before.items() if now.get(p) != token],
            "settled": len(event.settled),
        }

    def _name(self, token: int | None) -> str | None:
        if token is not None and token not in self._names:
            tokenizer = self._answers.tokenizer
            self._names[token] = "" if tokenizer is None else tokenizer.decode([token])
        return None if token is None else self._names[token]
