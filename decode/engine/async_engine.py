"""`AsyncEngine`: one engine for all who ask, from any event loop.

::

    event loops                     the engine's thread                 Engine
    submit      ------------------> _collect, between forwards  ------> submit, cancel
    take(event) <-- of the loop --- _advance                    <------ advance
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from d2f.errors import EngineClosedError, QueueFullError
from d2f.model import DiffusionModel
from decode.api import DEFAULT_BATCH_SIZE
from decode.decoders import Decoder, as_decoder
from decode.decoders.base import whole_number
from decode.engine.engine import Engine, check_slots, default_slots
from decode.engine.prompts import Prompt, checked
from decode.engine.request import Request
from decode.report import doubt_of
from decode.step import Event

DEFAULT_MAX_WAITING = 256
SECONDS_AT_EXIT = 30.0  # the longest that a forward in flight holds up the interpreter's end


@dataclass(eq=False)
class Ticket:
    """Follow one request that was submitted."""

    request: Request
    loop: asyncio.AbstractEventLoop
    take: Callable[[Event | Exception], None]  # called in the loop
    left: bool = False  # set by a reader who leaves: it is cancelled before the next forward


@dataclass
class EngineStats:
    """Count the requests of an engine, and what it did for them."""

    running: int = 0  # in the batch
    waiting: int = 0  # accepted, and not in it yet
    finished: int = 0  # this and the next two: how the others ended, without those never queued
    cancelled: int = 0
    failed: int = 0
    refused: int = 0  # for a full queue, or after closing
    forwards: int = 0  # calls of the model
    rows: int = 0  # that they fed
    tokens: int = 0  # visible ones of those finished
    slots: int = 0  # of the cache
    slots_used: int = 0  # by requests, or by rows of prompts that are kept


class EngineThread(threading.Thread):
    """Run an engine until it is closed."""

    def __init__(self, engine: Engine, max_waiting: int):
        super().__init__(name="decode engine", daemon=True)
        self._engine = engine
        self._max_waiting = max_waiting
        # Its lock may be taken again by its holder: a destructor, which calls `close`, may run
        # anywhere.
        self._wake = threading.Condition()
        self._new: list[Ticket] = []  # not known to the engine yet
        self._active: dict[int, Ticket] = {}  # by the request's index
        self._stats = EngineStats(slots=engine.pool.slots)  # as of the last forward
        self._blocked = False  # some wait for slots, though the batch has room
        self.closed = self._stopping = False
        self._cause: BaseException | None = None  # what ended the thread unasked
        self.start()

    @property
    def stats(self) -> EngineStats:
        with self._wake:
            waiting = len(self._new) + len(self._active) - self._stats.running
            return replace(self._stats, waiting=waiting)

    def enter(self, tickets: Sequence[Ticket]) -> None:
        """Queue all of these or none. Raises QueueFullError and EngineClosedError."""
        with self._wake:
            # Requests that fit into the next forward do not count as waiting.
            room = self._stats.running if self._blocked else self._engine.batch_size
            waiting = len(self._new) + len(self._active) - room
            if self.closed or waiting + len(tickets) > self._max_waiting:
                self._stats.refused += len(tickets)
                raise self._closed_error() if self.closed else QueueFullError(waiting)
            self._new += tickets
            self._wake.notify()

    def close(self, *, finish: bool = False) -> None:
        """Refuse requests from now on, and end when those accepted have, or cancel them."""
        with self._wake:
            self.closed = True
            self._stopping = self._stopping or not finish
            self._wake.notify()

    def _closed_error(self) -> EngineClosedError:
        cause = self._cause
        why = "is closed" if cause is None else f"has stopped: {type(cause).__name__}: {cause}"
        error = EngineClosedError(f"the engine {why}")
        error.__cause__ = cause
        return error

    # The rest runs in the thread.

    def run(self) -> None:
        try:
            while self._collect():
                self._advance()
        except BaseException as error:  # not the model: what cleans up after it, or an exit
            self._cause = error
        finally:  # leave nobody to wait for a thread that is gone
            with self._wake:
                self.closed = True
                tickets = [*self._active.values(), *self._new]
                self._active, self._new = {}, []
                self._stats.running = 0
                if self._cause is None:
                    self._stats.cancelled += len(tickets)
                else:
                    self._stats.failed += len(tickets)
            self._engine.close()
            self._send([(ticket, self._closed_error()) for ticket in tickets])

    def _collect(self) -> bool:
        """Take in who came, cancel who left, and sleep while nobody is there. False: it is over."""
        with self._wake:
            while not (self._new or self._active or self.closed):
                self._wake.wait()
            new, self._new = self._new, []
            self._active |= {ticket.request.index: ticket for ticket in new}
        for ticket in new:
            self._engine.submit(ticket.request)
        left = [ticket for ticket in self._active.values() if ticket.left]
        for ticket in left:
            self._engine.cancel(ticket.request)
        if left:
            with self._wake:
                for ticket in left:
                    del self._active[ticket.request.index]
                self._stats.cancelled += len(left)
                self._note(blocked=False)
        return not self._stopping and (not self.closed or bool(self._new or self._active))

    def _note(self, *, blocked: bool) -> None:
        """Note how full the engine is; the lock is held."""
        engine, stats, self._blocked = self._engine, self._stats, blocked
        stats.running, stats.slots_used = len(engine.running), engine.pool.used
        stats.forwards, stats.rows = engine.forwards, engine.rows

    def _advance(self) -> None:
        try:
            events = self._engine.advance()
        except Exception as error:  # of the model: it concerns all that run
            # Its frames hold what the forward computed, memory that the others need.
            traceback.clear_frames(error.__traceback__)
            now, failed = time.perf_counter(), list(self._engine.running)
            for request in failed:
                self._engine.cancel(request)
            events = [request.fail(error, now) for request in failed]
        sent: list[tuple[Ticket, Event | Exception]] = []
        with self._wake:
            for event in events:
                ticket = self._active.get(event.request)
                if ticket is None:  # it failed before a forward, and its reader left
                    continue
                sent.append((ticket, event))
                if event.result is not None:
                    del self._active[event.request]
                    self._stats.failed += event.error is not None
                    self._stats.finished += event.error is None
                    self._stats.tokens += len(event.result.tokens)
            # Before a reader goes on, who may look.
            self._note(blocked=bool(self._engine.waiting))
        self._send(sent)

    def _send(self, sent: Sequence[tuple[Ticket, Event | Exception]]) -> None:
        """Give events to their readers, in one call of each loop."""
        for loop in {ticket.loop for ticket, _ in sent}:
            its = [(ticket, item) for ticket, item in sent if ticket.loop is loop]
            try:
                loop.call_soon_threadsafe(_deliver, its)
            except RuntimeError:  # the loop is closed: nobody reads any more
                for ticket, _ in its:
                    ticket.left = True


def _deliver(items: Iterable[tuple[Ticket, Event | Exception]]) -> None:
    for ticket, item in items:
        if not ticket.left:
            ticket.take(item)


@atexit.register
def _stop_all() -> None:
    """End threads that nobody closed before the interpreter ends: not while they are in torch."""
    for thread in threading.enumerate():
        if isinstance(thread, EngineThread):
            thread.close()
            thread.join(SECONDS_AT_EXIT)


class AsyncEngine:
    """Run the requests of many callers together, in a thread of its own::

        async with decode.AsyncEngine(model) as engine:
            async for event in engine.generate("Use 3 and 4 to make 12.", "d2f"):
                print(event.forward, event.revealed)
                if event.result is not None:
                    print(event.result.text)

    A request has the tokens that `decode.generate` gives it alone, whatever runs beside it, fails,
    or leaves.

    batch_size: most requests in a forward.
    slots: size of the cache; None takes what `decode.engine.engine.default_slots` says.
    max_waiting: most requests that may wait, besides those that there is room for; one more is
        refused at once.
    options: request_slots, max_rows, prefill_rows, reuse_prefixes of `decode.engine.engine.Engine`.

    Leaving ``async with`` finishes what runs and waits, after an exception it cancels it. An engine
    that is forgotten, or that the interpreter's end overtakes, cancels it too. Raises InputError
    for a number out of range.
    """

    def __init__(
        self,
        model: DiffusionModel,
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        slots: int | None = None,
        max_waiting: int = DEFAULT_MAX_WAITING,
        **options: Any,
    ):
        whole_number("batch_size", batch_size)
        whole_number("max_waiting", max_waiting, least=0)
        if slots is None:
            slots = default_slots(model, batch_size)
        whole_number("slots", slots, most=sys.maxsize)
        check_slots(model, slots)
        self.model = model
        self._engine = Engine(model, batch_size=batch_size, slots=slots, **options)
        self._thread = EngineThread(self._engine, max_waiting)
        self._indexes = itertools.count()
        # The thread does not know this object: forgotten, it ends the thread. It does not wait.
        weakref.finalize(self, self._thread.close).atexit = False

    async def generate(
        self, prompt: Prompt, decoder: Decoder | str, *, raw: bool = False, ignore_eos: bool = False
    ) -> AsyncIterator[Event]:
        """Decode one request; yields its events as they come, the last with its result, and with
        its `error` where it failed.

        prompt, decoder, raw: as in `decode.generate`; the decoder's seed is taken as it is.
        ignore_eos: an end id is a token as any other.

        Leaving the loop cancels the request, whether by ``break``, an exception or a cancelled
        task (`contextlib.aclosing` where the iterator has a name, which keeps it). A reader who is
        slow holds up nobody: what he has not read is kept, at most an event a forward.

        The first iteration raises QueueFullError, InputError for what cannot be decoded, and
        EngineClosedError, all before the request is queued. An engine that is closed without
        finishing raises EngineClosedError in every loop.
        """
        chosen = as_decoder(decoder, self.model.contract)
        # Beside the event loop: a chat template may take long.
        prepared = await asyncio.to_thread(
            checked, self.model, prompt, chosen, "the prompt", raw=raw
        )
        events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        (ticket,) = self.submit([prepared], lambda _, item: events.put_nowait(item), ignore_eos)
        try:
            while True:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                if event.result is not None:
                    return
        finally:
            ticket.left = True

    def submit(
        self,
        asked: Sequence[tuple[list[int], Decoder]],
        take: Callable[[int, Event | Exception], None],
        ignore_eos: bool = False,
        *,
        views: bool = True,
    ) -> list[Ticket]:
        """Queue several requests (`decode.engine.prompts.checked`: ids, decoder) at once, or none
        of them; call it in an event loop. Raises as the first iteration of `generate` does.

        take: called in that loop with the place of a request and its event, or the error that
            ended the engine. It must neither wait nor raise.
        views: events show their blocks, which costs time in each forward.
        """
        model, tickets = self.model, []
        contract = replace(model.contract, end_ids=()) if ignore_eos else model.contract
        for place, (ids, decoder) in enumerate(asked):
            notice = doubt_of(model, decoder)
            if notice is not None:
                warnings.warn(notice, stacklevel=1)
            index = next(self._indexes)
            request = Request(index, ids, decoder, contract, model.tokenizer, views=views)
            self._engine.check_size(request)
            tickets.append(Ticket(request, asyncio.get_running_loop(), partial(take, place)))
        self._thread.enter(tickets)
        return tickets

    @property
    def stats(self) -> EngineStats:
        return self._thread.stats

    @property
    def closed(self) -> bool:
        """Say whether it refuses all requests: it was closed, or its thread has failed."""
        return self._thread.closed

    async def close(self, *, finish: bool = True) -> None:
        """Refuse new requests, finish those that run and wait, or cancel them, and wait until the
        thread is gone. May be called again, to cancel what takes too long to finish."""
        self._thread.close(finish=finish)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(finish=kind is None)
