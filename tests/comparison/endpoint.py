"""A completions endpoint for the tests that answers, or misbehaves, as it is told."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[["Handler", dict[str, Any], int], None]


Get = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Requests are given to the server's behaviour with their body and running number."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.models(self)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server: Any = self.server
        with server.lock:
            number = len(server.bodies)
            server.bodies.append(body)
            server.running += 1
            server.most = max(server.most, server.running)
        try:
            server.behaviour(self, body, number)
        finally:
            with server.lock:
                server.running -= 1

    def send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()

    def piece(self, text: str, reason: str | None = None) -> None:
        choice = {"index": 0, "text": text, "finish_reason": reason}
        self.line("data: " + json.dumps({"choices": [choice]}))

    def line(self, line: str) -> None:
        self.wfile.write(line.encode() + b"\n\n")
        self.wfile.flush()

    def finish_stream(self, tokens: int) -> None:
        self.line("data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}))
        self.line("data: [DONE]")

    def log_message(self, *args: object) -> None:
        pass


def list_models(handler: Handler) -> None:
    handler.send(200, json.dumps({"data": [{"id": "served"}]}))


def answering(
    text: Callable[[dict[str, Any]], str] = lambda body: "w1 w2",
    pause: float = 0.0,
    tokens: int | None = None,
) -> Behaviour:
    """A behaviour that answers every request well, word by word if it is asked to stream. tokens:
    that it counts, by default one a word and the end."""

    def behave(handler: Handler, body: dict[str, Any], number: int) -> None:
        whole = text(body)
        counted = min(tokens or len(whole.split()) + 1, body["max_tokens"])
        time.sleep(pause)
        if not body.get("stream"):
            usage = {"completion_tokens": counted}
            choice = {"index": 0, "text": whole, "finish_reason": "stop"}
            handler.send(200, json.dumps({"choices": [choice], "usage": usage}))
            return
        handler.begin_stream()
        for i, word in enumerate(whole.split(" ")):
            handler.piece(" " * (i > 0) + word)
        handler.piece("", "stop")
        handler.finish_stream(counted)

    return behave


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has given up is no error of the server's."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def endpoint(behaviour: Behaviour, models: Get = list_models) -> Iterator[Any]:
    """A running endpoint; models: what it answers to a GET. Its attributes: url, bodies of the
    requests so far, and `most`, the largest number of requests that were in it together."""
    server: Any = Server(("127.0.0.1", 0), Handler)
    server.behaviour, server.models, server.lock = behaviour, models, threading.Lock()
    server.bodies, server.running, server.most = [], 0, 0
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
