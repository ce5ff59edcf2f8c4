"""The engine: many requests' steps become one forward, its logits become their predictions.

It knows no algorithm. Requests of different lengths run together; a finished one leaves and a
waiting one enters between forwards. Each request owns a contiguous run of slots in one flat cache,
so a row of a batch computes what it would compute alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from d2f.attention import Segment, SpanPlan
from d2f.cache import SlotCache, SlotPool
from d2f.model import DiffusionModel
from decode.request import Request
from decode.result import Event
from decode.sampling import predict
from decode.step import Ints, Step


class Engine:
    """Runs requests on one model.

    batch_size: most requests in one forward. slots: size of the cache; it must hold the largest
    request, and a request waits while it does not fit.
    """

    def __init__(self, model: DiffusionModel, *, batch_size: int, slots: int):
        self.model = model
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
        device = self.model.device
        plan, read = _plan(fed, device)
        self.forwards += 1
        self.cache.slots = _tensor([s.slots + r.base for r, s in fed], device)
        with torch.inference_mode():
            logits = self.model.decode_rows(
                _tensor([s.tokens for _, s in fed], device),
                _tensor([s.positions for _, s in fed], device),
                plan,
                self.cache,
                read,
            )
            groups = [(request.sampler, len(step.read)) for request, step in fed]
            predictions = predict(logits, groups, self.forwards)
        now = time.perf_counter()
        for (request, step), prediction in zip(fed, predictions, strict=True):
            request.accept(step, prediction, now)


def _plan(
    fed: Sequence[tuple[Request, Step]], device: torch.device
) -> tuple[SpanPlan, torch.Tensor]:
    """The attention of the flat batch, and which of its rows are read."""
    width = max(step.spans.shape[1] for _, step in fed)
    spans, segments, reads, first = [], [], [], 0
    for request, step in fed:
        rows = len(step.tokens)
        spans.append(np.pad(step.spans, ((0, 0), (0, width - step.spans.shape[1]), (0, 0))))
        spans[-1] += request.base
        stop = request.base + int(step.spans.max())
        segments.append(Segment(slice(first, first + rows), slice(request.base, stop)))
        reads.append(step.read + first)
        first += rows
    joined = torch.from_numpy(np.concatenate(spans).astype(np.int32)).to(device)
    return SpanPlan(joined, segments), _tensor(reads, device)


def _tensor(parts: Sequence[Ints], device: torch.device) -> torch.Tensor:
    """One int64 tensor of all requests' rows."""
    return torch.from_numpy(np.concatenate(parts)).to(device)
