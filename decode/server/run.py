"""Run the application on a socket until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from types import FrameType
from typing import ClassVar

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from d2f.command import say
from decode.server.middleware import LOGGER
from decode.server.state import ServerState

# The engine's thread gives its turn away with each operation of torch, and would wait for the event
# loop's 5 ms each time.
SWITCH_SECONDS = 0.0005
HEADER_SECONDS = 30.0  # until a request's headers must have come
SECONDS_TO_CLOSE = 5  # for the last answers to be read
ACCEPTED = 32  # connections that the event loop accepts at a time, before it looks at any
FILES_KEPT = 256  # for those, and other things than connections
BACKLOG = 1024  # connections that wait to be accepted
MOST_FILES = 1 << 20


class Connection(H11Protocol):
    """Close a connection that sends no whole header in time, for which uvicorn waits without end.
    Where more than `most` are open, close the one that has waited longest for a request: without
    files none at all could be accepted."""

    most = MOST_FILES
    idle: ClassVar[dict[Connection, asyncio.TimerHandle]] = {}  # without a header, oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.most:
            oldest = next(iter(self.idle))
            oldest._forget()
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        """Start the clock while a header is awaited, and stop it when it is there."""
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self not in self.idle:
            self.idle[self] = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self in self.idle:
            self.idle.pop(self).cancel()


class Server(uvicorn.Server):
    """Say when it serves, and drain. The first signal refuses new requests and lets those that run
    finish within `drain_seconds`; then, or at the second signal, they are cancelled. A third one
    waits for nothing."""

    def __init__(self, config: uvicorn.Config, state: ServerState):
        super().__init__(config)
        self._state = state
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or []:
            one.listen(BACKLOG)
            say(f"serving on {url_of(*one.getsockname()[:2])}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again at the end: this is a normal exit.
        self._signals += 1
        self.should_exit = True
        self.force_exit = self._signals > 2

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state, seconds = self._state, self._state.options.drain_seconds
        state.draining = True  # still listening: new requests are told so
        LOGGER.info("stopping: requests that run have %g s to finish", seconds)
        end = time.monotonic() + seconds
        while state.in_flight and time.monotonic() < end and self._signals < 2:
            await asyncio.sleep(0.02)
        if state.in_flight:
            LOGGER.info("cancelling %d requests", state.in_flight)
            await state.cancel()  # their streams end with an error
        await super().shutdown(sockets)


def url_of(host: str, port: int) -> str:
    """Write an address as a browser takes it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def raise_file_limit() -> int:
    """Raise this process's limit of open files to the most that it may have, and return that."""
    try:
        import resource
    except ImportError:  # Windows
        return MOST_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if 0 <= hard < MOST_FILES else MOST_FILES  # -1 is infinity
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def run_server(app: FastAPI, listener: socket.socket) -> None:
    """Serve until a signal ends it."""
    state: ServerState = app.state.server
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # A client that does not read holds what was sent to it in the kernel, for ever.
        longest = min(int(2000 * state.options.send_timeout), 2**31 - 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, longest)
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # models stay: a request that makes many objects has the collector pass them by
    Connection.most = max(16, raise_file_limit() - FILES_KEPT)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        loop="asyncio",
        http=Connection,
        backlog=ACCEPTED,
        server_header=False,
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
    )
    try:
        Server(config, state).run(sockets=[listener])
    finally:
        gc.unfreeze()  # libraries print what is still there at the process's end
