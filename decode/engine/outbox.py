"""Events on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from decode.engine.request import Request
from decode.engine.result import Event


class Outbox:
    """What one request gives to its one reader. It takes whatever comes, so that nobody waits for a
    slow reader, and is bounded all the same: a request has no more events than forwards."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop):
        self.request = request
        self.loop = loop
        self.items: deque[Event | Exception] = deque()  # the thread appends, the loop takes
        self._reader: asyncio.Future[None] | None = None
        self._take: Callable[[Event | Exception], None] | None = None
        self._left = False

    async def next(self) -> Event | None:
        """The next event, None after `leave`. Raises what the thread left in place of one."""
        # Whoever appends wakes afterwards, in this loop: nothing comes in between unnoticed.
        while not self.items and not self._left:
            self._reader = self.loop.create_future()
            await self._reader
        if self._left:
            return None
        item = self.items.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def hand_to(self, take: Callable[[Event | Exception], None] | None) -> None:
        """Give everything to a function as it comes, in the loop, in place of `next`."""
        self._take = take
        self.wake()

    def wake(self) -> None:
        """Let the reader look again; in its loop."""
        while self._take is not None and self.items and not self._left:
            self._take(self.items.popleft())
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def leave(self) -> None:
        """No event any more."""
        self._left = True
