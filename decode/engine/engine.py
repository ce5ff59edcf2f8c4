"""The engine: many requests' steps become one forward, its logits become their predictions.

It knows no algorithm. Requests of different lengths run together; a finished one leaves and a
waiting one enters between forwards. Each request owns a contiguous run of slots in one flat cache,
so a row of a batch computes what it would compute alone.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from d2f.cache import SlotCache, SlotPool
from d2f.device import as_current
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.decoders.base import boolean, whole_number
from decode.engine.batch import FlatRows, join
from decode.engine.cuda_graphs import GraphForwards, PendingTable, graphs_wanted, lent_graphs_of
from decode.engine.pieces import share
from decode.engine.prefixes import Prefixes
from decode.engine.request import Request
from decode.engine.row_budget import RowBudget
from decode.engine.sampling import PredictionRequest, Wanted, split, table_of, wanted_of
from decode.step import Event, Predictions, Step


class Engine:
    """Runs requests on one model; used from one thread.

    A request fails alone: what its session raises, logits of its own that are not finite, or a size
    beyond the cache end it with an event whose `error` says so, and the others go on as if it had
    never been there. What the model itself raises concerns all of them: `advance` raises it, and
    does the forward again when it is called again.

    batch_size: most requests in one forward. slots: size of the cache; it must hold the largest
    request, and a request waits while it does not fit. request_slots: most of them that one request
    may need, and so rows that it feeds in a forward, which all others wait for (a decoder that
    drafts feeds many times the sequence, if it is told to); None: all. static: whether forwards
    are padded to a few fixed sizes, on a GPU as CUDA graphs (`decode.engine.cuda_graphs`); None:
    there alone.
    prefill_rows: most rows of prompts, and of steps larger than this, in one forward; what is more
    waits, or is fed in pieces where the mask allows it exactly (`decode.engine.pieces`), so that a
    long prompt does not hold up the requests that run. Each piece is a forward of its request and
    a call in its result. None: every step whole, as many as 4,096 rows hold.
    reuse_prefixes: whether rows of a prompt that another request has fed, one that runs or one
    whose slots nobody has needed since it was done, are copied instead of fed where the mask allows
    it exactly (`decode.engine.prefixes`, which counts them); the model's weights must then stay as
    they are.
    """

    def __init__(
        self,
        model: DiffusionModel,
        *,
        batch_size: int,
        slots: int,
        request_slots: int | None = None,
        static: bool | None = None,
        prefill_rows: int | None = None,
        reuse_prefixes: bool = False,
    ):
        boolean("reuse_prefixes", reuse_prefixes)
        if prefill_rows is not None:
            whole_number("prefill_rows", prefill_rows)
        if request_slots is not None:
            whole_number("request_slots", request_slots, most=sys.maxsize)
        self.model = model
        self.device = model.device
        self.batch_size = batch_size
        self.prefill_rows = prefill_rows
        if static is None:
            # Of a model in parts every rank would have to capture its own.
            static = graphs_wanted(self.device) and model.tensor_parallel == 1
        self.static: GraphForwards | None = None
        self._give_back: weakref.finalize[..., Engine] | None = None
        if static:
            lent = lent_graphs_of(model).lend(model, slots)
            self.static = lent[1]
            self._give_back = weakref.finalize(self, lent_graphs_of(model).take_back, lent)
            self._give_back.atexit = False
        self.cache: SlotCache = self.static.cache if self.static else model.new_cache(slots)
        self.pool = SlotPool(slots)
        self.request_slots = slots if request_slots is None else request_slots
        self.prefixes = Prefixes(self.cache, on=reuse_prefixes)
        self.budget = RowBudget(model)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.forwards = 0
        self.rows = 0  # that they fed
        self._failed: list[Event] = []  # of requests that failed before a forward
        self.early = self.device.type == "cuda"  # start the next forward before events are taken
        self._started: StartedForward | None = None
        self._prepared = 0.0  # seconds of it that no later forward of as many rows takes
        self._early_error: Exception | None = None  # of a forward that was started early

    def submit(self, request: Request) -> None:
        """Queue a request; it enters when there is room. Allowed while the engine runs."""
        self.waiting.append(request)

    def check_size(self, request: Request) -> None:
        """Raise InputError for a request that the cache can never hold, or that needs more of it
        than one may."""
        slots = request.session.slots
        if slots > self.pool.slots:
            raise InputError(f"needs {slots} slots of the cache, which has {self.pool.slots}")
        if slots > self.request_slots:
            raise InputError(
                f"needs {slots} slots of the cache, a request may have {self.request_slots}: "
                "expected a shorter prompt or response, or a decoder that drafts less"
            )

    def close(self) -> None:
        """Give cache and graphs back, for the model's next engine; one that is forgotten does so by
        itself. What still runs is dropped, and nothing may be asked of the engine after it."""
        if self._give_back is not None:
            self._give_back()

    def run(self) -> Iterator[Event]:
        """Decode until nothing runs or waits; an event for each request after each forward."""
        while self.waiting or self.running or self._failed:
            yield from self.advance()

    def cancel(self, request: Request) -> bool:
        """Take a request out, whether it waits, runs or is in a forward that was started early: no
        event of it follows and its slots are free. False where it was not there (any more)."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._release(request)
        else:
            return False
        return True

    def advance(self) -> list[Event]:
        """Do one forward; the events of the requests that were in it. On a GPU the next one is
        started before they are handed over, so that it runs beside what the caller does with
        them."""
        error, self._early_error = self._early_error, None
        if error is not None:
            raise error
        with as_current(self.device):
            # None at the first call, and where nothing was left to start at the end of the last.
            if self._started is None:
                self._start_forward()
            events = self._finish_forward()
            if self.early:
                try:
                    self._start_forward()
                except Exception as error:  # of the next call: these events are not lost to it
                    self._early_error = error
        failed, self._failed = self._failed, []
        return events + failed

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.batch_size:
            request, now = self.waiting[0], time.perf_counter()
            try:
                base = self._place(request)
            except Exception as error:
                # It can never run: it leaves the queue with its error, and those behind it are
                # looked at.
                self._failed.append(self.waiting.popleft().fail(error, now))
                continue
            if base is None:  # first come, first served: smaller ones behind it wait too
                return
            self.waiting.popleft()
            request.start(base, now)
            self.running.append(request)

    def _place(self, request: Request) -> int | None:
        """Where the slots of a request begin, None where there is no room now."""
        self.check_size(request)
        slots = request.session.slots
        base = self.pool.allocate(slots)
        if base is None and request.feed is not None:
            self.prefixes.wanted(request.feed)  # what it will want is given up last
        while base is None and (kept := self.prefixes.evict()) is not None:
            self.pool.free(kept)
            base = self.pool.allocate(slots)
        return base

    def _release(self, request: Request, *, clear: bool = True) -> None:
        """Take a running request out. clear: what it wrote may be anything."""
        self.running.remove(request)
        self.budget.forget(request)
        if not clear and self.prefixes.keep(request.base):
            return
        self.prefixes.drop(request.base)
        if clear:
            # A slot that a row does not see may still enter its attention at a weight of 0, and 0
            # times NaN is NaN: what a failed request wrote must not await the next owner of its
            # slots.
            self.cache.clear(request.base, self.pool.end(request.base))
            if self.static is not None:  # nor the slot of the rows that pad, which met it, too
                self.cache.clear(self.static.slots, self.static.slots + 1)
        self.pool.free(request.base)

    def _start_forward(self) -> None:
        """Admit what fits and start the forward of all requests that run."""
        self._admit()
        began = time.perf_counter()
        self.budget.assign(self.running)
        feeds = [(r, r.feed) for r in self.running if r.feed is not None]
        for request, feed in feeds:
            # Also of one that has waited for its turn: another may have fed the rows meanwhile.
            if feed.first and not feed.fed:
                self.prefixes.fill(request.base, feed)
        stops = share([feed for _, feed in feeds], self.prefill_rows)
        fed = [(r, feed.piece(stop)) for (r, feed), stop in zip(feeds, stops, strict=True) if stop]
        if not fed:
            return
        # In the order of their slots, however they came and went: rows that lie together see keys
        # that lie together, and attention loads tiles of both.
        fed.sort(key=lambda pair: pair[0].base)
        for request, step in fed:
            self.prefixes.note(request.base, step)
        self._count([step for _, step in fed])
        # A step belongs to the forward that it was started in: a request that is cancelled now, or
        # admitted, changes the next one only.
        groups = [
            PredictionRequest(r.sampler, len(step.read), step.queried_tokens, step.uncertainty)
            for r, step in fed
        ]
        rows, wanted = join(fed), wanted_of(groups)
        self._prepared = 0.0
        pending = None if self.static is None else self.static.start(rows, wanted)
        if pending is None:  # no GPU, or more rows than any fixed size has
            pending = self._compute(rows, wanted)
        self._started = StartedForward(fed, groups, began + self._prepared, pending)

    def _count(self, steps: list[Step]) -> None:
        self.forwards += 1
        self.rows += sum(len(step.tokens) for step in steps)

    def _compute(self, flat: FlatRows, wanted: Wanted) -> PendingTable:
        """The forward of any number of rows; what it returns waits for the table."""
        threads = self.budget.learned.best_threads(len(flat.tokens))
        with torch.inference_mode(), threads:
            before = time.perf_counter()
            self.model.prepare_rows(len(flat.tokens))
            self._prepared += time.perf_counter() - before
            rows = flat.on(self.device)
            # Each layer writes keys and values to these slots before its rows attend, so rows of
            # one forward see each other, and a slot that is fed again is overwritten in place.
            self.cache.slots = rows.slots
            logits = self.model.decode_rows(
                rows.tokens, rows.positions, rows.plan, self.cache, rows.read
            )
            table = table_of(logits, wanted, native=self.model.scores_natively)
        return lambda: table.cpu().numpy()  # the copy waits for the device

    def _finish_forward(self) -> list[Event]:
        """Wait for the forward and hand its predictions to the requests."""
        forward, self._started = self._started, None
        if forward is None:
            return []
        events = []
        table = forward.wait()
        ended = time.perf_counter()
        found = split(table, forward.groups)
        for (request, step), group, predictions in zip(
            forward.fed, forward.groups, found, strict=True
        ):
            if request not in self.running:
                continue  # it was cancelled meanwhile
            assert request.feed is not None
            # Perhaps another's fault, who with pieces or copied rows need not be in this forward.
            # Only a request whose logits are not finite alone either has failed by itself.
            anywhere = self.prefill_rows is not None or request.feed.copied
            if predictions is None and (len(forward.fed) > 1 or anywhere):
                predictions = self._alone(request, request.feed.anew(), group)
            events.append(self._accept(request, step, predictions))
        took, after = ended - forward.began, time.perf_counter() - ended
        self.budget.learned.note_forward(forward.rows, forward.reads, len(forward.fed), took, after)
        return events

    def _alone(self, request: Request, step: Step, group: PredictionRequest) -> Predictions | None:
        """A step again without the others: a row that sees nothing of a request whose values are
        not finite may still have met them, at a weight of 0."""
        self._count([step])
        table = self._compute(join([(request, step)]), wanted_of([group]))()
        return split(table, [group])[0]

    def _accept(self, request: Request, step: Step, predictions: Predictions | None) -> Event:
        """Hand a request its predictions; the event that says what they changed. An error of the
        request's own ends it here and goes no further."""
        now, feed = time.perf_counter(), request.feed
        assert feed is not None
        try:
            request.accept(step, predictions, now)
            if request.feed is not feed:  # all of its rows were fed
                self.budget.note_request(request, step, first=feed.first)
                if feed.first:
                    self.prefixes.add(request.base, feed)
            event = request.event()
        except Exception as error:
            self._release(request)
            return request.fail(error, now)
        if request.done:
            # What it wrote is finite, as what was read of it is, and adds nothing at a weight of 0.
            self._release(request, clear=not len(step.read))
        return event


@dataclass(frozen=True)
class StartedForward:
    """A forward that is under way on the device, or done.

    fed: the steps in it, with their requests. groups: what each of them wants of its rows. began:
    when its making was begun, in the seconds of perf_counter; later by what only the first forward
    of so many rows has to do. pending: waits for the forward and gives its table.
    """

    fed: list[tuple[Request, Step]]
    groups: list[PredictionRequest]
    began: float
    pending: PendingTable

    @property
    def rows(self) -> int:
        """How many it feeds."""
        return sum(len(step.tokens) for _, step in self.fed)

    @property
    def reads(self) -> int:
        """Of how many predictions are wanted."""
        return sum(group.count for group in self.groups)

    def wait(self) -> NDArray[np.float64]:
        """Its table, as `decode.engine.sampling.table_of` has it."""
        return self.pending()
