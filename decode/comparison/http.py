"""Reading what a server sends within bounds of time and size, whatever it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx

# Compressed bodies could unpack to any size, and unpacking would be timed as decoding.
PLAIN = {"accept-encoding": "identity"}
PAGE_BYTES = 2**20  # of an answer that is no completion


class UnusableError(Exception):
    """An answer that cannot be used; says why."""


async def chunks(response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises UnusableError beyond `most` bytes, or if it is compressed."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnusableError(f"a body in {encoding[:20]!r}, which was not asked for")
    size = 0
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > most:
            raise UnusableError(f"an answer of more than {most} bytes")
        yield chunk


async def body(response: httpx.Response, most: int) -> bytes:
    """The whole body. Raises UnusableError as `chunks`."""
    return b"".join([chunk async for chunk in chunks(response, most)])


async def beginning(response: httpx.Response, most: int) -> bytes:
    """The first bytes of a body, to be quoted."""
    found = b""
    async for chunk in response.aiter_raw():
        found += chunk
        if len(found) >= most:
            break
    return found[:most]


def fetch(url: str, seconds: float, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Status and body of a GET, all of it within `seconds`. Raises httpx.HTTPError,
    httpx.InvalidURL, UnusableError, TimeoutError."""
    return asyncio.run(_fetch(url, seconds, headers or {}))


async def _fetch(url: str, seconds: float, headers: dict[str, str]) -> tuple[int, bytes]:
    async with (
        asyncio.timeout(seconds),
        httpx.AsyncClient(headers=PLAIN | headers, timeout=seconds, trust_env=False) as client,
        client.stream("GET", url) as response,
    ):
        return response.status_code, await body(response, PAGE_BYTES)
