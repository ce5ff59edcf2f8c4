"""A client that leaves while its answer is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request

from decode.server.api_error import ApiError

Found = TypeVar("Found")


async def unless_gone(request: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """What work gives; it is cancelled where the client leaves first. Raises ApiError (499, which
    nobody reads but the log)."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client left")
    finally:
        for one in (task, watcher):
            one.cancel()
            with suppress(asyncio.CancelledError, ApiError):
                await one


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
