"""Run the application on a socket until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from d2f.command import say
from d2f.errors import InputError
from decode.server.middleware import LOGGER
from decode.server.state import ServerState

# The engine's thread gives its turn away with each operation of torch, and would wait for the event
# loop's 5 ms each time.
SWITCH_SECONDS = 0.0005
BACKLOG = 512  # connections that wait to be accepted
HEADER_SECONDS = 30.0  # until a request's headers must have come
SECONDS_TO_CLOSE = 5  # for the last answers to be read
FILES_KEPT = 64  # for other things than connections


class Connection(H11Protocol):
    """Closes a connection that sends no whole header in time, and those beyond the limit."""

    most = 960
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        """Start the clock while a header is awaited, and stop it when it is there."""
        if self.conn.their_state is not h11.IDLE:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)


class Server(uvicorn.Server):
    """Says when it serves, and drains. The first signal refuses new requests and lets those that
    run finish within `drain_seconds`; then, or at the second signal, they are cancelled. A third
    one waits for nothing."""

    def __init__(self, config: uvicorn.Config, state: ServerState, drain_seconds: float):
        super().__init__(config)
        self._state = state
        self._seconds = drain_seconds
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or []:
            say(f"serving on {address_of(one)}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again at the end: this is a normal exit.
        self._signals += 1
        self.should_exit = True
        self.force_exit = self._signals > 2

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self._state
        state.draining = True  # still listening: new requests are told so
        LOGGER.info("stopping: requests that run have %g s to finish", self._seconds)
        end = time.monotonic() + self._seconds
        while state.in_flight and time.monotonic() < end and self._signals < 2:
            await asyncio.sleep(0.02)
        if state.in_flight:
            LOGGER.info("cancelling %d requests", state.in_flight)
            await state.cancel()  # their streams end with an error
        await super().shutdown(sockets)


def address_of(listener: socket.socket) -> str:
    """Return the address of a server as a browser takes it."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def raise_file_limit() -> int:
    """Raise this process's limit of open files to the most that it may have; return that."""
    import resource  # not on every system

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def run_server(app: FastAPI, listener: socket.socket, drain_seconds: float) -> None:
    """Serve until a signal ends it. Raises InputError where nobody can listen at the socket any
    more."""
    state: ServerState = app.state.server
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise InputError(f"{address_of(listener)}: {error.strerror or error}") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # A client that does not read holds what was sent to it in the kernel, for ever.
        longest = int(2000 * state.settings.send_seconds)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, longest)
    sys.setswitchinterval(SWITCH_SECONDS)
    most = max(16, raise_file_limit() - FILES_KEPT)
    protocol: Any = type("Connection", (Connection,), {"most": most})
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        loop="asyncio",
        http=protocol,
        backlog=BACKLOG,
        server_header=False,
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
    )
    Server(config, state, drain_seconds).run(sockets=[listener])
