"""What waits to be sent of one stream, as server-sent events.

Each event of the engine becomes a chunk as it comes. While the client does not read, text is
joined, so that what waits is never more than the answer::

    the client reads        "2 "  "🙂"  "E"         three chunks
    it does not, then does  "2 "  "🙂E"             two

The descriptions of forwards (``"events": true``) cannot be joined: more of them than the bound are
too many.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from decode.engine.result import Event
from decode.server.api_error import ApiError
from decode.server.fields import Asked
from decode.server.forward_events import ForwardEvents
from decode.server.generation import Choice, Generation
from decode.server.openai_answers import Answers, as_json, usage

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
