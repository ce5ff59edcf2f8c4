"""The command line of `python -m benchmarks.fleet`; parsing it does not import torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fleet.fleet_plan import ARRIVALS, ROUTERS
from d2f.errors import InputError
from decode.cli import Parser, check_least

WAYS = ("D2F", "WeDLM", "autoregressive")
FLEETS = (1, 2, 4, 10, 100, 1000)
GPUS = ("H100", "A100", "RTX4090")

_DESCRIPTION = """\
python -m benchmarks.fleet --record
python -m benchmarks.fleet --check http://127.0.0.1:8000 http://127.0.0.1:8001 --ways D2F
python -m benchmarks.fleet

How many requests a second a fleet of replicas carries within a latency target, with D2F, WeDLM and
autoregressive decoding. --record decodes held-out problems with the bundled models and keeps what
each request feeds and shows in every forward, and what forwards take on this machine. Without it
the recordings in --folder are simulated: report.json, a table and a figure beside them. --check
sends the recorded requests to running servers (`python -m decode.serve`), each a replica, and
prints measured times beside simulated ones. docs/scaling.md says how to read it.
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Raises InputError for a bad command line, SystemExit after --help."""
    options = _parser().parse_args(arguments)
    check_least(
        options, max_batch=1, seed=0, problems=1, threads=1, behind=1, light=2, requests=100
    )  # fmt: skip
    above = [*options.replicas, *options.loads, options.seconds, options.horizon]
    above += [options.latency_ms, options.first_ms]
    if not all(0 < value < math.inf for value in above):
        raise InputError(
            "expected more than 0 for --replicas, --loads, --seconds, --horizon, --latency-ms and "
            "--first-ms"
        )
    if not all(0 <= value < math.inf for value in (options.http_ms, options.event_ms)):
        raise InputError("expected at least 0 for --http-ms and --event-ms")
    if options.model is not None and len(options.ways) > 1:
        raise InputError(f"--model is for one of --ways, got {', '.join(options.ways)}")
    if options.config is not None and options.model is None:
        raise InputError("--config is for a --model: the bundled models have their own")
    if options.record and options.check:
        raise InputError("--record and --check are two commands: expected one of them")
    if options.time is not None and options.floor is not None:
        raise InputError("--time and --floor both say what a forward takes: expected one of them")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "python -m benchmarks.fleet",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("--record", action="store_true", help="record, then stop")
    parser.add_argument("--check", nargs="+", metavar="URL", help="measure beside it, then stop")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/fleet"), help="of all files (runs/fleet)"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--max-batch", type=int, default=16, help="requests in a forward (16)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and requests (0)")
    group = parser.add_argument_group("--record")
    group.add_argument("--task", default="story", help="a generated one or a task file (story)")
    group.add_argument("--model", help="for one way: in place of its bundled model")
    group.add_argument("--config", metavar="FILE", help="the decoder's options of that --model")
    group.add_argument("--problems", type=int, default=64, help="held-out ones (64)")
    group.add_argument("--threads", type=int, default=1, help="of a forward (1)")
    group.add_argument("--compile", action="store_true", help="through torch.compile")
    group = parser.add_argument_group("--check")
    group.add_argument(
        "--behind", type=int, metavar="N", help="replicas behind the URLs (one behind each)"
    )
    group.add_argument(
        "--loads", type=float, nargs="+", default=[0.3, 0.6, 0.8], metavar="SHARE",
        help="of the simulated capacity (0.3 0.6 0.8)",
    )  # fmt: skip
    group.add_argument("--seconds", type=float, default=20, help="of arrivals, a load (20)")
    group.add_argument("--light", type=int, default=40, help="requests one at a time (40)")
    group = parser.add_argument_group("simulation")
    group.add_argument("--replicas", type=int, nargs="+", default=list(FLEETS), metavar="N")
    kinds = list(ARRIVALS.values())
    group.add_argument("--arrivals", nargs="+", choices=kinds, default=kinds)
    group.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    group.add_argument("--latency-ms", type=float, default=500, help="of 95 %% of answers (500)")
    group.add_argument("--first-ms", type=float, default=200, help="of 95 %% of first tokens (200)")
    group.add_argument("--http-ms", type=float, default=0, help="a request, as --check says (0)")
    group.add_argument("--event-ms", type=float, default=0, help="a request and forward (0)")
    group.add_argument("--requests", type=int, default=10_000, help="at least, a run (10000)")
    group.add_argument(
        "--horizon", type=float, default=10, help="how often --latency-ms fits in a run (10)"
    )
    group.add_argument(
        "--time", type=Path, metavar="FILE",
        help="what a forward takes in place of the recording: its `time` as a file, or what "
        "`python -m benchmarks.forward --json` writes",
    )  # fmt: skip
    group.add_argument(
        "--floor", metavar="SHAPE",
        help="in its place the estimated floor of a shape on --gpu, in bf16, e.g. LLaDA-8B",
    )  # fmt: skip
    group.add_argument("--gpu", choices=GPUS, default="H100")
    return parser
