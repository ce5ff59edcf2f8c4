"""A client that leaves while its answer is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Receive


@contextmanager
def watched(receive: Receive, leave: Callable[[], None]) -> Iterator[None]:
    """Within it `leave` is called once the client has left."""
    watcher = asyncio.create_task(_gone(receive, leave))
    try:
        yield
    finally:
        watcher.cancel()


async def _gone(receive: Receive, leave: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()
