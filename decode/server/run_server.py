"""Running the application on a socket."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI

from decode.commands.run_command import say


class Server(uvicorn.Server):
    """Says when it serves."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or []:
            host, port = one.getsockname()[:2]
            say(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}")


def run_server(app: FastAPI, listener: socket.socket) -> None:
    """Serve until a signal ends it."""
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False)
    Server(config).run(sockets=[listener])
