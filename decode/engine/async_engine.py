"""`AsyncEngine`: one engine for all who ask, from any event loop."""

from __future__ import annotations

import asyncio
import itertools
import sys
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import TracebackType

from d2f.model import DiffusionModel
from decode.api import DEFAULT_BATCH_SIZE
from decode.decoders import Decoder, as_decoder
from decode.decoders.checks import boolean, whole_number
from decode.engine.cache_size import check_slots, default_slots
from decode.engine.engine import Engine
from decode.engine.engine_thread import EngineStats, EngineThread
from decode.engine.outbox import Outbox
from decode.engine.prompts import Prompt, checked
from decode.engine.request import Request
from decode.engine.result import Event
from decode.reporting.notices import doubt_of

DEFAULT_MAX_WAITING = 256


class AsyncEngine:
    """Runs the requests of many callers together, in a thread of its own::

        async with decode.AsyncEngine(model) as engine:
            async for event in engine.generate("Use 3 and 4 to make 12.", "d2f"):
                print(event.forward, event.revealed)
                if event.result is not None:
                    print(event.result.text)

    A request has the tokens that `decode.generate` gives it alone, whatever runs beside it, fails,
    or leaves. batch_size: most requests in a forward. slots: size of the cache; None takes what
    `decode.engine.cache_size.default_slots` says. max_waiting: most requests that may wait, besides
    those that there is room for; one more is refused at once. request_slots, prefill_rows,
    reuse_prefixes: as of `decode.engine.engine.Engine`.

    Leaving ``async with`` finishes what runs and waits, after an exception it cancels it. An engine
    that is forgotten, or that the interpreter's end overtakes, cancels it too.

    Raises InputError for a number out of range.
    """

    def __init__(
        self,
        model: DiffusionModel,
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        slots: int | None = None,
        request_slots: int | None = None,
        max_waiting: int = DEFAULT_MAX_WAITING,
        prefill_rows: int | None = None,
        reuse_prefixes: bool = False,
    ):
        whole_number("batch_size", batch_size)
        whole_number("max_waiting", max_waiting, least=0)
        if slots is None:
            slots = default_slots(model, batch_size)
        whole_number("slots", slots, most=sys.maxsize)
        check_slots(model, slots)
        self.model = model
        self._engine = Engine(
            model,
            batch_size=batch_size,
            slots=slots,
            request_slots=request_slots,
            prefill_rows=prefill_rows,
            reuse_prefixes=reuse_prefixes,
        )
        self._thread = EngineThread(self._engine, max_waiting)
        self._indexes = itertools.count()
        # The thread does not know this object: forgotten, it ends the thread. It does not wait.
        weakref.finalize(self, self._thread.stop).atexit = False

    def generate(
        self,
        prompt: Prompt,
        decoder: Decoder | str,
        *,
        raw: bool = False,
        ignore_eos: bool = False,
    ) -> EventStream:
        """The events of one request as they come, the last with its result, and with its `error`
        where it failed. prompt, decoder, raw: as in `decode.generate`; the decoder's seed is taken
        as it is. ignore_eos: an end id is a token as any other. `Event.request` is a number of the
        request's own.

        Leaving the loop cancels the request, whether by ``break``, an exception or a cancelled
        task (`contextlib.aclosing` where the iterator has a name, which keeps it). A reader who is
        slow holds up nobody: what he has not read is kept, at most an event a forward.

        The first iteration raises QueueFullError, InputError for what cannot be decoded, and
        EngineClosedError, all before the request is queued. An engine that is closed without
        finishing raises EngineClosedError in every loop.
        """
        return EventStream(self, (prompt, decoder), raw, ignore_eos)

    async def submit_all(
        self,
        asked: Sequence[tuple[Prompt, Decoder | str]],
        *,
        raw: bool = False,
        ignore_eos: bool = False,
        views: bool = True,
    ) -> list[EventStream]:
        """Queue several requests (prompt, decoder) at once, or none of them: the events of each, as
        of `generate`. views: whether they have blocks, which cost time in each forward. Raises as
        its first iteration does, QueueFullError where there is no room for all of them."""
        outboxes = await self._enter(asked, raw, ignore_eos, views)
        return [EventStream(self, asked[0], raw, ignore_eos, outbox) for outbox in outboxes]

    @property
    def stats(self) -> EngineStats:
        """Counts, all of one moment."""
        return self._thread.stats

    @property
    def closed(self) -> bool:
        """Whether it refuses all requests: it was closed, or its thread has failed."""
        return self._thread.closed

    async def close(self, *, finish: bool = True) -> None:
        """Refuse new requests, finish those that run and wait, or cancel them, and wait until the
        thread is gone. May be called again, to cancel what takes too long to finish."""
        boolean("finish", finish)
        self._thread.close(finish=finish)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(finish=error is None)

    async def _enter(
        self,
        asked: Sequence[tuple[Prompt, Decoder | str]],
        raw: bool,
        ignore_eos: bool,
        views: bool = True,
    ) -> list[Outbox]:
        """Queue requests, prepared beside the event loop."""
        thread = self._thread
        thread.reserve(len(asked))
        outboxes: list[Outbox] = []
        try:
            requests = await asyncio.to_thread(self._prepare_all, asked, raw, ignore_eos, views)
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

    def _prepare_all(
        self,
        asked: Sequence[tuple[Prompt, Decoder | str]],
        raw: bool,
        ignore_eos: bool,
        views: bool,
    ) -> list[Request]:
        return [self._prepare(prompt, decoder, raw, ignore_eos, views) for prompt, decoder in asked]

    def _prepare(
        self, prompt: Prompt, decoder: Decoder | str, raw: bool, ignore_eos: bool, views: bool
    ) -> Request:
        """A request that the engine can take. Raises InputError. A chat template may take long."""
        boolean("raw", raw)
        boolean("ignore_eos", ignore_eos)
        chosen = as_decoder(decoder, self.model.contract)
        ids, chosen = checked(self.model, prompt, chosen, "the prompt", raw=raw)
        notice = doubt_of(self.model, chosen)
        if notice is not None:
            warnings.warn(notice, stacklevel=1)
        index = next(self._indexes)
        contract = self.model.contract
        if ignore_eos:
            contract = replace(contract, end_ids=())
        request = Request(index, ids, chosen, contract, self.model.tokenizer, views=views)
        self._engine.check_size(request)
        return request


class EventStream(AsyncIterator[Event]):
    """The events of one request, for one reader. It is queued when the first one is asked for, if
    it is not yet; who closes or forgets it before the last one cancels it."""

    def __init__(
        self,
        engine: AsyncEngine,
        asked: tuple[Prompt, Decoder | str],
        raw: bool,
        ignore_eos: bool,
        outbox: Outbox | None = None,
    ):
        self._outbox = outbox
        self._ended = self._reading = False
        self._engine = engine
        self._asked = ([asked], raw, ignore_eos)

    async def __anext__(self) -> Event:
        if self._reading:
            raise RuntimeError("the events of a request have one reader, this is a second one")
        self._reading = True
        try:
            if self._outbox is None and not self._ended:
                self._outbox = await self._enter()
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
        """In place of a loop, for one of `AsyncEngine.submit_all`: have `take` called with each
        event as it comes, in this event loop and without a task, or with what a loop would raise,
        which is the last. It must not raise."""
        outbox = self._outbox
        assert outbox is not None

        def note(item: Event | Exception) -> None:
            self._ended = self._ended or isinstance(item, Exception) or item.result is not None
            take(item)

        outbox.hand_to(note)

    async def aclose(self) -> None:
        """Cancel the request, if it has not ended; nothing follows."""
        self._leave()
        if self._outbox is not None:
            self._outbox.hand_to(None)  # it wakes a reader, too

    def __del__(self) -> None:
        self._leave()

    async def _enter(self) -> Outbox:
        (outbox,) = await self._engine._enter(*self._asked)
        if self._ended:  # closed meanwhile
            self._engine._thread.leave(outbox)
        return outbox

    def _leave(self) -> None:
        if not self._ended and self._outbox is not None:
            self._outbox.leave()
            self._engine._thread.leave(self._outbox)
        self._ended = True
