"""The engine: many requests' steps become one forward, its logits become their predictions.

It knows no algorithm. Requests of different lengths run together; a finished one leaves and a
waiting one enters between forwards. Each request owns a contiguous run of slots in one flat cache,
so a row of a batch computes what it would compute alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from d2f.cache import SlotCache, SlotPool
from d2f.model import DiffusionModel
from decode.request import Request
from decode.result import Event
from decode.rows import FlatRows, join
from decode.sampling import Wanted, named_ids, split, table_of
from decode.static_rows import StaticRows, Wait, graphs_wanted
from decode.step import Step


class Engine:
    """Runs requests on one model.

    batch_size: most requests in one forward. slots: size of the cache; it must hold the largest
    request, and a request waits while it does not fit. static: whether forwards are padded to a few
    fixed sizes, on a GPU as CUDA graphs (`decode.static_rows`); None: there alone.
    """

    def __init__(
        self, model: DiffusionModel, *, batch_size: int, slots: int, static: bool | None = None
    ):
        self.model = model
        self.device = model.device
        self.batch_size = batch_size
        if static is None:
            static = graphs_wanted(self.device)
        self.cache: SlotCache = model.new_cache(slots + static)  # a slot for rows that pad
        self.static = StaticRows(model, self.cache) if static else None
        self.pool = SlotPool(slots)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.forwards = 0
        self.early = self.device.type == "cuda"  # start the next forward before events are taken
        self._flight: Flight | None = None

    def submit(self, request: Request) -> None:
        """Queue a request; it enters when there is room. Allowed while the engine runs."""
        self.waiting.append(request)

    def run(self) -> Iterator[Event]:
        """Decode until nothing runs or waits; an event for each request after each forward."""
        while self.waiting or self.running:
            yield from self.advance()

    def advance(self) -> list[Event]:
        """Do one forward; the events of the requests that were in it. On a GPU the next one is
        started before they are handed over, so that it runs beside what the caller does with
        them."""
        if self._flight is None:
            self._start()
        events = self._land()
        if self.early:
            self._start()
        return events

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.batch_size:
            base = self.pool.allocate(self.waiting[0].session.slots)
            if base is None:
                return
            request = self.waiting.popleft()
            request.start(base, time.perf_counter())
            self.running.append(request)

    def _start(self) -> None:
        """Admit what fits and start the forward of all requests that run."""
        self._admit()
        steps = [(request, request.next_step) for request in self.running]
        fed = [(request, step) for request, step in steps if step is not None]
        if not fed:
            return
        self.forwards += 1
        groups = [
            Wanted(request.sampler, len(step.read), step.named, step.uncertainty)
            for request, step in fed
        ]
        rows, wait = join(fed), None
        if self.static is not None and all(group.greedy for group in groups):
            scored = any(group.scored for group in groups)
            wait = self.static.start(rows, named_ids(groups) if scored else None)
        self._flight = Flight(fed, groups, wait or self._compute(rows, groups))

    def _compute(self, flat: FlatRows, groups: list[Wanted]) -> Wait:
        """The forward of any number of rows; what it returns waits for the table."""
        with torch.inference_mode():
            rows = flat.on(self.device)
            self.cache.slots = rows.slots
            logits = self.model.decode_rows(
                rows.tokens, rows.positions, rows.plan, self.cache, rows.read
            )
            table = table_of(logits, groups)
        return lambda: table.cpu().numpy()

    def _land(self) -> list[Event]:
        """Wait for the forward and hand its predictions to the requests."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        predictions = split(flight.table(), flight.groups, self.forwards)
        now = time.perf_counter()
        for (request, step), prediction in zip(flight.fed, predictions, strict=True):
            request.accept(step, prediction, now)
        events = [request.event() for request, _ in flight.fed]
        for request in [r for r in self.running if r.done]:
            self.running.remove(request)
            self.pool.free(request.base)
        return events


@dataclass(frozen=True)
class Flight:
    """A forward that was started."""

    fed: list[tuple[Request, Step]]
    groups: list[Wanted]
    wait: Wait

    def table(self) -> NDArray[np.float64]:
        """Its predictions, waited for."""
        return self.wait()
