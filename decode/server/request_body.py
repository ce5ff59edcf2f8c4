"""The JSON of a request, read within its limits."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request

from d2f.json_file import parse
from decode.server.api_error import ApiError
from decode.server.server_state import state_of


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
