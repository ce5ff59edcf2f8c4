"""`AsyncEngine`: one engine for all who ask, from any event loop.

::

    event loops                        the engine's thread                 Engine
    reserve, prepare, enter  ------->  inbox, read between forwards  --->  submit
    leave                    ------->                                --->  cancel
    next  <-------------------------   an outbox for each request    <---  advance
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from d2f.errors import EngineClosedError, QueueFullError
from d2f.model import DiffusionModel
from decode.api import DEFAULT_BATCH_SIZE
from decode.decoders import Decoder, as_decoder
from decode.decoders.base import boolean, whole_number
from decode.engine.engine import Engine, check_slots, default_slots
from decode.engine.prompts import Prompt, checked
from decode.engine.request import Request
from decode.report import doubt_of
from decode.step import Event

DEFAULT_MAX_WAITING = 256
SECONDS_AT_EXIT = 30.0  # the longest that a forward in flight holds up the interpreter's end


class Outbox:
    """Events of one request on their way to its one reader, at most one a forward."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop):
        self.request = request
        self.loop = loop
        self.left = False
        self._items: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._take: Callable[[Event | Exception], None] | None = None

    async def next(self) -> Event | None:
        """Wait for the next event, None once its reader has left. Raises an error that came."""
        item = None if self.left else await self._items.get()
        if isinstance(item, Exception):
            raise item
        return None if self.left else item

    def hand_to(self, take: Callable[[Event | Exception], None]) -> None:
        """Give everything to a function as it comes, in the loop, in place of `next`."""
        self._take = take
        while not self._items.empty():
            self.put(self._items.get_nowait())

    def put(self, item: Event | Exception | None) -> None:
        """Give the reader an item; in its loop."""
        if self._take is None or item is None:
            self._items.put_nowait(item)
        elif not self.left:
            self._take(item)


@dataclass(frozen=True)
class EngineStats:
    """Counts of an engine, all of one moment.

    running: requests in the batch. waiting: accepted, and not in it yet.
    finished, cancelled, failed: how the others ended; those with a bad prompt do not count.
    refused: for a full queue, or after closing.
    forwards: calls of the model. rows: what they fed.
    tokens: visible ones of those finished.
    slots: of the cache. slots_used: those that hold a request, or rows of a prompt that are kept.
    """

    running: int
    waiting: int
    finished: int
    cancelled: int
    failed: int
    refused: int
    forwards: int
    rows: int
    tokens: int
    slots: int
    slots_used: int


class EngineThread(threading.Thread):
    """Runs an engine until `close`; all public methods may be called from any thread.

    A request holds a place from `reserve` until it ends. `give_back`, `leave` and `stop` do nothing
    but put a message into the inbox, so that destructors may call them at any moment,
    also while the interpreter is torn down and this module's names are gone.
    """

    def __init__(self, engine: Engine, max_waiting: int):
        super().__init__(name="decode engine", daemon=True)
        self.max_waiting = max_waiting
        self._engine = engine
        self._inbox: SimpleQueue[tuple[Any, ...]] = SimpleQueue()  # method, arguments
        self._outboxes: dict[int, Outbox] = {}  # of the requests in the engine; the thread's own
        self._finishing = self._stopping = False  # what the thread was told
        self._lock = threading.Lock()  # of all below
        self._places = 0  # requests accepted that have not ended
        self._running = self._slots_used = 0
        self._room = engine.batch_size  # how many enter the batch without waiting
        self._counts: Counter[str] = Counter()
        self.closed = self._gone = False
        self._cause: BaseException | None = None  # what ended the thread unasked
        self.start()

    @property
    def stats(self) -> EngineStats:
        with self._lock:
            names = ("finished", "cancelled", "failed", "refused", "tokens")
            return EngineStats(
                running=self._running,
                waiting=self._places - self._running,
                forwards=self._engine.forwards,
                rows=self._engine.rows,
                slots=self._engine.pool.slots,
                slots_used=self._slots_used,
                **{name: self._counts[name] for name in names},
            )

    def reserve(self, count: int = 1) -> None:
        """Take places in the queue, all or none. Raises QueueFullError and EngineClosedError."""
        with self._lock:
            # Those that the next forward has room for do not count as waiting.
            waiting = self._places - self._running - self._room
            if self.closed or waiting + count > self.max_waiting:
                self._counts["refused"] += count
                raise self._closed_error() if self.closed else QueueFullError(waiting)
            self._places += count

    def give_back(self) -> None:
        """Give a place back that no request was entered for."""
        self._inbox.put((self._end_place,))

    def enter(self, outbox: Outbox) -> None:
        """Hand over a request that has a place. Raises EngineClosedError."""
        with self._lock:
            if self._gone:
                raise self._closed_error()
            self._inbox.put((self._enter, outbox))

    def leave(self, outbox: Outbox) -> None:
        """Cancel a request, if it has not ended; no event of it follows the next forward."""
        self._inbox.put((self._cancel, outbox))

    def close(self, *, finish: bool) -> None:
        """Refuse requests from now on, and end when those accepted have, or are cancelled."""
        with self._lock:
            self.closed = True
        self._inbox.put((self._finish if finish else self._cancel_all,))

    def stop(self) -> None:
        """Cancel all, also what comes until the thread reads this, and end."""
        self._inbox.put((self._cancel_all,))

    def _closed_error(self) -> EngineClosedError:
        cause = self._cause
        why = "is closed" if cause is None else f"has stopped: {type(cause).__name__}: {cause}"
        error = EngineClosedError(f"the engine {why}")
        error.__cause__ = cause
        return error

    # What follows runs in the thread.

    def run(self) -> None:
        try:
            while not self._over():
                self._read_inbox()
                if self._outboxes:
                    self._advance()
        except BaseException as error:  # not the model: what cleans up after it, or an exit
            self._cause = error
        finally:
            self._end()

    def _over(self) -> bool:
        # A place without an outbox: its request is being prepared.
        return self._stopping or (self._finishing and not self._places)

    def _read_inbox(self) -> None:
        """Do what the messages say; without a request sleep until there is one."""
        with contextlib.suppress(Empty):
            while True:
                call, *arguments = self._inbox.get(block=not (self._outboxes or self._over()))
                call(*arguments)

    def _finish(self) -> None:
        self._finishing = True

    def _cancel_all(self) -> None:
        self._stopping = True

    def _enter(self, outbox: Outbox) -> None:
        self._outboxes[outbox.request.index] = outbox
        if not self._gone:
            self._engine.submit(outbox.request)

    def _cancel(self, outbox: Outbox) -> None:
        if self._outboxes.pop(outbox.request.index, None) is None:
            return  # it has ended
        if not self._gone:
            self._engine.cancel(outbox.request)
        self._end_place(cancelled=1)

    def _end_place(self, **counts: int) -> None:
        with self._lock:
            self._places -= 1
            self._counts.update(counts)
        self._publish()

    def _publish(self, *, blocked: bool = False) -> None:
        """Say what runs and what there is room for. blocked: some wait for slots."""
        with self._lock:
            self._running = len(self._engine.running)
            self._slots_used = self._engine.pool.used
            self._room = 0 if blocked else self._engine.batch_size - self._running

    def _advance(self) -> None:
        try:
            events = self._engine.advance()
        except Exception as error:
            # Its frames hold what the forward computed, memory that the others need.
            traceback.clear_frames(error.__traceback__)
            events = self._fail(error)
        sent: list[tuple[Outbox, Event | Exception]] = []
        for event in events:
            outbox = self._outboxes.get(event.request)
            if outbox is None:
                continue
            sent.append((outbox, event))
            if event.result is not None:
                del self._outboxes[event.request]
                ended = "finished" if event.error is None else "failed"
                self._end_place(**{ended: 1, "tokens": len(event.result.tokens)})
        # Before a reader goes on, who may look.
        self._publish(blocked=bool(self._engine.waiting and self._outboxes))
        self._send(sent)

    def _fail(self, error: Exception) -> list[Event]:
        """End all that run: what the model raised concerns them."""
        now, failed = time.perf_counter(), list(self._engine.running)
        for request in failed:
            self._engine.cancel(request)
        return [request.fail(error, now) for request in failed]

    def _send(self, sent: Iterable[tuple[Outbox, Event | Exception]]) -> None:
        """Give events to their readers, in one call of each loop."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Outbox, Event | Exception]]] = {}
        for outbox, item in sent:
            loops.setdefault(outbox.loop, []).append((outbox, item))
        for loop, items in loops.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # the loop is closed: nobody reads any more
                for outbox, _ in items:
                    self._cancel(outbox)

    def _end(self) -> None:
        """Leave nobody to wait for a thread that is gone."""
        with self._lock:
            self.closed = self._gone = True
        self._stopping = True
        self._read_inbox()  # requests that were entered meanwhile are among the messages
        left = list(self._outboxes.values())
        self._outboxes.clear()
        with self._lock:
            self._places = self._running = 0
            self._counts["cancelled" if self._cause is None else "failed"] += len(left)
        self._engine.close()
        self._send((outbox, self._closed_error()) for outbox in left)


def _deliver(items: Iterable[tuple[Outbox, Event | Exception]]) -> None:
    for outbox, item in items:
        outbox.put(item)


@atexit.register
def _stop_all() -> None:
    """End threads that nobody closed before the interpreter ends: not while they are in torch."""
    for thread in threading.enumerate():
        if isinstance(thread, EngineThread):
            thread.stop()
            thread.join(SECONDS_AT_EXIT)


class AsyncEngine:
    """Runs the requests of many callers together, in a thread of its own::

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
        weakref.finalize(self, self._thread.stop).atexit = False

    def generate(
        self, prompt: Prompt, decoder: Decoder | str, *, raw: bool = False, ignore_eos: bool = False
    ) -> EventStream:
        """Decode one request; returns its events as they come, the last with its result, and with
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
        options = {"raw": raw, "ignore_eos": ignore_eos, "views": True}
        return EventStream(self._thread, partial(self._enter, [(prompt, decoder)], **options))

    async def submit_all(
        self,
        asked: Sequence[tuple[Prompt, Decoder | str]],
        *,
        raw: bool = False,
        ignore_eos: bool = False,
        views: bool = True,
    ) -> list[EventStream]:
        """Queue several requests (prompt, decoder) at once, or none of them; returns the events of
        each, as `generate` does. views: events show their blocks, which costs time in each forward.
        Raises as its first iteration does, QueueFullError where there is no room for all."""
        outboxes = await self._enter(asked, raw=raw, ignore_eos=ignore_eos, views=views)
        return [EventStream(self._thread, outbox=outbox) for outbox in outboxes]

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
        boolean("finish", finish)
        self._thread.close(finish=finish)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(finish=kind is None)

    async def _enter(
        self, asked: Sequence[tuple[Prompt, Decoder | str]], **options: bool
    ) -> list[Outbox]:
        """Queue requests, prepared beside the event loop: a chat template may take long."""
        thread = self._thread
        thread.reserve(len(asked))
        outboxes: list[Outbox] = []
        try:
            requests = await asyncio.to_thread(self._prepare, asked, **options)
            for request in requests:
                outbox = Outbox(request, asyncio.get_running_loop())
                thread.enter(outbox)
                outboxes.append(outbox)
        except BaseException:
            for outbox in outboxes:
                thread.leave(outbox)
            for _ in asked[len(outboxes) :]:
                thread.give_back()
            raise
        return outboxes

    def _prepare(
        self,
        asked: Sequence[tuple[Prompt, Decoder | str]],
        *,
        raw: bool,
        ignore_eos: bool,
        views: bool,
    ) -> list[Request]:
        """Make requests that the engine can take. Raises InputError."""
        boolean("raw", raw)
        boolean("ignore_eos", ignore_eos)
        model, requests = self.model, []
        contract = replace(model.contract, end_ids=()) if ignore_eos else model.contract
        for prompt, decoder in asked:
            chosen = as_decoder(decoder, model.contract)
            ids, chosen = checked(model, prompt, chosen, "the prompt", raw=raw)
            notice = doubt_of(model, chosen)
            if notice is not None:
                warnings.warn(notice, stacklevel=1)
            index = next(self._indexes)
            request = Request(index, ids, chosen, contract, model.tokenizer, views=views)
            self._engine.check_size(request)
            requests.append(request)
        return requests


class EventStream(AsyncIterator[Event]):
    """The events of one request, for one reader. It is queued when the first one is asked for, if
    it is not yet; who closes or forgets it before the last one cancels it."""

    def __init__(
        self,
        thread: EngineThread,
        enter: Callable[[], Any] | None = None,
        outbox: Outbox | None = None,
    ):
        self._outbox = outbox
        self._ended = self._reading = False
        self._thread, self._enter = thread, enter

    async def __anext__(self) -> Event:
        if self._reading:
            raise RuntimeError("the events of a request have one reader, this is a second one")
        self._reading = True
        try:
            if self._outbox is None and self._enter is not None and not self._ended:
                (self._outbox,) = await self._enter()
                if self._ended:  # closed meanwhile
                    self._thread.leave(self._outbox)
            event = None if self._ended or self._outbox is None else await self._outbox.next()
        except BaseException:  # a task that is cancelled, too
            self._leave()
            raise
        finally:
            self._reading = False
        if event is None:
            raise StopAsyncIteration
        self._ended = event.result is not None
        return event

    def hand_to(self, take: Callable[[Event | Exception], None]) -> None:
        """Have `take` called with each event as it comes, in this event loop and without a task, or
        with what a loop would raise, which is the last; in place of a loop, for one of
        `AsyncEngine.submit_all`. It must not raise."""
        assert self._outbox is not None

        def note(item: Event | Exception) -> None:
            self._ended = self._ended or isinstance(item, Exception) or item.result is not None
            take(item)

        self._outbox.hand_to(note)

    async def aclose(self) -> None:
        """Cancel the request, if it has not ended; nothing follows."""
        self._leave()
        if self._outbox is not None:
            self._outbox.put(None)  # it wakes a reader

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self._ended and self._outbox is not None:
            self._outbox.left = True
            self._thread.leave(self._outbox)
        self._ended = True
