"""Answers in pieces, as server-sent events.

Three things happen at once, none of which waits for another::

    engine's thread -> Generation.run -> Unsent.take     each event, as it comes
    Unsent.next -> the connection                        as fast as the client reads
    the connection -> Generation.leave                   where the client is gone
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from decode.server.answers import Answers, as_json, usage
from decode.server.generation import Choice, Generation
from decode.server.models import Settings
from decode.server.protocol import ApiError, Asked
from decode.step import Event

# What a forward did to a choice, as streams with ``"events": true`` carry it.


@dataclass
class ForwardEvents:
    """Events of one request as JSON, for who draws them. Texts are those of single tokens."""

    generation: Generation
    _decided: dict[int, dict[int, int]] = field(default_factory=dict)
    _texts: dict[int, str] = field(default_factory=dict)

    def describe(self, choice: Choice, event: Event) -> dict[str, Any]:
        """One event. seconds: since the request came."""
        before = self._decided.get(choice.index, {})
        now = {
            position: token
            for block in event.blocks
            for position, token in enumerate(block.tokens, block.start)
            if token is not None
        }
        self._decided[choice.index] = now
        fed, cached = event.call
        return {
            "choice": choice.index,
            "forward": event.forward,
            "fed": fed,
            "cached": cached,
            "seconds": round(self.generation.seconds, 6),
            "blocks": [
                {
                    "start": block.start,
                    "end": block.end,
                    "state": block.state,
                    "tokens": list(block.tokens),
                    "texts": [None if t is None else self._text(t) for t in block.tokens],
                }
                for block in event.blocks
            ],
            "revealed": [
                {
                    "position": one.position,
                    "token": one.token,
                    "text": self._text(one.token),
                    "confidence": round(one.confidence, 6),
                }
                for one in event.revealed
            ],
            "revoked": [p for p, token in before.items() if now.get(p) != token],
            "settled": len(event.settled),
        }

    def _text(self, token: int) -> str:
        if token not in self._texts:
            tokenizer: Any = self.generation.served.model.tokenizer
            self._texts[token] = "" if tokenizer is None else tokenizer.decode([token])
        return self._texts[token]


# What waits to be sent of one stream, as server-sent events.
#
# Each event of the engine becomes a chunk as it comes. While the client does not read, text is
# joined, so that what waits is never more than the answer::
#
#     the client reads        "2 "  "🙂"  "E"         three chunks
#     it does not, then does  "2 "  "🙂E"             two
#
# The descriptions of forwards (``"events": true``) cannot be joined: more of them than the bound
# are
# too many.

PIECE = 1 << 16  # bytes that are joined for one send, as many as the connection keeps
_MARK = "\0"  # stands for the text where a chunk is prepared; no name and no id has it


class Unsent:
    """`take` is for `Generation.run`, `next` for who sends. most: bytes of forwards that may wait
    while the client does not read; full: called once it is more, and nothing waits any longer.
    held_up: whether the client has not taken what was sent last. over: whether all was given."""

    def __init__(
        self,
        generation: Generation,
        answers: Answers,
        asked: Asked,
        most: int,
        full: Callable[[], None],
    ):
        options = asked.stream_options
        self._with_usage = options is not None and options.include_usage
        self._always = options is not None and options.continuous_usage_stats
        self._generation, self._answers = generation, answers
        self._forwards = ForwardEvents(generation) if asked.events else None
        # Whether chunks differ in their text alone.
        self._plain = answers.wanted is None and not self._always
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by choice, a chunk around its text
        self._opened: set[int] = set()
        self._texts: dict[Choice, str] = {}  # that wait to be chunks
        self._lines: list[bytes] = []
        self._most, self._full = most, full
        self.size = 0  # bytes of the lines
        self.held_up = self._ended = False
        self._mistake: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        return self._ended and not self._lines and not self._texts

    def take(self, choice: Choice, event: Event) -> None:
        """Add what an event says."""
        if self._ended:
            return
        text = choice.piece(event)
        if self._forwards is not None:
            self._open(choice)
            chunk = self._answers.chunk(choice, text)
            self._add(self._line(chunk, d2f=self._forwards.describe(choice, event)))
        else:
            self._texts[choice] = self._texts.get(choice, "") + text
            if not self.held_up:
                self._write_texts()
        self._wake()

    def end(self, error: ApiError | None) -> None:
        """Add the last chunks; of an answer that failed its error."""
        self._write_texts()
        if error is not None:
            self._add(event_line(error.content))
        else:
            if self._with_usage:
                self._add(self._line(self._answers.last()))
            self._add(b"data: [DONE]\n\n")
        self._ended = True
        self._wake()

    def fail(self, mistake: Exception) -> None:
        """Have `next` raise a mistake of this server's."""
        self._mistake = mistake
        self._wake()

    def ping(self) -> None:
        """Add a comment, which keeps a connection alive, where nothing else waits."""
        if not self._lines and not self.held_up:
            self._add(b": ping\n\n")
            self._wake()

    async def next(self) -> bytes:
        """What is to be sent next, at most `PIECE` bytes or one event."""
        self._write_texts()
        while not self._lines and not self._ended and self._mistake is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._mistake is not None:
            raise self._mistake
        size = count = 0
        for line in self._lines:
            size += len(line)
            if count and size > PIECE:
                break
            count += 1
        body = b"".join(self._lines[:count])
        del self._lines[:count]
        self.size -= len(body)
        return body

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        self.size += len(line)
        if self.held_up and self._forwards is not None and self.size > self._most:
            self._lines.clear()
            self._ended, self.size = True, 0
            self._full()

    def _write_texts(self) -> None:
        texts, self._texts = self._texts, {}
        for choice, text in texts.items():
            self._open(choice)
            if choice.result is not None or (text and not self._plain):
                self._add(self._line(self._answers.chunk(choice, text)))
            elif text:
                before, after = self._frame(choice)
                self._add(before + json.dumps(text).encode() + after)

    def _open(self, choice: Choice) -> None:
        """Before the first chunk of a choice."""
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            first = self._answers.first(choice)
            if first is not None:
                self._add(self._line(first))

    def _frame(self, choice: Choice) -> tuple[bytes, bytes]:
        if choice.index not in self._frames:
            line = self._line(self._answers.chunk(choice, _MARK))
            before, _, after = line.partition(json.dumps(_MARK).encode())
            self._frames[choice.index] = before, after
        return self._frames[choice.index]

    def _line(self, chunk: dict[str, Any], **more: Any) -> bytes:
        if self._always or (self._with_usage and not chunk["choices"]):
            more["usage"] = as_json(usage(self._generation))
        elif self._with_usage:
            more["usage"] = None
        return event_line(chunk | more)


def event_line(content: dict[str, Any]) -> bytes:
    """One server-sent event; JSON has no line breaks."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


# A client that leaves while its answer is computed.


@contextmanager
def watched(receive: Receive, leave: Callable[[], None]) -> Iterator[None]:
    """Within it `leave` is called once the client has left."""
    watcher = asyncio.create_task(_gone(receive, leave))
    try:
        yield
    finally:
        watcher.cancel()


async def _gone(receive: Receive, leave: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()


PING_SECONDS = 15.0  # between comments that keep a connection alive
_HEADERS = {"Connection": "keep-alive", "X-Accel-Buffering": "no"}  # no proxy is to gather it


class SlowClientError(Exception):
    """The client did not take what it was sent."""


class StreamedAnswer(Response):
    """The answer to a request, from its first settled text on. A client that leaves, that takes
    nothing for `Settings.send_seconds`, or that does not read while more than
    `Settings.most_unsent` bytes of forwards come to wait, cancels it; of the last two
    SlowClientError is raised."""

    def __init__(self, generation: Generation, answers: Answers, asked: Asked, settings: Settings):
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.init_headers(_HEADERS)
        self._generation = generation
        self._settings = settings
        self._unsent = Unsent(generation, answers, asked, settings.most_unsent, self._give_up)
        self._limit = asyncio.timeout(None)  # of the send that is under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        decoding = asyncio.create_task(self._decode())
        try:
            with watched(receive, self._generation.leave), self._pings():
                await self._send_all(send)
        except TimeoutError as error:
            raise SlowClientError("the client did not read") from error
        finally:
            decoding.cancel()
            if not decoding.done():  # its requests are cancelled before the log says how it ended
                await asyncio.wait({decoding})

    async def _send_all(self, send: Send) -> None:
        loop, unsent, more = asyncio.get_running_loop(), self._unsent, True
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with self._limit as limit:
            await send(head)
            while more:
                body = await unsent.next()
                more = not unsent.over
                unsent.held_up = True
                limit.reschedule(loop.time() + self._settings.send_seconds)
                await send({"type": "http.response.body", "body": body, "more_body": more})
                limit.reschedule(None)
                unsent.held_up = False

    async def _decode(self) -> None:
        try:
            await self._generation.run(self._unsent.take)
            self._unsent.end(None)
        except ApiError as error:
            self._unsent.end(error)
        except Exception as mistake:
            self._unsent.fail(mistake)

    def _give_up(self) -> None:
        """Have the send that is under way time out now; if it ends just then, nothing follows."""
        self._unsent.fail(TimeoutError())
        if not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def _pings(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def ping() -> None:
            self._unsent.ping()
            self._timer = loop.call_later(PING_SECONDS, ping)

        self._timer = loop.call_later(PING_SECONDS, ping)
        try:
            yield
        finally:
            self._timer.cancel()
