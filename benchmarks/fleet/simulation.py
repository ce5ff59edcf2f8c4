"""Replicas that serve requests, event by event.

A replica is what the engine is (`decode.engine.engine.Engine`): between two forwards the requests
that are done leave and waiting ones enter, first come, first served, up to `max_batch`; a forward
feeds the next rows of all that run::

    time      0        5ms              12ms           17ms
    replica   a: 21 rows  a: 8, b: 30 rows  a: 8, b: 8      a is done
    arrives        b                   c (waits: max_batch 2)

A plain loop over a heap, not simpy: of its processes and resources nothing would be used, as there
are two kinds of events, and the arrivals are sorted beforehand. Time is whole nanoseconds, so that
sums are exact.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.fleet.forward_time import NS, ForwardTime
from benchmarks.fleet.recording import Trace

Ints = NDArray[np.int64]
Router = Callable[[Ints], int]


def least_in_flight(in_flight: Ints) -> int:
    """The replica with the fewest requests, waiting ones counted; of several the first."""
    return int(in_flight.argmin())


def at_random(seed: int) -> Router:
    """Any replica, whatever it has to do."""
    draw = np.random.default_rng([seed, 2])
    return lambda in_flight: int(draw.integers(len(in_flight)))


@dataclass(frozen=True)
class Overheads:
    """What a server adds to its forwards, in milliseconds; `benchmarks.fleet --check` measures it.

    http_ms: a request, before its first forward; it holds up nobody else. event_ms: each request in
    each forward (its event's way to the client); the replica does nothing else meanwhile.
    """

    http_ms: float = 0.0
    event_ms: float = 0.0


NOTHING_ADDED = Overheads()


@dataclass(frozen=True)
class Answers:
    """When requests came, when a token of each could be shown, and when it was done: nanoseconds,
    an entry a request."""

    arrived: Ints
    first: Ints
    finished: Ints

    @property
    def latency_ms(self) -> NDArray[np.float64]:
        return (self.finished - self.arrived) / NS

    def percentiles(self, counts: NDArray[np.bool_] | slice = slice(None)) -> Percentiles:
        """Of the requests that count, by default all."""
        arrived, finished = self.arrived[counts], self.finished[counts]
        latency, first = finished - arrived, self.first[counts] - arrived
        seconds = int(finished.max() - arrived.min()) / 1e9
        times = [*np.percentile(latency, [50, 95]), *np.percentile(first, [50, 95])]
        return Percentiles(*(float(value) / NS for value in times), len(arrived) / seconds)


@dataclass(frozen=True)
class Percentiles:
    """Milliseconds until an answer was there, and until its first token, of 50 and 95 % of the
    requests; requests a second from the first that came to the last that was done."""

    latency_50: float
    latency_95: float
    first_50: float
    first_95: float
    per_second: float


@dataclass(frozen=True)
class Served(Answers):
    """What a simulation also knows. replica: which one served a request. busy: nanoseconds that
    each replica was in a forward. batches: the requests in each forward, summed over `forwards`."""

    replica: Ints
    busy: Ints
    forwards: int
    batches: int

    @property
    def busy_share(self) -> float:
        """Of the time from the first arrival to the last end, over all replicas."""
        whole = int(self.finished.max() - self.arrived.min())
        return float(self.busy.sum()) / (len(self.busy) * whole)


@dataclass(slots=True)
class _Request:
    number: int
    forwards: Sequence[tuple[int, int, int]]
    first: int
    done: int = 0  # forwards


@dataclass(slots=True)
class _Replica:
    running: list[_Request] = field(default_factory=list)
    waiting: deque[_Request] = field(default_factory=deque)


def simulate(
    traces: Sequence[Trace],
    arrived: Sequence[int] | Ints,
    *,
    replicas: int,
    time: ForwardTime,
    max_batch: int,
    route: Router = least_in_flight,
    overheads: Overheads = NOTHING_ADDED,
) -> Served:
    """Serve the requests, each a trace with the nanosecond at which it arrives, in order of
    arrival. It ends when all are done."""
    # Traces come again and again: what is read of one is found once.
    known = {id(trace): (trace.forwards, trace.first) for trace in traces}
    widest = max(rows for forwards, _ in known.values() for rows, _, _ in forwards)
    by_rows = time.by_rows(max_batch * widest)
    a_request = round(NS * (time.request_ms + overheads.event_ms))
    a_slot = NS * time.cached_ms
    delay = round(NS * overheads.http_ms)
    fleet = [_Replica() for _ in range(replicas)]
    in_flight = np.zeros(replicas, np.int64)
    busy = [0] * replicas
    first, finished, chosen = ([0] * len(traces) for _ in range(3))
    ends: list[tuple[int, int]] = []  # of the forwards under way: when, and whose
    forwards = batches = 0

    def start(place: int, now: int) -> None:
        """Let in what there is room for, and start the next forward of a replica."""
        nonlocal forwards, batches
        replica = fleet[place]
        running, waiting = replica.running, replica.waiting
        while waiting and len(running) < max_batch:
            running.append(waiting.popleft())
        if not running:
            return
        rows = cached = 0
        for request in running:
            step = request.forwards[request.done]
            rows += step[0]
            cached += step[1]
        took = by_rows[rows] + len(running) * a_request + int(cached * a_slot)
        busy[place] += took
        forwards += 1
        batches += len(running)
        heapq.heappush(ends, (now + took, place))

    def advance() -> None:
        """End the forward that ends next, and start the next one of its replica."""
        now, place = heapq.heappop(ends)
        replica, left = fleet[place], []
        for request in replica.running:
            if request.done == request.first:
                first[request.number] = now
            request.done += 1
            if request.done < len(request.forwards):
                left.append(request)
            else:
                finished[request.number] = now
                in_flight[place] -= 1
        replica.running = left
        start(place, now)

    for number, trace in enumerate(traces):
        now = int(arrived[number]) + delay
        while ends and ends[0][0] <= now:
            advance()
        place = chosen[number] = route(in_flight)
        in_flight[place] += 1
        fleet[place].waiting.append(_Request(number, *known[id(trace)]))
        if not fleet[place].running:  # else it looks for more when its forward ends
            start(place, now)
    while ends:
        advance()
    columns = (np.asarray(column, np.int64) for column in (arrived, first, finished, chosen, busy))
    return Served(*columns, forwards=forwards, batches=batches)
