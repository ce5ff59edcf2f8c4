"""The most requests a second that a fleet carries within a latency target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.fleet.arrivals import BURSTY, POISSON, Bursts, arrivals
from benchmarks.fleet.recording import Recording, Trace
from benchmarks.fleet.simulation import (
    NOTHING_ADDED,
    Overheads,
    Percentiles,
    Served,
    at_random,
    least_in_flight,
    simulate,
)

ROUTERS = ("least", "random")
ARRIVALS = {POISSON: "Poisson", BURSTY: "bursty"}
STEPS = 6  # halvings: the rate is found to 1/64 of the capacity
FEW = 2_000  # requests that a capacity is taken of, at least


@dataclass(frozen=True)
class Target:
    """95 % of the counted requests must be done, and have shown their first token, so soon."""

    latency_ms: float = 500.0
    first_ms: float = 200.0

    def met(self, seen: Percentiles) -> bool:
        return seen.latency_95 <= self.latency_ms and seen.first_95 <= self.first_ms


@dataclass(frozen=True)
class Load:
    """A fleet and how it is asked. What is counted comes in whole periods of the bursts, for
    `horizon` times the target's latency at least, so that a queue that grows is seen to, and
    `requests` at least; a period before it fills the fleet."""

    replicas: int
    bursts: Bursts = POISSON
    router: str = ROUTERS[0]
    max_batch: int = 16
    overheads: Overheads = NOTHING_ADDED
    seed: int = 0
    horizon: float = 10.0
    requests: int = 10_000

    def seconds(self, rate: float, target: Target) -> float:
        """How long requests come, at so many a second."""
        counted = max(self.horizon * target.latency_ms / 1e3, self.requests / rate)
        return self.bursts.period * (1 + math.ceil(counted / self.bursts.period))


def drawn(recording: Recording, count: int, seed: int) -> list[Trace]:
    """So many of the recorded requests, each as likely as any other."""
    draw = np.random.default_rng([seed, 3])
    return [recording.traces[i] for i in draw.integers(len(recording.traces), size=count)]


def serve(recording: Recording, load: Load, came: Sequence[float] | NDArray[np.float64]) -> Served:
    """Simulate requests that come at these seconds; which ones, the seed says."""
    return simulate(
        drawn(recording, len(came), load.seed),
        np.rint(np.asarray(came) * 1e9).astype(np.int64),
        replicas=load.replicas,
        time=recording.time,
        max_batch=load.max_batch,
        route=least_in_flight if load.router == ROUTERS[0] else at_random(load.seed),
        overheads=load.overheads,
    )


def capacity(recording: Recording, load: Load) -> float:
    """Requests a second of one replica that always has enough of them: all are there at once, and
    the half of them in the middle is timed, while the batch is full."""
    count = max(FEW, 20 * load.max_batch)
    served = simulate(
        drawn(recording, count, load.seed),
        [0] * count,
        replicas=1,
        time=recording.time,
        max_batch=load.max_batch,
        overheads=load.overheads,
    )
    ends = np.sort(served.finished)
    first, last = count // 4, 3 * count // 4
    return (last - first) / (int(ends[last] - ends[first]) / 1e9)


def most(recording: Recording, load: Load, target: Target) -> dict[str, Any]:
    """A row of the report: requests a second and replica, the capacity and the highest `rate` at
    which the target is met, found by bisection with the same draws at every rate, and what was seen
    at it. 0 and None where not even the lowest meets it."""
    full = capacity(recording, load)
    low, high = 0, 2**STEPS
    best: dict[str, float] | None = None
    while high - low > 1:
        middle = (low + high) // 2
        rate = full * load.replicas * middle / 2**STEPS
        seconds = load.seconds(rate, target)
        served = serve(recording, load, arrivals(rate, seconds, load.bursts, load.seed))
        seen = served.percentiles(served.arrived >= load.bursts.period * 1e9)
        if target.met(seen):
            in_forward = served.batches / served.forwards
            low, best = middle, {
                **asdict(seen), "busy": served.busy_share, "in_forward": in_forward
            }  # fmt: skip
        else:
            high = middle
    return {
        "way": recording.name,
        "arrivals": ARRIVALS[load.bursts],
        "router": load.router,
        "replicas": load.replicas,
        "capacity": full,
        "rate": full * low / 2**STEPS,
        "seen": best,
    }
