"""Wrap every request: an id, the checks of who may ask, one line in the log, and an error in place
of an exception."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import queue
import threading
import time
import uuid
from dataclasses import dataclass, field
from logging.handlers import QueueHandler
from typing import Any, Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from d2f.errors import one_line, panics_are_errors
from decode.server.answers import SlowClientError
from decode.server.generation import Generation
from decode.server.protocol import ApiError
from decode.server.state import ServerState

LOGGER = logging.getLogger("decode.server")
Format = Literal["text", "json"]
MOST_LINES = 10_000  # of the log that wait to be written


class LineFormatter(logging.Formatter):
    """Write a record as one line; `extra={"fields": {...}}` are its named parts."""

    def __init__(self, form: Format):
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        message, level = record.getMessage(), record.levelname.lower()
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._form == "json":
            fields |= {} if trace is None else {"trace": trace}
            return json.dumps({"time": when, "level": level, "message": message} | fields)
        # Quoted as JSON: no path looks like other fields, or like another line.
        parts = [f"{name}={json.dumps(value)}" for name, value in fields.items()]
        text = " ".join([when, level, one_line(message), *parts])
        return text if trace is None else f"{text}\n{trace}"


class LogQueue(QueueHandler):
    """Write lines to standard error in a thread, and drop what finds the queue full: where nobody
    reads the pipe, nothing but that thread waits for it."""

    queue: queue.Queue[logging.LogRecord]

    def __init__(self, form: Format):
        super().__init__(queue.Queue(MOST_LINES))
        self.setFormatter(LineFormatter(form))
        self._dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        while True:
            line = self.queue.get().getMessage()
            dropped, self._dropped = self._dropped, 0
            if dropped:
                line += f"\n{dropped} lines of the log were lost: nobody read them"
            with contextlib.suppress(OSError):  # the pipe is closed
                # Not by sys.stderr, whose lock would hold up the end of the process.
                os.write(2, f"{line}\n".encode(errors="backslashreplace"))
            self.queue.task_done()

    def flush(self) -> None:
        """Wait a second at most until all is written; logging calls it at the process's end."""
        end = time.monotonic() + 1
        while self.queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)


def set_up_logs(form: Format) -> None:
    """Write the server's lines to standard error, and what the libraries below warn of."""
    handler = LogQueue(form)
    levels = {LOGGER.name: logging.INFO, "uvicorn": logging.WARNING, "asyncio": logging.WARNING}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


ID_HEADER = "x-request-id"
LONGEST_ID = 128
GONE = 499  # nginx's status in the log: nobody was there to be told
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # after an upgrade no file of the page is older than the others
}


@dataclass(eq=False)
class Record:
    """Describe a request for the log."""

    id: str
    began: float = field(default_factory=time.perf_counter)
    status: int | None = None  # while nothing was sent
    generation: Generation | None = None
    prompts: Any = None  # where they are to be logged
    error: str | None = None


class RequestFrame:
    """Wrap all routes."""

    def __init__(self, app: ASGIApp, state: ServerState):
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = scope["d2f.record"] = Record(request_id(headers.get(ID_HEADER, "")))

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message).update({ID_HEADER: record.id, **HEADERS})
            await send(message)

        self._state.in_flight += 1
        try:
            refusal = refusal_of(scope, headers, self._state)
            with panics_are_errors():
                await (self._app if refusal is None else refusal.response())(scope, receive, noted)
        except ClientDisconnect:
            record.error = "the client left"
        except SlowClientError:
            record.error = "the client did not read"
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"
            LOGGER.exception("an error of the server", extra={"fields": {"id": record.id}})
            if record.status is None:
                failed = ApiError(500, f"an error of the server; its log has it under {record.id}")
                await failed.response()(scope, receive, noted)
        finally:
            self._state.in_flight -= 1
            self._log(scope, record)

    def _log(self, scope: Scope, record: Record) -> None:
        status, generation = record.status or GONE, record.generation
        # By route: of paths that are none there are more than a counter has room for.
        route = getattr(scope.get("route"), "path", "none")
        self._state.metrics.responses.labels(route, str(status)).inc()
        fields: dict[str, Any] = {
            "id": record.id,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(time.perf_counter() - record.began, 4),
        }
        if generation is not None:
            self._state.metrics.ended(generation)
            fields |= {
                "model": generation.served.name,
                "decoder": generation.decoder.name,
                "outcome": generation.outcome,
                "choices": len(generation.choices),
                "prompt_tokens": generation.prompt_tokens,
                "tokens": generation.tokens,
                "forwards": len(generation.calls),
            }
        error = record.error or (generation and generation.error)
        more = {"prompts": record.prompts, "error": error}
        fields |= {name: value for name, value in more.items() if value is not None}
        LOGGER.info("request", extra={"fields": fields})


def refusal_of(scope: Scope, headers: Headers, state: ServerState) -> ApiError | None:
    """Return the error of a request that is not let in; None for one that is."""
    options, path = state.options, scope["path"]
    # Otherwise a page of another site could have its own name lead here, and read the answers.
    # starlette's TrustedHostMiddleware knows no IPv6 addresses and answers in plain text.
    host = _host(headers.get("host", ""))
    if options.allowed_host and not {host, "*"} & set(options.allowed_host):
        return ApiError(400, f"this server is not called {host!r}", code="host_not_allowed")
    # The page asks for a key itself.
    is_open = path in ("/", "/examples", *options.public_paths) or path.startswith("/page/")
    if options.api_key and not is_open and not _has_key(headers, options.api_key):
        wanted = "expected Authorization: Bearer with a key of this server"
        return ApiError(401, wanted, code="invalid_api_key")
    if state.draining and scope["method"] == "POST":
        return ApiError(503, "the server is stopping", code="stopping")
    return None


def _has_key(headers: Headers, keys: tuple[str, ...]) -> bool:
    kind, _, key = headers.get("authorization", "").partition(" ")
    given = key.strip().encode("latin-1")
    # In a time that does not depend on what is equal.
    return kind.lower() == "bearer" and any(hmac.compare_digest(given, k.encode()) for k in keys)


def _host(value: str) -> str:
    """Return the name in a Host header: lower case, without port and last dot."""
    name = value[: value.find("]") + 1] if value.startswith("[") else value.partition(":")[0]
    return name.lower().removesuffix(".")


def request_id(given: str) -> str:
    """Return the client's own id where it is short and printable, otherwise a new one."""
    fine = 0 < len(given) <= LONGEST_ID and given.isascii() and given.isprintable()
    return given if fine and " " not in given else uuid.uuid4().hex
