"""A request's way to a replica, and its answer's way back.

::

    client --> front --> Ray's router --> Replica.answer --> the application
    client <-- front <------------------- messages of ASGI <--

A replica sends nothing before it has some of an answer. One that dies until then has sent nothing,
so that another one can be asked, once: a request that no replica survives ends with the second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from decode.server.api_error import RETRY_SECONDS, ApiError, as_api_error
from decode.server.disconnects import watched
from decode.server.replica import TOLD, Call
from decode.server.request_frame import Record
from decode.server.settings import Settings
from decode.server.streaming import SlowClientError
from decode.server.unsent import event_line

GRACE_SECONDS = 2.0  # more than a replica's own limit, so that it is the one to say what happened


class ForwardedAnswer(Response):
    """The answer of a replica. A client that leaves, or does not read for `Settings.send_seconds`,
    cancels it there. Raises ApiError where the client was sent nothing, else the error is the last
    chunk of a stream; SlowClientError."""

    def __init__(
        self,
        replicas: DeploymentHandle,
        call: Call,
        settings: Settings,
        under_way: set[ForwardedAnswer],
    ):
        """under_way: those that `stop` may be called of, of which it is one while it is sent."""
        self.background = None  # all that FastAPI reads of it
        self._asked = replicas.options(method_name="answer", stream=True)
        self._call = call
        self._settings = settings
        self._under_way = under_way
        self._began: Message | None = None  # the head, once it was sent
        self._whole = False  # whether the last of it was sent
        self._end: asyncio.Future[ApiError] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: Record = scope["d2f.record"]
        self._end = asyncio.get_running_loop().create_future()
        work = asyncio.create_task(self._forward(record, send))
        self._under_way.add(self)

        def leave() -> None:
            if not self._whole:  # after it, everyone leaves
                work.cancel()

        try:
            with watched(receive, leave):
                done: set[asyncio.Future[Any]] = {work, self._end}
                await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._under_way.discard(self)
            work.cancel()
            await asyncio.wait({work})
        error = self._end.result() if self._end.done() else None
        if error is None and work.cancelled():
            record.error = "the client left"
        elif error is None:
            error = work.result()
        if error is not None and self._began is None:
            raise error
        if error is not None:
            record.error = error.message
            await self._send_last(error, send)

    def stop(self, error: ApiError) -> None:
        """Have the client told this in place of what is still to come."""
        if self._end is not None and not self._end.done():
            self._end.set_result(error)

    async def _forward(self, record: Record, send: Send) -> ApiError | None:
        """Send what the replica does; the error that ended it, which the client is not told yet."""
        loop, settings = asyncio.get_running_loop(), self._settings
        try:
            async with (
                asyncio.timeout(settings.request_seconds + GRACE_SECONDS) as limit,
                aclosing(self._messages()) as messages,
            ):
                async for message in messages:
                    if message["type"] == TOLD:
                        record.told = message["fields"]
                        continue
                    limit.reschedule(loop.time() + settings.send_seconds)
                    self._began = self._began or message
                    self._whole = message["type"].endswith("body") and not message.get("more_body")
                    await send(message)
                    limit.reschedule(None)
        except TimeoutError as error:
            if self._began is not None:
                raise SlowClientError("the client did not read") from error
            return as_api_error(error)
        except Exception as error:
            return _as_api_error(error)
        return None

    async def _messages(self) -> AsyncGenerator[Message, None]:
        for is_last in (False, True):
            began = False
            replies: Any = self._asked.remote(self._call)
            try:
                async for messages in replies:
                    began = True
                    for message in messages:
                        yield message
                return
            except RayActorError:
                if began or is_last:
                    raise
            finally:
                replies.cancel()

    async def _send_last(self, error: ApiError, send: Send) -> None:
        """End a stream with an error. Anything else that has begun is cut off."""
        assert self._began is not None
        headers = dict(self._began["headers"])
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise RuntimeError(f"an answer was cut off: {error.message}")
        body = event_line(error.content)
        async with asyncio.timeout(self._settings.send_seconds):
            await send({"type": "http.response.body", "body": body, "more_body": False})


def _as_api_error(error: Exception) -> ApiError:
    wait = {"Retry-After": str(RETRY_SECONDS)}
    if isinstance(error, RayActorError):
        said = "the replica that computed the answer has ended; try again"
        return ApiError(503, said, code="replica_ended", headers=wait)
    if isinstance(error, BackPressureError):
        said = "there is no replica, and too many requests wait for one; try again"
        return ApiError(503, said, code="queue_full", headers=wait)
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return ApiError(503, "there is no replica; try again", code="not_ready", headers=wait)
    return as_api_error(error)
