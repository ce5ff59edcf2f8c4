"""A thread that owns an engine. Others leave it messages, and it leaves them events.

::

    event loops                        the thread                          Engine
    reserve, prepare, enter  ------->  inbox, read between forwards  --->  submit
    leave                    ------->                                --->  cancel
    next  <-------------------------   an outbox for each request    <---  advance
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from weakref import WeakSet

from d2f.errors import EngineClosedError, QueueFullError
from decode.engine.engine import Engine
from decode.engine.outbox import Outbox
from decode.engine.result import Event

SECONDS_AT_EXIT = 30.0  # the longest that a forward in flight holds up the interpreter's end


Message = tuple[Callable[..., None], tuple[Outbox, ...]]  # what the thread is to call


@dataclass(frozen=True)
class EngineStats:
    """What an engine does now and has done.

    running: requests in the batch. waiting: accepted, and not in it yet. finished, cancelled,
    failed: how the others ended; one whose prompt or options were bad was none. refused: for a full
    queue, or after closing. forwards: calls of the model, rows: what they fed. tokens: visible ones
    of those finished. slots: of the cache, slots_used: those that hold a request, or rows of a
    prompt that are kept.
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


class EngineThread:
    """Runs an engine until `close`; all public methods may be called from any thread.

    A request holds a place from `reserve` until it ends. `give_back`, `leave` and `stop` do nothing
    but put a message into the inbox, so that destructors may call them, which come at any moment,
    in the middle of a method of this class and while the interpreter is torn down.
    """

    def __init__(self, engine: Engine, max_waiting: int):
        self.max_waiting = max_waiting
        self._engine = engine
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._outboxes: dict[int, Outbox] = {}  # of the requests in the engine; the thread's own
        self._raised = False  # whether the last forward did
        self._blocked = False  # whether it left some that wait
        self._finishing = self._stopping = False  # what the thread was told
        self._lock = threading.Lock()  # of all below
        self._places = 0  # requests accepted that have not ended
        self._running = self._slots_used = 0
        self._room = engine.batch_size  # how many enter the batch without waiting
        self._counts: Counter[str] = Counter()
        self._closed = self._gone = False
        self._cause: BaseException | None = None  # what ended the thread unasked
        self._thread = threading.Thread(target=self._work, name="decode engine", daemon=True)
        self._thread.start()
        _threads.add(self)

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

    @property
    def closed(self) -> bool:
        """Whether it refuses requests: it was closed, or has ended."""
        with self._lock:
            return self._closed

    def reserve(self, count: int = 1) -> None:
        """Take places in the queue, all or none. Raises QueueFullError and EngineClosedError."""
        with self._lock:
            # Those that the next forward has room for do not count as waiting.
            waiting = self._places - self._running - self._room
            if self._closed or waiting + count > self.max_waiting:
                self._counts["refused"] += count
                if self._closed:
                    raise self._closed_error()
                raise QueueFullError(waiting)
            self._places += count

    def give_back(self) -> None:
        """Give a place back that no request was entered for."""
        self._inbox.put((self._end_place, ()))

    def enter(self, outbox: Outbox) -> None:
        """Hand over a request that has a place. Raises EngineClosedError."""
        with self._lock:
            if self._gone:
                raise self._closed_error()
            self._inbox.put((self._enter, (outbox,)))

    def leave(self, outbox: Outbox) -> None:
        """Cancel a request, if it has not ended; no event of it follows the next forward."""
        self._inbox.put((self._cancel, (outbox,)))

    def close(self, *, finish: bool) -> None:
        """Refuse requests from now on, and end when those accepted have, or are cancelled."""
        with self._lock:
            self._closed = True
        self._inbox.put((self._finish if finish else self._stop, ()))

    def stop(self) -> None:
        """As `close` without finishing; what comes until the thread reads it is cancelled too."""
        self._inbox.put((self._stop, ()))

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread is gone."""
        self._thread.join(seconds)

    def _closed_error(self) -> EngineClosedError:
        cause = self._cause
        error = EngineClosedError(
            "the engine is closed"
            if cause is None
            else f"the engine has stopped: {type(cause).__name__}: {cause}"
        )
        error.__cause__ = cause
        return error

    # What follows runs in the thread.

    def _work(self) -> None:
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
                call, arguments = self._inbox.get(block=not (self._outboxes or self._over()))
                call(*arguments)

    def _finish(self) -> None:
        self._finishing = True

    def _stop(self) -> None:
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
        """One request less."""
        with self._lock:
            self._places -= 1
            self._counts.update(counts)
        self._publish()

    def _publish(self) -> None:
        """Say what runs and what there is room for."""
        with self._lock:
            self._running = len(self._engine.running)
            self._slots_used = self._engine.pool.used
            blocked = self._blocked and self._outboxes
            self._room = 0 if blocked else self._engine.batch_size - self._running

    def _advance(self) -> None:
        try:
            events = self._engine.advance()
            self._raised = False
        except Exception as error:
            # Its frames hold what the forward computed, memory that the others need.
            traceback.clear_frames(error.__traceback__)
            events = self._fail(error)
            self._raised = True
        self._blocked = bool(self._engine.waiting)
        sent = [
            (self._outboxes[event.request], event)
            for event in events
            if event.request in self._outboxes
        ]
        for outbox, event in sent:
            if event.result is not None:
                self._outboxes.pop(outbox.request.index)
                ended = "finished" if event.error is None else "failed"
                self._end_place(**{ended: 1, "tokens": len(event.result.tokens)})
        self._publish()  # before a reader goes on, who may look
        self._send(sent)

    def _fail(self, error: Exception) -> list[Event]:
        """What the model raised concerns all that run. Where it raises twice in a row, those that
        wait are refused, too, and not tried one batch after the other."""
        now, waiting = time.perf_counter(), set(self._engine.waiting)
        requests = [outbox.request for outbox in self._outboxes.values()]
        events = []
        for request in requests:
            if self._raised or request not in waiting:
                self._engine.cancel(request)
                events.append(request.fail(error, now))
        return events

    def _send(self, sent: Iterable[tuple[Outbox, Event | Exception]]) -> None:
        """Into the outboxes, and one call of each loop to wake its readers."""
        woken: dict[asyncio.AbstractEventLoop, list[Outbox]] = {}
        for outbox, item in sent:
            outbox.items.append(item)
            woken.setdefault(outbox.loop, []).append(outbox)
        for loop, outboxes in woken.items():
            try:
                loop.call_soon_threadsafe(_wake, outboxes)
            except RuntimeError:  # the loop is closed: nobody reads any more
                for outbox in outboxes:
                    self._cancel(outbox)

    def _end(self) -> None:
        """Leave nobody to wait for a thread that is gone."""
        with self._lock:
            self._closed = self._gone = True
        self._stopping = True
        self._read_inbox()  # requests that were entered meanwhile are among the messages
        left = list(self._outboxes.values())
        self._outboxes.clear()
        with self._lock:
            self._places = self._running = 0
            self._counts["cancelled" if self._cause is None else "failed"] += len(left)
        self._engine.close()
        self._send((outbox, self._closed_error()) for outbox in left)


def _wake(outboxes: Iterable[Outbox]) -> None:
    for outbox in outboxes:
        outbox.wake()


_threads: WeakSet[EngineThread] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """Threads that nobody closed end before the interpreter does: not while they are in torch."""
    for thread in list(_threads):
        thread.stop()
        thread.join(SECONDS_AT_EXIT)
