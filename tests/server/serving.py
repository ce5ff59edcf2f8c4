"""Applications, clients, and a server in a thread for the tests of the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from d2f.model import DiffusionModel
from decode.cli import DecoderSettings
from decode.engine.async_engine import AsyncEngine
from decode.server.app import create_app
from decode.server.models import ServedModel, serve_model
from decode.server.options import Options
from decode.server.run import Server

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 200.0  # seconds after which a test has failed
QUESTION = "Use 3 and 4 to make 12."
JSON = {"content-type": "application/json"}
CHAT = {"model": "tiny-d2f", "messages": [{"role": "user", "content": QUESTION}]}


def stock(
    name: str,
    model: DiffusionModel,
    settings: DecoderSettings | None = None,
    *,
    options: Options | None = None,
    **engine: Any,
) -> ServedModel:
    """Make a model to serve, with an engine of its own."""
    settings, options = settings or DecoderSettings(None, {}), options or Options()
    return serve_model(name, model, AsyncEngine(model, **engine), settings, options)


class Served:
    """Ask an application without a network; answers come whole."""

    def __init__(self, models: Sequence[ServedModel], options: Options | None = None):
        self.models = list(models)
        self.app = create_app(self.models, options)
        self.client = TestClient(
            self.app, base_url="http://localhost", raise_server_exceptions=False
        )

    def __enter__(self) -> Served:
        self.client.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        self.client.__exit__(None, None, None)

    def post(self, path: str, values: Any, **more: Any) -> httpx.Response:
        """Send a request and return its response."""
        return self.client.post(path, json=values, **more)

    def ask(self, values: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        """Return the answer to a request that succeeds."""
        response = self.post(path, values)
        assert response.status_code == 200, response.text
        return response.json()

    def chunks(self, values: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
        """Return the chunks of a stream that succeeds."""
        response = self.post(path, {**values, "stream": True})
        assert response.status_code == 200, response.text
        lines = sse(response.text)
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


def sse(text: str) -> list[str]:
    """Read the data of server-sent events."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


def pieces(chunks: Sequence[dict[str, Any]], index: int = 0) -> str:
    """Join the text of one choice of a stream."""
    parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == index]
    return "".join(one["text"] if "text" in one else one["delta"]["content"] for one in parts)


def refused(response, status: int, param: str | None = None, code: str | None = None) -> str:
    """Check an error in OpenAI's format, and return its message."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    default = "server_error" if status >= 500 else "invalid_request_error"
    assert error["type"] == kinds.get(status, default)
    assert error["message"].isprintable() and len(error["message"]) < 2000
    return error["message"]


@contextmanager
def listening(app: FastAPI, **more: Any) -> Iterator[str]:
    """Serve an application in a thread, and yield its address. more: options of uvicorn."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, **more)
    server = app.state.uvicorn = Server(config, app.state.server)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for _ in range(2):  # the second cancels what still runs
            server.handle_exit(signal.SIGTERM, None)
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextmanager
def command(*words: str, **headers: str) -> Iterator[tuple[subprocess.Popen, httpx.Client, Path]]:
    """Run the command in a process; yield it, a client of it, and its log."""
    with tempfile.NamedTemporaryFile() as file:
        log = Path(file.name)
        process = subprocess.Popen(
            [sys.executable, "-m", "decode.serve", "--port", "0", *words],
            stderr=file.fileno(),
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        try:
            wait_until(lambda: process.poll() or "serving on http" in log.read_text(), every=0.1)
            url = log.read_text().split("serving on ")[1].split()[0]
            with httpx.Client(base_url=url, timeout=PATIENCE, headers=headers) as client:
                yield process, client, log
        finally:
            process.kill()
            process.wait()


def wait_until(condition: Any, every: float = 0.005) -> None:
    """Return when it holds; the test fails where it never does."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(every)
