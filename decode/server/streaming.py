"""Answers in pieces, as server-sent events.

Three things happen at once, none of which waits for another::

    engine's thread -> Generation.run -> Unsent.take     each event, as it comes
    Unsent.next -> the connection                        as fast as the client reads
    the connection -> Generation.leave                   where the client is gone
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from decode.server.api_error import ApiError
from decode.server.disconnects import watched
from decode.server.fields import Asked
from decode.server.generation import Generation
from decode.server.openai_answers import Answers
from decode.server.settings import Settings
from decode.server.unsent import Unsent

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
