"""python -m benchmarks.width_choice

Whether the widths that the engine chooses (`decode.engine.row_budget`) are as fast as the best
fixed one on this machine. In one process each way decodes the same problems once a round, in an
order that is drawn anew for each round; what else the host does in these seconds meets all of them.
A round before the first is not counted. Below each fixed window (1 is autoregressive) is printed
the median over the rounds of the engine's speed over the window's, and in brackets the interval in
which the median of such rounds lies, with a confidence of at least 95 %, whatever their
distribution (order statistics; below six rounds there is no such one, and the whole range is
printed). Ways that gave an answer other tokens are named.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import d2f
import decode
from benchmarks.made_up_costs import MODELS
from benchmarks.row_file import RowFile
from d2f.device import usable_cpus
from d2f.model import DiffusionModel
from d2f.tasks import make_problems
from d2f.tasks.task import RESPONSE_LENGTH
from decode.report import processor

CHOSEN = "chosen"
WINDOWS = (1, 4, 8, 16)
CONFIDENCE = 0.95


def ways(length: int) -> dict[str, decode.Decoder]:
    """Each way of decoding, all to the same tokens, by its name in the table."""
    verified = {
        str(window): decode.WeDLM(window, verify="ar", max_new_tokens=length)
        for window in WINDOWS
        if window > 1
    }
    auto = decode.WeDLM("auto", verify="ar", max_new_tokens=length)
    return {CHOSEN: auto, "1": decode.Autoregressive(length), **verified}


def measured(
    model: DiffusionModel, task: str, in_flight: int, problems: int, rounds: int
) -> dict[str, Any]:
    """Tokens a second of each way, in each round; how many problems one decodes; how many answers
    differed in any of its rounds from the first way's."""
    count = max(problems, 10 * in_flight)
    prompts = [
        [{"role": "user", "content": problem.question}]
        for problem in make_problems(task, "heldout", count)
    ]
    decoders, draws = ways(RESPONSE_LENGTH[task]), random.Random(1)
    speeds: dict[str, list[float]] = {way: [] for way in decoders}
    differ = dict.fromkeys(decoders, 0)
    expected: list[list[int]] | None = None
    for counted in [False] + [True] * rounds:
        order = list(decoders)
        draws.shuffle(order)
        for way in order:
            began = time.perf_counter()
            results = decode.generate(model, prompts, decoders[way], batch_size=in_flight)
            seconds = time.perf_counter() - began
            tokens = [result.tokens for result in results]
            expected = expected or tokens
            other = sum(a != b for a, b in zip(tokens, expected, strict=True))
            differ[way] = max(differ[way], other)
            if counted:
                speeds[way].append(sum(map(len, tokens)) / seconds)
    row = {"task": task, "in_flight": in_flight, "problems": count}
    return row | {"speeds": speeds, "differ": differ}


def compared(speeds: dict[str, list[float]], window: str) -> tuple[float, float, float]:
    """The median of the chosen widths' speed over a window's in the same round, its interval."""
    shares = sorted(a / b for a, b in zip(speeds[CHOSEN], speeds[window], strict=True))
    out = outside(len(shares))
    return median(shares), shares[out], shares[-1 - out]


def outside(rounds: int) -> int:
    """How many of the lowest, and of the highest, of so many values the interval of their median
    leaves out: as many as leave it a confidence of `CONFIDENCE`, by the binomial distribution."""
    tail, out = 0.0, -1
    while out < (rounds - 1) // 2:
        tail += math.comb(rounds, out + 1) / 2**rounds
        if 2 * tail > 1 - CONFIDENCE:
            break
        out += 1
    return max(out, 0)


def best_window(speeds: dict[str, list[float]]) -> str:
    """The fixed one of the highest median speed."""
    return max(map(str, WINDOWS), key=lambda window: median(speeds[window]))


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    speeds = row["speeds"]
    cells = [f"{row['task']:<8}{row['in_flight']:>9}{median(speeds[CHOSEN]):>9,.0f}"]
    for window in map(str, WINDOWS):
        share, low, high = compared(speeds, window)
        cells.append(f"{share:>8.2f} [{low:.2f}, {high:.2f}]")
    others = [f"{way}: {n} of {row['problems']}" for way, n in row["differ"].items() if n]
    return "".join(cells) + f"  other tokens in {', '.join(others)}" * bool(others)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.width_choice",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    levels = {"type": int, "nargs": "+"}
    parser.add_argument("--tasks", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--in-flight", default=[1, 2, 4, 8, 16, 32, 64], **levels)
    parser.add_argument(
        "--problems", type=int, default=64, help="at least; ten for each request in flight"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    for name in ("problems", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    facts = {"device": processor(), "cores": usable_cpus(), "date": time.strftime("%Y-%m-%d")}
    table = RowFile(options.json, facts | {"rounds": options.rounds})
    print(f"{'task':<8}{'in flight':>9}{'tokens/s':>9}", end="")
    print("".join(f"{f'over window {window}':>21}" for window in WINDOWS))
    for task in options.tasks:
        model = d2f.load(MODELS[task], device="cpu", dtype="float32")
        model.compile()
        for in_flight in options.in_flight:
            row = measured(model, task, in_flight, options.problems, options.rounds)
            table.add(row)
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
