"""The engine: many requests' steps become one forward, its logits become their predictions.

It knows no algorithm. Requests of different lengths run together; a finished one leaves and a
waiting one enters between forwards. Each request owns a contiguous run of slots in one flat cache,
so a row of a batch computes what it would compute alone.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress

import psutil
import torch

from d2f.cache import SlotCache, SlotPool
from d2f.device import as_current
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.decoders.base import whole_number
from decode.engine.batch import (
    FlatRows,
    PredictionRequest,
    Wanted,
    join,
    split,
    table_of,
    wanted_of,
)
from decode.engine.cuda_graphs import (
    GraphForwards,
    PendingTable,
    free_graphs,
    graphs_wanted,
    lend_graphs,
)
from decode.engine.pieces import Feed, share
from decode.engine.prefixes import Prefixes
from decode.engine.request import Request
from decode.step import Event, Predictions, Step

Fed = list[tuple[Request, Step]]

CPU_MAX_ROWS = 256
"""For a model that fits in a CPU's caches, where a forward costs more than its rows: windows of 16
pay up to about 16 requests in flight (benchmarks/max_rows.py)."""
CPU_MAX_ROWS_OF_LARGE = 4
"""For a model whose weights are read from memory in every forward: four rows cost little more than
one, further rows cost their arithmetic."""
CPU_MAX_ROWS_IN_TILES = 8
"""The same where AMX multiplies: a row costs about a third as much."""
LARGE = 64 << 20  # bytes of weights, about what a CPU's caches hold
GPU_MAX_ROWS = 256
"""A GPU computes about this many rows in the time that it takes to read all weights."""
WHOLE_ROWS = 4096  # of prompts in one forward: more would take memory and gain nothing

LONG = 4096  # positions of a long request


def default_slots(model: DiffusionModel, batch_size: int) -> int:
    """Choose the cache's size: room for `batch_size` requests of 4,096 positions or the model's
    context, whichever is shorter, and for one that fills the context; at most half of the memory
    that is free on the model's device."""
    context = model.context_length
    wanted = max(context, batch_size * min(context, LONG))
    return max(1, min(wanted, free_bytes(model.device) // 2 // _slot_bytes(model)))


def check_slots(model: DiffusionModel, slots: int) -> None:
    """Raise InputError if the free memory does not hold so many slots: a system that overcommits
    memory would kill a process later."""
    slot, free = _slot_bytes(model), free_bytes(model.device)
    if slots > free // slot:
        raise InputError(
            f"slots: {slots} take {slots * slot / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are "
            f"free on {model.device}: expected {free // slot} at most"
        )


def _slot_bytes(model: DiffusionModel) -> int:
    slot = sum(k.nbytes + v.nbytes for k, v in model.new_cache(1).layers)
    # Processes that have a part of the model each share a CPU's memory.
    return slot * model.tensor_parallel if model.device.type == "cpu" else slot


def default_max_rows(model: DiffusionModel) -> int:
    """Choose how many rows a forward should have: as many as are nearly free."""
    if model.device.type == "cuda":
        return GPU_MAX_ROWS
    size = sum(p.numel() * p.element_size() for p in model.backbone.parameters())
    if size < LARGE:
        return CPU_MAX_ROWS
    in_tiles = getattr(model.compiled_rows, "in_tiles", False)
    return CPU_MAX_ROWS_IN_TILES if in_tiles else CPU_MAX_ROWS_OF_LARGE


def free_bytes(device: torch.device | str) -> int:
    """Count the bytes that are free of the device's memory."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


class Engine:
    """Runs requests on one model; used from one thread.

    A request fails alone: if its session raises, its logits are not finite or it is too large for
    the cache, its last event has the `error`, and the others go on as if it had never been there.
    What the model itself raises concerns all requests: `advance` raises it, and the next call does
    the forward again.

    batch_size: most requests in one forward.
    slots: size of the cache; a request waits until it fits.
    request_slots: most slots that one request may need; None: all.
    max_rows: rows that one forward should have; None: `default_max_rows`. A lossless session
        speculates ``max_rows // running`` wide, at least one (self-drafting also by rows that pay);
        its tokens do not depend on it.
    static: pad forwards to a few fixed sizes, on a GPU as CUDA graphs
        (`decode.engine.cuda_graphs`); None: there alone.
    prefill_rows: most rows of prompts, and of other steps that are larger, in one forward, so that
        a long prompt does not hold up the requests that run. Further rows wait, or are fed in
        pieces where the mask allows that exactly (`decode.engine.pieces`); each piece is a forward
        of its request and a call in its result. None: every step whole.
    reuse_prefixes: copy the rows of a prompt that another request has fed, where the mask allows
        that exactly (`decode.engine.prefixes`). The weights must then stay as they are.
    """

    def __init__(
        self,
        model: DiffusionModel,
        *,
        batch_size: int,
        slots: int,
        request_slots: int | None = None,
        max_rows: int | None = None,
        static: bool | None = None,
        prefill_rows: int | None = None,
        reuse_prefixes: bool = False,
    ):
        for name, value in (("prefill_rows", prefill_rows), ("max_rows", max_rows)):
            if value is not None:
                whole_number(name, value)
        self.model = model
        self.device = model.device
        cuda = self.device.type == "cuda"
        self.batch_size = batch_size
        self.max_rows = max_rows or default_max_rows(model)
        self.prefill_rows = prefill_rows
        if static is None:
            # With a model in parts, every rank would have to capture its own graph.
            static = graphs_wanted(self.device) and model.tensor_parallel == 1
        self.static: GraphForwards | None = None
        self._give_back: weakref.finalize[..., Engine] | None = None
        if static:
            lent = lend_graphs(model, slots)
            self.static = lent[1]
            self._give_back = weakref.finalize(self, free_graphs(model).append, lent)
            self._give_back.atexit = False
        self.cache: SlotCache = self.static.cache if self.static else model.new_cache(slots)
        self.pool = SlotPool(slots)
        self.request_slots = slots if request_slots is None else request_slots
        self.prefixes = Prefixes(self.cache) if reuse_prefixes else None
        self.in_pieces = reuse_prefixes or prefill_rows is not None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.forwards = 0
        self.rows = 0  # that they fed
        self._failed: list[Event] = []  # of requests that failed before a forward
        self.early = cuda  # start the next forward before events are taken
        # The forward under way: its steps with their requests, what each wants, and its table.
        self._started: tuple[Fed, list[PredictionRequest], PendingTable] | None = None

    def submit(self, request: Request) -> None:
        """Queue a request; it enters when there is room. Allowed while the engine runs."""
        self.waiting.append(request)

    def check_size(self, request: Request) -> None:
        """Raise InputError if a request needs more slots than the cache has or one may take."""
        slots = request.session.slots
        if slots > self.pool.slots:
            raise InputError(f"needs {slots} slots of the cache, which has {self.pool.slots}")
        if slots > self.request_slots:
            raise InputError(
                f"needs {slots} slots of the cache, a request may have {self.request_slots}: "
                "expected a shorter prompt or response, or a decoder that drafts less"
            )

    def close(self) -> None:
        """Give cache and graphs back for the model's next engine, as an engine that is collected
        does. Requests that run are dropped; the engine must not be used any more."""
        if self._give_back is not None:
            self._give_back()

    @property
    def busy(self) -> bool:
        """Say whether a request runs, waits, or has an event that was not returned yet."""
        return bool(self.waiting or self.running or self._failed)

    def run(self) -> Iterator[Event]:
        """Decode until nothing runs or waits; an event for each request after each forward."""
        while self.busy:
            yield from self.advance()

    def cancel(self, request: Request) -> bool:
        """Take a request out, whether it waits, runs or is in a forward that was started early: it
        has no further event and its slots are free. Returns False if it was not there."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._release(request)
        else:
            return False
        return True

    def advance(self) -> list[Event]:
        """Do one forward; returns the events of its requests. On a GPU the next forward is started
        first, so that it runs while the caller handles the events."""
        cuda = self.device.type == "cuda"
        with as_current(self.device) if cuda else nullcontext():
            # None at the first call, and where nothing was left to start at the end of the last.
            if self._started is None:
                self._start_forward()
            events = self._finish_forward()
            if self.early:
                # These events are not lost to what it raises: the next call starts it again.
                with suppress(Exception):
                    self._start_forward()
        failed, self._failed = self._failed, []
        return events + failed

    def _share(self) -> float:
        """Compute each session's share of the next forward's rows."""
        count = min(self.batch_size, len(self.running) + len(self.waiting))
        return self.max_rows / max(1, count)

    def _admit(self) -> None:
        rows = 0  # of prompts that enter
        while self.waiting and len(self.running) < self.batch_size:
            request = self.waiting[0]
            try:
                step = request.begin(self._share())
                if rows and self.prefill_rows is None and rows + len(step.tokens) > WHOLE_ROWS:
                    return
                base = self._place(request, step)
            except Exception as error:
                # It can never run: it leaves the queue, and the next one is looked at.
                event = self.waiting.popleft().fail(error, time.perf_counter())
                self._failed.append(event)
                continue
            if base is None:  # first come, first served: smaller ones behind it wait too
                return
            self.waiting.popleft()
            request.base, request.began = base, time.perf_counter()
            self.running.append(request)
            rows += len(step.tokens)

    def _place(self, request: Request, step: Step) -> int | None:
        """Allocate a request's slots; returns the first, None if there is no room now."""
        self.check_size(request)
        slots = request.session.slots
        base = self.pool.allocate(slots)
        if base is None and self.prefixes is not None:
            self.prefixes.wanted(Feed(step))  # its own prefix is evicted last
            while base is None and (kept := self.prefixes.evict()) is not None:
                self.pool.free(kept)
                base = self.pool.allocate(slots)
        return base

    def _release(self, request: Request, *, clear: bool = True) -> None:
        """Take a running request out. clear: what it wrote may be anything."""
        self.running.remove(request)
        if self.prefixes is not None:
            if not clear and self.prefixes.keep(request.base):
                return
            self.prefixes.drop(request.base)
        if clear:
            # A slot that a row does not see may enter its attention at a weight of 0, and 0 times
            # NaN is NaN: the next owner of the slots must not find what a failed request wrote.
            self.cache.clear(request.base, self.pool.end(request.base))
            if self.static is not None:  # the rows that pad have met it, too
                self.cache.clear(self.static.slots, self.static.slots + 1)
        self.pool.free(request.base)

    def _start_forward(self) -> None:
        """Admit what fits and start a forward of all that run."""
        self._admit()
        if self.in_pieces:
            fed = self._pieces()
        else:
            fed = [(r, r.step) for r in self.running if r.step is not None]
        if fed:
            # In the order of their slots: attention loads tiles of neighbouring rows and keys.
            fed.sort(key=lambda pair: pair[0].base)
            # A request that is cancelled or admitted from now on changes the next forward only.
            self._started = fed, *self._start(fed)

    def _start(
        self, fed: Fed, *, static: bool = True
    ) -> tuple[list[PredictionRequest], PendingTable]:
        """Start the forward of these steps, and count it."""
        groups = [
            PredictionRequest(
                r.sampler, len(step.read), step.queried_tokens, step.uncertainty, step.draws
            )
            for r, step in fed
        ]
        rows = join([step for _, step in fed], [request.base for request, _ in fed])
        wanted = wanted_of(groups)
        self.forwards += 1
        self.rows += len(rows.tokens)
        pending = self.static.start(rows, wanted) if static and self.static else None
        # Without graphs, or with more rows than any fixed size has.
        return groups, pending or self._compute(rows, wanted)

    def _pieces(self) -> Fed:
        """Copy rows that other requests have fed; choose the pieces of steps to feed now."""
        feeds = []
        for request in self.running:
            if request.feed is None and request.step is not None:
                request.feed = Feed(request.step, first=not request.calls)
            feed = request.feed
            assert feed is not None
            # Also if it waited for its turn: another request may have fed the rows meanwhile.
            if self.prefixes is not None and feed.first and not feed.fed:
                self.prefixes.fill(request.base, feed)
            feeds.append((request, feed))
        stops = [len(feed.step.tokens) for _, feed in feeds]
        if self.prefill_rows is not None:
            stops = share([feed for _, feed in feeds], self.prefill_rows)
        fed = [(r, feed.piece(stop)) for (r, feed), stop in zip(feeds, stops, strict=True) if stop]
        if self.prefixes is not None:
            for request, step in fed:
                self.prefixes.note(request.base, step)
        return fed

    def _compute(self, flat: FlatRows, wanted: Wanted) -> PendingTable:
        """Compute a forward of any number of rows."""
        with torch.inference_mode():
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
        if self._started is None:
            return []
        (fed, groups, pending), self._started = self._started, None
        found = split(pending(), groups)
        share, events = self._share(), []
        for (request, step), predictions in zip(fed, found, strict=True):
            if request not in self.running:
                continue  # it was cancelled meanwhile
            if predictions is None and (len(fed) > 1 or request.feed is not None):
                predictions = self._alone(request, step)
            request.session.share = share
            events.append(self._accept(request, step, predictions))
        return events

    def _alone(self, request: Request, step: Step) -> Predictions | None:
        """Compute a step again without the other requests, whose NaN it may have met: in this
        forward, or in one that fed rows before it."""
        whole = step if request.feed is None else request.feed.anew()
        groups, pending = self._start([(request, whole)], static=False)
        return split(pending(), groups)[0]

    def _accept(self, request: Request, step: Step, predictions: Predictions | None) -> Event:
        """Hand a request its predictions; returns the event. The request's own error ends it."""
        now, feed = time.perf_counter(), request.feed
        try:
            request.accept(step, predictions, now)
            if self.prefixes is not None and feed is not None and feed.first and not request.feed:
                self.prefixes.add(request.base, feed)
            event = request.event()
        except Exception as error:
            self._release(request)
            return request.fail(error, now)
        if request.done:
            # Its logits were finite, so what it wrote is, and adds 0 at a weight of 0.
            self._release(request, clear=not len(step.read))
        return event
