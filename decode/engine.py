"""The engine: many requests' steps become one forward, its logits become their predictions.

It knows no algorithm. Requests of different lengths run together; a finished one leaves and a
waiting one enters between forwards. Each request owns a contiguous run of slots in one flat cache,
so a row of a batch computes what it would compute alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from d2f.attention import Segment, SpanPlan
from d2f.cache import SlotCache, SlotPool
from d2f.model import DiffusionModel
from decode.request import Request
from decode.result import Event
from decode.sampling import Wanted, predict
from decode.step import Ints, Step


class Engine:
    """Runs requests on one model.

    batch_size: most requests in one forward. slots: size of the cache; it must hold the largest
    request, and a request waits while it does not fit.
    """

    def __init__(self, model: DiffusionModel, *, batch_size: int, slots: int):
        self.model = model
        self.device = model.device
        self.batch_size = batch_size
        self.cache: SlotCache = model.new_cache(slots)
        self.pool = SlotPool(slots)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.forwards = 0

    def submit(self, request: Request) -> None:
        """Queue a request; it enters when there is room. Allowed while the engine runs."""
        self.waiting.append(request)

    def run(self) -> Iterator[Event]:
        """Decode until nothing runs or waits; an event for each request after each forward."""
        while self.waiting or self.running:
            yield from self.advance()

    def advance(self) -> list[Event]:
        """Admit what fits, do one forward; the events of the requests that were in it."""
        self._admit()
        steps = [(request, request.next_step) for request in self.running]
        fed = [(request, step) for request, step in steps if step is not None]
        if fed:
            self._forward(fed)
        events = [request.event() for request, _ in fed]
        for request in [r for r in self.running if r.done]:
            self.running.remove(request)
            self.pool.free(request.base)
        return events

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.batch_size:
            base = self.pool.allocate(self.waiting[0].session.slots)
            if base is None:
                return
            request = self.waiting.popleft()
            request.start(base, time.perf_counter())
            self.running.append(request)

    def _forward(self, fed: Sequence[tuple[Request, Step]]) -> None:
        self.forwards += 1
        with torch.inference_mode():
            rows = join(fed, self.device)
            self.cache.slots = rows.slots
            logits = self.model.decode_rows(
                rows.tokens, rows.positions, rows.plan, self.cache, rows.read
            )
            groups = [
                Wanted(request.sampler, len(step.read), step.named, step.uncertainty)
                for request, step in fed
            ]
            predictions = predict(logits, groups, self.forwards)
        now = time.perf_counter()
        for (request, step), prediction in zip(fed, predictions, strict=True):
            request.accept(step, prediction, now)


@dataclass(frozen=True)
class Rows:
    """A flat batch on the device: tokens, positions and slots int64 ``[T]``, its attention, and
    which rows are read, int64 ``[N]``."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    plan: SpanPlan
    read: Tensor


def join(fed: Sequence[tuple[Request, Step]], device: torch.device) -> Rows:
    """The steps of all requests as one flat batch, slots counted from each request's base.

    Everything crosses to the device in one copy.
    """
    width = max(step.spans.shape[1] for _, step in fed)
    columns: list[list[Ints]] = [[], [], [], [], []]  # tokens, positions, slots, spans, read
    segments, first = [], 0
    for request, step in fed:
        own = slice(first, first + len(step.tokens))
        spans = _widened(step.spans, width) + request.base
        parts = (step.tokens, step.positions, step.slots + request.base, spans.ravel())
        for column, part in zip(columns, (*parts, step.read + first), strict=True):
            column.append(part)
        segments.append(_segment(own, step, request.base))
        first = own.stop
    host = np.concatenate([part for column in columns for part in column])
    sizes = [sum(map(len, column)) for column in columns]
    tokens, positions, slots, ranges, read = torch.from_numpy(host).to(device).split(sizes)
    plan = SpanPlan(ranges.view(-1, width, 2).to(torch.int32), segments)
    return Rows(tokens, positions, slots, plan, read)


def _widened(spans: Ints, width: int) -> Ints:
    """Spans ``[T, K, 2]`` as ``[T, width, 2]``, the ranges that were lacking empty."""
    lacking = width - spans.shape[1]
    return np.pad(spans, ((0, 0), (0, lacking), (0, 0))) if lacking else spans


def _segment(rows: slice, step: Step, base: int) -> Segment:
    """The slots that the rows of one request see: from its first to the last that one sees."""
    starts, ends = step.spans[..., 0], step.spans[..., 1]  # [T, K]
    last = int(ends.max())
    whole = not starts.any() and int(ends.min()) == last  # an empty range ends where it starts
    return Segment(rows, slice(base, base + last), whole)
