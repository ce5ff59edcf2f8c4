"""Answers in pieces, as server-sent events.

Three things happen at once, and none waits for another::

    engine's thread -> Generation.run -> take    each event, as it comes
    _data -> EventSourceResponse                 as fast as the client reads
    the connection -> EventSourceResponse        cancels all of it once the client is gone

Each event becomes a chunk as it comes. While the client does not read, text is joined, so that what
waits is never more than the answer::

    the client reads        "2 "  "🙂"  "E"         three chunks
    it does not, then does  "2 "  "🙂E"             two

Descriptions of forwards (``"events": true``) cannot be joined; they are bounded instead.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import anyio
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send

from decode.server.answers import Answers, usage
from decode.server.generation import Choice, Generation
from decode.server.options import Options
from decode.server.protocol import ApiError, TextRequest
from decode.step import Event

# A signal does not cut streams off: decode.server.run lets them finish, then cancels them.
AppStatus.disable_automatic_graceful_drain()


class SlowClientError(Exception):
    """Say that the client did not take what it was sent."""


class StreamedAnswer(EventSourceResponse):
    """Stream the answers to a request. The generation is cancelled when the client leaves, takes
    nothing for --send-timeout seconds, or does not read while more than --max-unsent bytes of
    forwards wait; the last two raise SlowClientError, and nothing follows: no end may make what was
    sent look whole."""

    def __init__(
        self, generation: Generation, answers: Answers, asked: TextRequest, options: Options
    ):
        wanted = asked.stream_options
        self._with_usage = wanted is not None and wanted.include_usage
        self._always = wanted is not None and wanted.continuous_usage_stats
        self._generation, self._answers, self._most = generation, answers, options.max_unsent
        self._events = ForwardEvents(generation) if asked.events else None
        self._texts: dict[Choice, str] = {}  # that wait to be chunks
        self._lines: deque[str] = deque()
        self.size = 0  # characters of the lines
        self._opened: set[Choice] = set()
        self.held_up = False  # the client has not taken the last line yet
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
        if self.dropped:
            raise SlowClientError

    def take(self, choice: Choice, event: Event, text: str) -> None:
        """Add what an event says."""
        if self._events is None:
            self._texts[choice] = self._texts.get(choice, "") + text
            if not self.held_up:
                self._write_texts()
        elif not self.dropped:
            self._open(choice)
            chunk = self._answers.chunk(choice, text)
            self._add(chunk | {"d2f": self._events.describe(choice, event)})
            if self.held_up and self.size > self._most:
                self.dropped = True
                self._sending.cancel()
        self._wake.set()

    async def _data(self) -> AsyncIterator[str]:
        """Yield the data of the stream's events, to its end."""
        decoding = asyncio.create_task(self._generation.run(self.take))
        decoding.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                self._wake.clear()
                ended = decoding.done()  # first: the lines below are then all that there are
                self._write_texts()
                while self._lines:
                    self.held_up = True
                    yield self._pop()
                    self.held_up = False
                    if self.dropped:
                        raise SlowClientError
                if ended:
                    break
                await self._wake.wait()
            try:
                decoding.result()
            except ApiError as error:
                yield json.dumps(error.content)
                return
            if self._with_usage:
                self._add(self._answers.last())
                yield self._pop()
            yield "[DONE]"
        finally:
            decoding.cancel()

    def _write_texts(self) -> None:
        texts, self._texts = self._texts, {}
        for choice, text in texts.items():
            if text or choice.result is not None:
                self._open(choice)
                self._add(self._answers.chunk(choice, text))

    def _open(self, choice: Choice) -> None:
        """Write the chunk before the first one of a choice."""
        if choice not in self._opened:
            self._opened.add(choice)
            first = self._answers.first(choice)
            if first is not None:
                self._add(first)

    def _add(self, chunk: dict[str, Any]) -> None:
        if self._always or (self._with_usage and not chunk["choices"]):
            chunk = chunk | {"usage": usage(self._generation)}
        elif self._with_usage:
            chunk = chunk | {"usage": None}
        line = json.dumps(chunk, separators=(",", ":"))
        self._lines.append(line)
        self.size += len(line)

    def _pop(self) -> str:
        line = self._lines.popleft()
        self.size -= len(line)
        return line


class ForwardEvents:
    """Describe what each forward did to a choice, as JSON, for a client that draws it."""

    def __init__(self, generation: Generation):
        self._generation = generation
        self._decided: dict[Choice, dict[int, int]] = {}
        self._texts: dict[int, str] = {}  # of single tokens

    def describe(self, choice: Choice, event: Event) -> dict[str, Any]:
        before = self._decided.get(choice, {})
        now = {
            position: token
            for block in event.blocks
            for position, token in enumerate(block.tokens, block.start)
            if token is not None
        }
        self._decided[choice] = now
        fed, cached = event.call
        return {
            "choice": choice.index,
            "forward": event.forward,
            "fed": fed,
            "cached": cached,
            "seconds": round(self._generation.seconds, 6),
            "blocks": [
                vars(block) | {"texts": [self._text(token) for token in block.tokens]}
                for block in event.blocks
            ],
            "revealed": [
                vars(one) | {"text": self._text(one.token), "confidence": round(one.confidence, 6)}
                for one in event.revealed
            ],
            "revoked": [p for p, token in before.items() if now.get(p) != token],
            "settled": len(event.settled),
        }

    def _text(self, token: int | None) -> str | None:
        if token is not None and token not in self._texts:
            tokenizer: Any = self._generation.served.model.tokenizer
            self._texts[token] = "" if tokenizer is None else tokenizer.decode([token])
        return None if token is None else self._texts[token]
