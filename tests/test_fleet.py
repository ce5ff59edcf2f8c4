"""The simulation of a fleet: nothing is lost, sums are exact, queues are as long as theory says,
and a replica does what the real engine does."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_model

import decode
from benchmarks.fleet.arrivals import BURSTY, POISSON, Bursts, arrivals
from benchmarks.fleet.fleet_plan import Load, Target, capacity, drawn, most, serve
from benchmarks.fleet.forward_time import ForwardTime
from benchmarks.fleet.recording import Recording, Trace
from benchmarks.fleet.simulation import Overheads, at_random, least_in_flight, simulate
from benchmarks.forward import engine_of
from decode.engine.engine import Engine
from decode.engine.request import Request

TIME = ForwardTime(
    kind="measured", points=((1, 1.0), (8, 1.5), (64, 9.0)), request_ms=0.25, cached_ms=0.001
)


def trace(*forwards):
    """A request of these forwards: (rows, cached, visible)."""
    return Trace(prompt=(1,), text="", right=True, forwards=forwards)


def recording(*traces, time=TIME):
    return Recording(
        name="D2F", model="m", options={}, max_new_tokens=8, about={}, time=time, traces=traces
    )


def alone(one, time=TIME, added=Overheads()):  # noqa: B008
    """Nanoseconds of a request with nobody beside it, and until its first token."""
    total, first = round(1e6 * added.http_ms), 0
    by_rows = time.by_rows(max(rows for rows, _, _ in one.forwards))
    for number, (rows, cached, _) in enumerate(one.forwards):
        own = round(1e6 * (time.request_ms + added.event_ms))
        total += by_rows[rows] + own + int(1e6 * time.cached_ms * cached)
        if number == one.first:
            first = total
    return total, first


@st.composite
def requests(draw):
    """Traces, and when each comes: together, close by or far apart."""
    forwards = st.tuples(st.integers(1, 40), st.integers(0, 90), st.integers(0, 5))
    own = st.lists(forwards, min_size=1, max_size=6).map(lambda found: trace(*found))
    known = draw(st.lists(own, min_size=1, max_size=4))
    gaps = draw(st.lists(st.sampled_from((0, 1, 700_000, 5_000_000)), min_size=1, max_size=30))
    chosen = [draw(st.sampled_from(known)) for _ in gaps]
    return chosen, np.cumsum(gaps)


@given(requests(), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_every_request_ends_once_and_never_before_it_could(asked, replicas, most_together, looks):
    traces, came = asked
    route = least_in_flight if looks else at_random(0)
    seen = simulate(
        traces, came, replicas=replicas, time=TIME, max_batch=most_together, route=route
    )
    least = np.array([alone(one) for one in traces])
    assert (seen.finished - came >= least[:, 0]).all()
    assert (seen.first - came >= least[:, 1]).all() and (seen.first <= seen.finished).all()
    # Each forward of each request was in exactly one forward of its replica.
    assert seen.batches == sum(len(one.forwards) for one in traces)
    assert seen.batches <= most_together * seen.forwards
    for number, now in enumerate(came if looks else []):
        here = seen.replica[:number][seen.finished[:number] > now]
        assert (counts := np.bincount(here, minlength=replicas))[seen.replica[number]] == min(
            counts
        )
    span = int(seen.finished.max() - came.min())
    assert (seen.busy <= span).all() and seen.busy.sum() > 0


@given(requests(), st.integers(0, 3), st.integers(0, 2))
def test_one_at_a_time_takes_exactly_its_own_forwards(asked, http, event):
    traces, _ = asked
    added = Overheads(http, event / 8)
    came = np.arange(len(traces)) * 10**12
    seen = simulate(traces, came, replicas=1, time=TIME, max_batch=3, overheads=added)
    expected = np.array([alone(one, added=added) for one in traces])
    assert (seen.finished - came).tolist() == expected[:, 0].tolist()
    assert (seen.first - came).tolist() == expected[:, 1].tolist()


@pytest.mark.parametrize("max_batch", [1, 3])
def test_a_replica_does_what_the_engine_does(max_batch):
    """The real engine with requests that come at the same times, on a clock that each forward of it
    moves on by what the rows take that it really fed: every request ends at the same nanosecond.
    So the traces, recorded alone, are those of any batch, and who enters when is the engine's."""
    model = random_model("llada")
    decoder = decode.D2F(block_size=4, max_new_tokens=16, tau_conf=0.3, tau_add=0.5, tau_act=0.5)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(5, 200, int(n)).tolist() for n in draw.integers(3, 30, 24)]
    came = np.cumsum(draw.integers(0, 9_000_000, len(prompts)))

    def made():
        return [Request(i, ids, decoder, model.contract, None) for i, ids in enumerate(prompts)]

    one_by_one = engine_of(model, made(), 1)
    forwards = defaultdict(list)
    for event in one_by_one.run():
        forwards[event.request].append((*event.call, len(event.settled)))
    traces = [trace(*forwards[i]) for i in range(len(prompts))]

    waiting, now, ended, shown = made(), 0, {}, {}
    slots = sum(request.session.slots for request in waiting)
    engine = Engine(model, batch_size=max_batch, slots=slots)
    by_rows = TIME.by_rows(1000)
    while waiting or engine.running or engine.waiting:
        if not (engine.running or engine.waiting):
            now = max(now, int(came[waiting[0].index]))
        while waiting and came[waiting[0].index] <= now:
            engine.submit(waiting.pop(0))
        events = engine.advance()
        rows, cached = (sum(part) for part in zip(*(e.call for e in events), strict=True))
        now += by_rows[rows] + len(events) * 250_000 + int(1000 * cached)
        for event in events:
            if event.settled or event.result is not None:
                shown.setdefault(event.request, now)
            if event.result is not None:
                ended[event.request] = now
    seen = simulate(traces, came, replicas=1, time=TIME, max_batch=max_batch)
    assert seen.finished.tolist() == [ended[i] for i in range(len(prompts))]
    assert seen.first.tolist() == [shown[i] for i in range(len(prompts))]
    assert seen.batches / seen.forwards > 0.6 * max_batch, "they were together"


@pytest.mark.parametrize("load", [0.4, 0.7])
def test_one_server_waits_as_pollaczek_and_khinchine_say(load):
    """M/G/1: one request at a time, each 1 or 3 ms. The mean wait is rate E[S^2] / (2 (1 - load)),
    the busy share is the load. 30 independent runs: their mean lies within 4 of its own standard
    errors (Student's t with 29 degrees: missed once in 2,500 draws, and these are drawn once)."""
    time = ForwardTime(kind="measured", points=((1, 1.0),))
    known = recording(trace((1, 0, 1)), trace((1, 0, 0), (1, 0, 0), (1, 0, 1)), time=time)
    rate = load / 0.002  # a request takes 2 ms in the mean
    waits, busy = [], []
    for seed in range(30):
        came = arrivals(rate, 10.0, POISSON, seed)
        seen = serve(known, Load(1, max_batch=1, seed=seed), came)
        long = seen.arrived >= 2e9  # it has filled
        took = np.array([len(one.forwards) for one in drawn(known, len(came), seed)])
        waits.append(float((seen.latency_ms - took)[long].mean()))
        busy.append(seen.busy_share)
    expected = 1e3 * rate * (1e-6 + 9e-6) / 2 / (2 * (1 - load))  # ms
    for found, formula in ((waits, expected), (busy, load)):
        error = np.std(found, ddof=1) / math.sqrt(len(found))
        assert error < 0.03 * formula, "else it would say little"
        assert abs(np.mean(found) - formula) < 4 * error


MIXED = recording(
    trace((30, 0, 0), (8, 30, 4), (8, 38, 8)), trace((60, 0, 0), *[(8, 60, n) for n in range(9)])
)
TARGET = Target(latency_ms=40.0, first_ms=15.0)
SMALL = Load(1, horizon=5.0, requests=2_000, max_batch=4)


def test_more_replicas_are_never_worse_at_the_same_load_each():
    """Who shares a queue waits less: at 85 % of what they can do, p95 falls with each step."""
    rate = 0.85 * capacity(MIXED, SMALL)
    found = []
    for replicas in (1, 2, 4, 16, 64):
        came = arrivals(rate * replicas, 20.0, POISSON, 0)
        load = Load(replicas, max_batch=4)
        found.append(serve(MIXED, load, came).percentiles().latency_95)
    assert found == sorted(found, reverse=True) and found[0] > 1.2 * found[-1]


def test_a_router_that_looks_is_no_worse_than_one_that_does_not():
    came = arrivals(0.7 * 8 * capacity(MIXED, SMALL), 20.0, POISSON, 0)
    looks, blind = (
        serve(MIXED, Load(8, max_batch=4, router=router), came).percentiles().latency_95
        for router in ("least", "random")
    )
    assert looks < blind


@pytest.mark.parametrize("max_batch", [1, 4])
def test_a_capacity_is_that_of_a_full_batch(max_batch):
    known = recording(trace((8, 0, 1), (8, 0, 2), (8, 0, 3)))
    a_forward = TIME.by_rows(8 * max_batch)[-1] + max_batch * 250_000
    found = capacity(known, Load(1, max_batch=max_batch))
    assert found == pytest.approx(max_batch / (3e-9 * a_forward), rel=0.01)


def test_the_rate_is_the_highest_that_meets_the_target():
    row = most(MIXED, SMALL, TARGET)
    assert 0 < row["rate"] < row["capacity"]
    three = most(MIXED, replace(SMALL, replicas=3), TARGET)  # a rate is that of each
    assert three["seen"]["per_second"] == pytest.approx(3 * three["rate"], rel=0.1)
    assert row["seen"]["latency_95"] <= 40.0 and row["seen"]["first_95"] <= 15.0
    more = row["rate"] + row["capacity"] / 64
    seconds = SMALL.seconds(more, TARGET)
    seen = serve(MIXED, SMALL, arrivals(more, seconds, POISSON, 0))
    late = seen.percentiles(seen.arrived >= 5e9)
    assert late.latency_95 > 40.0 or late.first_95 > 15.0


def test_a_target_that_not_even_a_lone_request_meets_has_no_rate():
    row = most(MIXED, SMALL, Target(latency_ms=1.0, first_ms=1.0))
    assert (row["rate"], row["seen"]) == (0, None)


def test_the_same_seed_gives_the_same_and_another_another():
    loads = [replace(SMALL, replicas=3, router="random", seed=seed) for seed in (1, 1, 2)]
    same = [most(MIXED, load, TARGET) for load in loads]
    assert same[0] == same[1] and same[0]["seen"] != same[2]["seen"]


def test_bursts_cost_something():
    plain, bursty = (
        most(MIXED, replace(SMALL, bursts=bursts), TARGET)["rate"] for bursts in (POISSON, BURSTY)
    )
    assert bursty < 0.8 * plain


@pytest.mark.parametrize("bursts", [POISSON, BURSTY, Bursts(times=2.0, share=0.5, seconds=0.3)])
def test_arrivals_have_the_rate_of_each_state(bursts):
    """Counts are Poisson's: within 5 of their own standard deviations."""
    rate, periods = 200.0, 40
    came = arrivals(rate, periods * bursts.period, bursts, 0)
    assert (np.diff(came) >= 0).all() and came[-1] < periods * bursts.period
    bursting = (came % bursts.period) >= bursts.period - bursts.seconds
    calm, burst = (~bursting).sum(), bursting.sum()
    quiet = rate * bursts.calm
    for found, expected in (
        (calm, quiet * periods * (bursts.period - bursts.seconds)),
        (burst, quiet * bursts.times * periods * bursts.seconds),
        (calm + burst, rate * periods * bursts.period),
    ):
        assert abs(found - expected) < 5 * math.sqrt(expected)
