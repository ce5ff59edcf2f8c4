"""python -m benchmarks.soak --requests 10000

Starts `python -m decode.serve` with several models (or takes --url) and sends it thousands of
requests: both endpoints, many decoders, lengths, stops, seeded sampling, streamed and not; a
fifth of the clients leave at random moments, some requests are malformed, and where the queue is
full they come again. The requests follow from --seed alone. Counted are

    lost     no answer, a stream without its end, another status than is expected
    wrong    a choice that is not what `decode.generate` gives the same request alone: its text, why
             it ended, its tokens and forwards; of a client who left, what it had until then
    leaked   requests running or waiting, and slots used, when all have ended (/metrics)
    memory   whether the server's resident bytes are level after the warm-up

and any of them but 0, or memory that grows, is exit status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.errors import InputError
from d2f.files import make_folder, write_beside

if TYPE_CHECKING:
    import httpx

    from benchmarks.soak.client import Outcome
    from benchmarks.soak.plan import Planned
    from d2f.model import DiffusionModel

OUTPUT = Path("benchmarks/results/serve/soak.json")
MAX_BATCH = MAX_WAITING = 16  # of each model: few, so that the queue is full now and then


async def drive(
    client: httpx.AsyncClient, planned: Sequence[Planned], users: int, pid: int | None = None
) -> tuple[list[Outcome], list[tuple[int, int]], dict[str, float]]:
    """Send the requests, `users` at a time. How each ended, samples of the memory of process `pid`
    meanwhile (requests ended, bytes), and what the server still holds at the end."""
    from benchmarks.soak.client import send
    from benchmarks.soak.watch import leaks, memory

    outcomes: list[Outcome] = []
    samples: list[tuple[int, int]] = []
    waiting = iter(planned)

    async def user() -> None:
        for one in waiting:
            outcomes.append(await send(client, one))

    watch = asyncio.ensure_future(memory(pid, lambda: len(outcomes), samples)) if pid else None
    await asyncio.gather(*(user() for _ in range(users)))
    if watch is not None:
        watch.cancel()
    return outcomes, samples, await leaks(client)


def soak(
    options: argparse.Namespace, url: str, pid: int | None, models: dict[str, DiffusionModel]
) -> dict[str, Any]:
    """The report of a soak of the server at `url`."""
    import httpx

    from benchmarks.soak.client import SECONDS
    from benchmarks.soak.plan import plan
    from benchmarks.soak.questions import answer, draw_questions
    from benchmarks.soak.verdict import growth, verdict

    distinct = max(1, min(options.distinct, options.requests))
    questions = draw_questions(models, distinct, options.seed)
    began = time.perf_counter()
    expected = [answer(models[str(q.body["model"])], q) for q in questions]
    alone = time.perf_counter() - began
    print(f"{distinct} distinct requests answered alone in {alone:.0f} s", flush=True)
    planned = plan(questions, options.requests, options.seed)

    async def run() -> Any:
        pool = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=url, timeout=SECONDS, limits=pool, trust_env=False
        ) as client:
            return await drive(client, planned, options.in_flight, pid)

    began = time.perf_counter()
    outcomes, samples, leaked = asyncio.run(run())
    seconds = time.perf_counter() - began
    return {
        "requests": options.requests,
        "seed": options.seed,
        "distinct": distinct,
        "in_flight": options.in_flight,
        "models": list(models),
        "seconds": round(seconds, 1),
        "requests_a_second": round(options.requests / seconds, 1),
        "streamed": sum(one.stream for one in planned),
        "meant_to_leave": sum(one.leave is not None for one in planned),
        "malformed": sum(one.question is None for one in planned),
        **verdict(planned, outcomes, questions, expected),
        "leaked": leaked,
        "memory": growth(samples, options.requests),
    }


def failed(report: dict[str, Any]) -> list[str]:
    """The parts of a report that are not as they must be."""
    return [
        name
        for name, bad in (
            ("lost", report["lost"]["count"]),
            ("wrong", report["wrong"]["count"]),
            ("leaked", report["leaked"]),
            ("memory", report["memory"]["level"] is False),
        )
        if bad
    ]


def shown(report: dict[str, Any]) -> str:
    """The report as a short table."""
    memory = report["memory"]
    ends = ", ".join(f"{count:,} {end}" for end, count in report["ends"].items())
    level = {True: "level", False: "NOT LEVEL", None: "too few requests to say"}[memory["level"]]
    if "median_mib" in memory:
        rise = memory["rise_in_10000_requests_mib"]
        level += f": {memory['median_mib']} MiB, {rise:+} MiB in 10,000 requests"
    rows = {
        "requests": f"{report['requests']:,} in {report['seconds']:g} s: {ends}",
        "tried again": f"{report['refused_for_a_full_queue']:,} times, for a full queue",
        "lost": report["lost"]["count"],
        "wrong": f"{report['wrong']['count']} of {report['choices']:,} answers",
        "leaked": report["leaked"] or 0,
        "memory": level,
    }
    lines = [f"{name:<12}{value}" for name, value in rows.items()]
    return "\n".join(lines + report["lost"]["first"][:3] + report["wrong"]["first"][:3])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=10_000, help="default 10000")
    parser.add_argument("--distinct", type=int, default=400, help="of these (default 400)")
    parser.add_argument("--in-flight", type=int, default=40, help="at a time (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    parser.add_argument("--threads", type=int, default=1, help="of a model's forward (default 1)")
    parser.add_argument("--url", help="of a server that serves the same models already")
    parser.add_argument("--pid", type=int, help="its process, whose memory is watched")
    parser.add_argument("--json", type=Path, default=OUTPUT, help=f"report (default {OUTPUT})")
    options = parser.parse_args(arguments)
    try:
        for name in ("requests", "distinct", "in_flight", "threads"):
            if getattr(options, name) < 1:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag} must be at least 1, got {getattr(options, name)}")
        make_folder(options.json.parent)
        report = _measure(options)
        write_beside(options.json, json.dumps(report, indent=1) + "\n")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(shown(report))
    bad = failed(report)
    if bad:
        print(f"error: {', '.join(bad)}: see {options.json}", file=sys.stderr)
    return 1 if bad else 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the server where none is given; the report with what it was measured on."""
    import torch

    import d2f
    from benchmarks.our_server import our_server
    from benchmarks.soak.questions import DECODERS
    from decode.report import environment

    torch.set_num_threads(options.threads)
    models = {name: d2f.load(name) for name in DECODERS}
    facts = environment(next(iter(models.values())))
    if options.url is not None:
        return facts | soak(options, options.url, options.pid, models)
    limits = ("--max-batch", str(MAX_BATCH), "--max-waiting", str(MAX_WAITING))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with our_server(list(models), log, *limits, threads=options.threads) as server:
            return facts | soak(options, f"http://127.0.0.1:{server.port}", server.pid, models)


if __name__ == "__main__":
    sys.exit(main())
