"""A real run beside its simulation: the same requests at the same times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.fleet.arrivals import arrivals
from benchmarks.fleet.fleet_plan import Load, capacity, drawn, serve
from benchmarks.fleet.forward_time import NS, ForwardTime, nonnegative
from benchmarks.fleet.recording import Recording, Trace
from benchmarks.fleet.simulation import Answers, Overheads, least_in_flight
from d2f.errors import InputError
from decode.compare.client import Answer, Client, allowed_bytes, check_endpoint
from decode.compare.config import Endpoint, Limits

WARM_REQUESTS = 4  # to each server, not counted


@dataclass(frozen=True)
class Servers:
    """Servers of one model, asked as a router with the fewest requests in flight would."""

    recording: Recording
    clients: Sequence[Client]

    @staticmethod
    def at(urls: Sequence[str], recording: Recording) -> Servers:
        """Those at the addresses, with or without /v1. Raises InputError where one does not serve
        the recording's model."""
        limits, clients = Limits(), []
        for url in urls:
            place = url.rstrip("/").removesuffix("/v1") + "/v1"
            check_endpoint(place, recording.model, {}, limits)
            entry = Endpoint(
                name=recording.name, kind="endpoint", url=place, model=recording.model,
                tokenizer=recording.model, stream=True, body=recording.options,
            )  # fmt: skip
            clients.append(Client(entry, place, recording.model, limits, retries=0))
        return Servers(recording, clients)

    def run(self, traces: Sequence[Trace], came: Sequence[float] | None) -> Answers:
        """Send each request at its second, None: each when the last one is answered. Raises
        InputError where one fails, or is answered otherwise than it was recorded."""
        return asyncio.run(self._run(traces, came))

    async def _run(self, traces: Sequence[Trace], came: Sequence[float] | None) -> Answers:
        length = self.recording.max_new_tokens
        bodies = [self.clients[0].request(list(t.prompt), length) for t in traces]
        answers = [Answer(number) for number in range(len(traces))]
        in_flight = np.zeros(len(self.clients), np.int64)
        async with AsyncExitStack() as stack:
            connections = [
                await stack.enter_async_context(client.connect(len(traces)))
                for client in self.clients
            ]

            async def ask(number: int, began: float) -> None:
                place = least_in_flight(in_flight)
                in_flight[place] += 1
                client, connection = self.clients[place], connections[place]
                limit = allowed_bytes(length)
                await client.answer(connection, bodies[number], answers[number], began, limit)
                in_flight[place] -= 1

            async def at(number: int, second: float) -> None:
                await asyncio.sleep(began + second - time.perf_counter())
                await ask(number, began)

            began = time.perf_counter()
            if came is None:
                for number in range(len(traces)):
                    await ask(number, began)
            else:
                await asyncio.gather(*(at(number, second) for number, second in enumerate(came)))
        self._check(traces, answers)
        # From when it was to be sent: a client that is late is no merit of the server's.
        sent = [a.submitted for a in answers] if came is None else came
        columns = (sent, [a.first or 0.0 for a in answers], [a.finished or 0.0 for a in answers])
        times = (np.rint(np.asarray(column) * 1e9).astype(np.int64) for column in columns)
        return Answers(*times)

    def _check(self, traces: Sequence[Trace], answers: Sequence[Answer]) -> None:
        failed = [answer.error for answer in answers if answer.error is not None]
        if failed:
            raise InputError(f"{len(failed)} of {len(answers)} requests failed: {failed[0]}")
        for trace, answer in zip(traces, answers, strict=True):
            if answer.text != trace.text:
                raise InputError(
                    f"the server of {self.recording.model} answers {answer.text[:80]!r} where "
                    f"{trace.text[:80]!r} was recorded: expected the recorded model and decoder "
                    "(--record records anew)"
                )


def measured_overheads(traces: Sequence[Trace], alone: Answers, time: ForwardTime) -> Overheads:
    """What the server adds, from requests that came one at a time: what their latency is beyond
    their forwards' recorded time, split into a part a request and a part a forward (least squares,
    neither below 0). Nothing under load is fitted."""
    forwards = np.array([len(trace.forwards) for trace in traces], dtype=np.float64)
    beyond = alone.latency_ms - np.array([alone_ms(trace, time) for trace in traces])
    http, event = nonnegative([np.ones_like(forwards), forwards], beyond)
    return Overheads(http_ms=http, event_ms=event)


def alone_ms(trace: Trace, time: ForwardTime) -> float:
    """A request's forwards where nothing else runs, in milliseconds."""
    by_rows = time.by_rows(max(rows for rows, _, _ in trace.forwards))
    return sum(
        by_rows[rows] / NS + time.request_ms + time.cached_ms * cached
        for rows, cached, _ in trace.forwards
    )


def check(
    servers: Servers, load: Load, shares: Sequence[float], seconds: float, light: int
) -> dict[str, Any]:
    """Measure `light` requests one at a time and then each load, a share of the simulated capacity,
    for so many seconds of arrivals; each beside its simulation."""
    recording = servers.recording
    for client in servers.clients:
        Servers(recording, [client]).run(recording.traces[:WARM_REQUESTS], None)
    few = drawn(recording, light, load.seed)
    one = servers.run(few, None)
    load = replace(load, overheads=measured_overheads(few, one, recording.time))
    # How long each takes alone, then each coming when the last one is done, as it was.
    took = serve(recording, load, 3600 * np.arange(len(few))).latency_ms / 1e3
    found = [beside("one at a time", one, serve(recording, load, np.cumsum(took) - took))]
    print(line(found[0]), flush=True)
    full = capacity(recording, load)
    for share in shares:
        came = arrivals(share * full * load.replicas, seconds, load.bursts, load.seed)
        if not len(came):
            raise InputError(f"no request comes within {seconds:g} s at load {share:g}")
        real = servers.run(drawn(recording, len(came), load.seed), came.tolist())
        found.append(beside(f"{share:g}", real, serve(recording, load, came)))
        print(line(found[-1]), flush=True)
    return {
        "way": recording.name,
        "replicas": load.replicas,
        "servers": [client.url for client in servers.clients],
        "capacity": full,
        "measured_alone_ms": float(one.latency_ms.mean()),
        "forwards_alone_ms": float(np.mean([alone_ms(t, recording.time) for t in few])),
        "overheads": asdict(load.overheads),
        "loads": found,
    }


def beside(load: str, real: Answers, simulated: Answers) -> dict[str, Any]:
    """A row of the check."""
    return {
        "load": load,
        "requests": len(real.arrived),
        "measured": asdict(real.percentiles()),
        "simulated": asdict(simulated.percentiles()),
    }


def line(row: dict[str, Any]) -> str:
    """A row as text: each figure measured / simulated."""
    pairs = {name: (value, row["simulated"][name]) for name, value in row["measured"].items()}

    def pair(name: str) -> str:
        return "{:,.1f} / {:,.1f}".format(*pairs[name])

    return (
        f"load {row['load']}, {row['requests']} requests, measured / simulated: "
        f"{pair('per_second')} requests/s; answer after {pair('latency_50')} ms "
        f"(95 %: {pair('latency_95')}); first token after {pair('first_50')} ms "
        f"(95 %: {pair('first_95')})"
    )
