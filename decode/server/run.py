"""Running the application on a socket until it is told to end."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from d2f.errors import InputError
from decode.cli import say
from decode.server.state import ServerState

# Of Python's threads: the engine's gives its turn away with each operation of torch, and would wait
# for the event loop's 5 ms each time.
SWITCH_SECONDS = 0.0005
BACKLOG = 2048  # connections that wait to be accepted
SECONDS_TO_CLOSE = 5  # for the last answers to be read


class Server(uvicorn.Server):
    """Says when it serves. The first signal refuses new requests, lets those that run finish within
    `drain_seconds`, then cancels them; a second one cancels them now, a third waits for nothing."""

    def __init__(self, config: uvicorn.Config, state: ServerState, drain_seconds: float):
        super().__init__(config)
        self._state = state
        self._seconds = drain_seconds
        self._signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for one in sockets or []:
            host, port = one.getsockname()[:2]
            say(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._loop is None or self._signals > 2:
            self.should_exit = self.force_exit = True
        elif self._signals == 1:
            self._state.draining = True
            say(f"stopping: requests that run have {self._seconds:g} s to finish")
            self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        end = time.monotonic() + self._seconds
        while self._state.in_flight and time.monotonic() < end and self._signals == 1:
            await asyncio.sleep(0.02)
        if self._state.in_flight:
            say(f"cancelling {self._state.in_flight} requests")
            await self._state.cancel()  # their streams end with an error
        self.should_exit = True


def run_server(app: FastAPI, listener: socket.socket, drain_seconds: float) -> None:
    """Serve until a signal ends it. Raises InputError where nobody can listen at the socket any
    more."""
    state: ServerState = app.state.server
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # A client that does not read holds what was sent to it in the kernel, for ever.
        longest = int(2000 * state.settings.send_seconds)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, longest)
    sys.setswitchinterval(SWITCH_SECONDS)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        loop="asyncio",  # what is tested, whatever else is installed
        http="h11",
        server_header=False,
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
    )
    Server(config, state, drain_seconds).run(sockets=[listener])
