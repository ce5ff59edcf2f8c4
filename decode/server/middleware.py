"""What every request passes on its way in and out: an id, the checks of who may ask, one line in
the log, and an error in place of whatever was raised."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from d2f.checkpoint import parse
from d2f.errors import one_line
from decode.server.generation import Generation
from decode.server.models import Settings
from decode.server.protocol import ApiError
from decode.server.state import ServerState, state_of
from decode.server.stream import SlowClientError

# The log: a line a request, as text or JSON, on standard error.

LOGGER = logging.getLogger("decode.server")
Format = Literal["text", "json"]


class _Formatter(logging.Formatter):
    """A record as one line; `extra={"fields": {...}}` are its named parts."""

    def __init__(self, form: Format):
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        message = record.getMessage()
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        if self._form == "json":
            line = {"time": when, "level": record.levelname.lower(), "message": message}
            return json.dumps(line | fields)
        trace = fields.pop("trace", None)
        parts = [f"{name}={one_line(_plain(value))}" for name, value in fields.items()]
        text = " ".join([when, record.levelname.lower(), one_line(message), *parts])
        return text if trace is None else f"{text}\n{trace}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def set_up_logs(form: Format) -> None:
    """Write the server's lines to standard error, and what the libraries below warn of."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(form))
    for name, level in (
        (LOGGER.name, logging.INFO),
        ("uvicorn", logging.WARNING),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


ID_HEADER = "x-request-id"
LONGEST_ID = 128
OPEN = ("/", "/page/", "/examples")  # the page, which asks for a key itself
GONE = 499  # in the log, as in nginx's: nobody was there to be told
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # after an upgrade no file of the page is older than the others
}


@dataclass(eq=False)
class Record:
    """What the log says of a request. prompts: only where they are to be logged. told: what the
    replica that answered it says of it, fields: all that was logged."""

    id: str
    began: float = field(default_factory=time.perf_counter)
    status: int | None = None  # None: nothing was sent
    generation: Generation | None = None
    prompts: Any = None
    error: str | None = None
    told: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(request: Request) -> Record:
        """That of a request."""
        record: Record = request.scope["d2f.record"]
        return record


class RequestFrame:
    """The middleware around all routes."""

    def __init__(self, app: ASGIApp, state: ServerState):
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = scope["d2f.record"] = Record(_id(headers.get(ID_HEADER, "")))

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                found = MutableHeaders(scope=message)
                for name, value in {ID_HEADER: record.id, **_HEADERS}.items():
                    found[name] = value
            await send(message)

        self._state.in_flight += 1
        try:
            refusal = refusal_of(scope, headers, self._state)
            await (self._app if refusal is None else refusal.response())(scope, receive, noted)
        except ClientDisconnect:
            record.error = "the client left before its request was whole"
        except SlowClientError as error:
            record.error = str(error)
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"
            LOGGER.exception("an error of the server", extra={"fields": {"id": record.id}})
            if record.status is None:
                failed = ApiError(500, f"an error of the server; its log has it under {record.id}")
                await failed.response()(scope, receive, noted)
        finally:
            self._state.in_flight -= 1
            self._end(scope, record)

    def _end(self, scope: Scope, record: Record) -> None:
        status = record.status or GONE
        # Of paths that are none anyone can make more than a counter has room for.
        self._state.metrics.answered(getattr(scope.get("route"), "path", "none"), status)
        fields = record.told | {
            "id": record.id,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(time.perf_counter() - record.began, 4),
        }
        generation = record.generation
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
            if generation.error is not None:
                fields["error"] = generation.error
        if record.prompts is not None:
            fields["prompts"] = record.prompts
        if record.error is not None:
            fields["error"] = record.error
        record.fields = fields
        LOGGER.info("request", extra={"fields": fields})


def refusal_of(scope: Scope, headers: Headers, state: ServerState) -> ApiError | None:
    """Why a request is not let in, None where it is."""
    settings, path = state.settings, scope["path"]
    host = _host(headers.get("host", ""))
    if settings.allowed_hosts and not {host, "*"} & set(settings.allowed_hosts):
        # Else a page of another site could have its own name lead here, and read the answers.
        return ApiError(400, f"this server is not called {host!r}", code="host_not_allowed")
    is_open = path in settings.public or path == "/" or path.startswith(OPEN[1:])
    if settings.api_keys and not is_open and not _has_key(headers, settings):
        return ApiError(
            401,
            "expected Authorization: Bearer with a key of this server",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    if state.draining and scope["method"] == "POST":
        return ApiError(
            503, "the server is stopping", code="stopping", headers={"Connection": "close"}
        )
    return None


def _has_key(headers: Headers, settings: Settings) -> bool:
    kind, _, key = headers.get("authorization", "").partition(" ")
    given = key.strip().encode("latin-1")
    # Each is compared to its end, in a time that says nothing of what is equal.
    equal = [hmac.compare_digest(given, one.encode()) for one in settings.api_keys]
    return kind.lower() == "bearer" and any(equal)


def _host(value: str) -> str:
    """The name in a Host header, of which case and a last dot say nothing, without its port."""
    name = value[: value.find("]") + 1] if value.startswith("[") else value.partition(":")[0]
    return name.lower().removesuffix(".")


def _id(given: str) -> str:
    """The client's own id where it is short and printable, else a new one."""
    fine = 0 < len(given) <= LONGEST_ID and given.isascii() and given.isprintable()
    return given if fine and " " not in given else uuid.uuid4().hex


# The JSON of a request, read within its limits.


async def read_json(request: Request) -> dict[str, Any]:
    """The object in a request's body. Raises ApiError: 415 for another kind, or one that is packed,
    400 for no JSON, and as `read_body`."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a form of any web page can send is none
        raise ApiError(415, f"expected Content-Type application/json, got {kind or 'none'}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":  # max_body would not bound what it unpacks to
        raise ApiError(415, f"expected no Content-Encoding, got {coding}")
    body = await read_body(request)
    try:
        values = parse(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(values).__name__}")
    return values


async def read_body(request: Request) -> bytes:
    """All of a request's body. Raises ApiError: 413 for one that is too large (which is not read to
    its end), 408 for one that does not come."""
    settings = state_of(request).settings
    try:
        async with asyncio.timeout(settings.body_seconds):
            return await _read(request, settings.max_body)
    except TimeoutError as error:
        raise ApiError(
            408,
            f"the body did not come within {settings.body_seconds:g} seconds",
            headers={"Connection": "close"},
        ) from error


async def _read(request: Request, most: int) -> bytes:
    length = request.headers.get("content-length", "")
    size = int(length) if length.isdecimal() and len(length) < 20 else 0
    parts: list[bytes] = []
    if size <= most:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                break
            parts.append(part)
    if size > most:
        raise ApiError(413, f"the body has more than {most} bytes", headers={"Connection": "close"})
    return b"".join(parts)
