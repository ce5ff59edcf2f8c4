"""Send answers in pieces, as server-sent events.

::

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
from typing import Any

import anyio
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.types import Receive, Scope, Send

from decode.server.answers import Answers, usage
from decode.server.generation import Choice, Generation
from decode.server.options import Options
from decode.server.protocol import ApiError, StreamOptions
from decode.step import Event

# A signal does not cut streams off: decode.server.run lets them finish, then cancels them.
AppStatus.disable_automatic_graceful_drain()


class SlowClientError(Exception):
    """Say that the client did not take what it was sent."""


class StreamedAnswer(EventSourceResponse):
    """Stream the answers to a request, whose generation calls `take`. It is cancelled when the
    client leaves, takes nothing for --send-timeout seconds, or does not read while more than
    --max-unsent bytes of forwards wait; the last two raise SlowClientError, and nothing follows: no
    end may make what was sent look whole."""

    def __init__(self, generation: Generation, answers: Answers, options: Options):
        self._generation, self._answers = generation, answers
        self._usage = answers.request.stream_options or StreamOptions()
        self._most = options.max_unsent
        self._with_events = answers.request.events
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
        if self._with_events:
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

    def _add(self, chunk: dict[str, Any]) -> None:
        wanted = self._usage
        if wanted.continuous_usage_stats or (wanted.include_usage and not chunk["choices"]):
            chunk = chunk | {"usage": usage(self._generation)}
        elif wanted.include_usage:
            chunk = chunk | {"usage": None}
        line = json.dumps(chunk, separators=(",", ":"))
        self._lines.append(line)
        self._size += len(line)

    def _described(self, choice: Choice, event: Event) -> dict[str, Any]:
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
            tokenizer: Any = self._generation.served.model.tokenizer
            self._names[token] = "" if tokenizer is None else tokenizer.decode([token])
        return None if token is None else self._names[token]
