"""python -m benchmarks.made_up_costs

How good the widths are that the engine chooses (`decode.engine.row_budget`), where no noise of a
machine hides it: each forward is computed, and is then taken to have lasted

    a + b * requests + c * max(rows, flat)   milliseconds

of a made-up machine. The engine is told that time with a scatter, as a real clock would; the speeds
below are of the time without it, so that they are the same on any machine. Speeds are tokens a
second over those of the best fixed window (1 is autoregressive). The first round is the engine's
first sight of task and machine, with what it has to learn in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import d2f
import decode
from benchmarks.row_file import RowFile
from d2f.model import DiffusionModel
from d2f.tasks import make_problems
from d2f.tasks.task import RESPONSE_LENGTH
from decode.engine.learned import Learned

SCATTER = 0.2  # of the logarithm of a time
WINDOWS = (1, 4, 8, 16)
MODELS = {"story": "tiny-wedlm", "sudoku": "tiny-wedlm", "coding": "tiny-code-wedlm"}


@dataclass
class Machine:
    """a, b, c, flat: of a forward's time, as above. seconds: of all forwards so far."""

    a: float
    b: float
    c: float
    flat: int
    seconds: float = 0.0

    def note(
        self, learned: Learned, rows: int, reads: int, requests: int, draws: np.random.Generator
    ) -> None:
        """A forward ran: count its time, and tell it to what learns."""
        took = (self.a + self.b * requests + self.c * max(rows, self.flat)) / 1000
        self.seconds += took
        scatter = float(draws.lognormal(sigma=SCATTER))
        learned.curve.note(rows, reads, requests, took * scatter)


# About what the tiny models take on a CPU's four and two cores, and one that feeds 512 rows for
# the price of one.
MACHINES = {
    "4 cores": (1.4, 0.13, 0.036, 16),
    "2 cores": (2.7, 0.12, 0.07, 16),
    "flat": (8.0, 0.05, 0.02, 512),
}


def measured(task: str, machine: str, in_flight: int, waves: int, rounds: int) -> dict[str, Any]:
    """Tokens a second of each fixed window and of each round of the engine's choice."""
    problems = make_problems(task, "heldout", max(24, waves * in_flight))
    prompts = [[{"role": "user", "content": problem.question}] for problem in problems]
    length = RESPONSE_LENGTH[task]
    found: dict[str, Any] = {"task": task, "machine": machine, "in_flight": in_flight}
    draws = np.random.default_rng(1)

    def speed(model: DiffusionModel, decoder: decode.Decoder) -> float:
        made_up = Machine(*MACHINES[machine])

        def note(self: Learned, rows: int, reads: int, requests: int, *_: float) -> None:
            made_up.note(self, rows, reads, requests, draws)

        with patch.object(Learned, "note_forward", note):
            results = decode.generate(model, prompts, decoder, batch_size=in_flight)
            return sum(len(result.tokens) for result in results) / made_up.seconds

    model = _loaded(task)
    found["fixed"] = {
        window: speed(model, decode.WeDLM(window, verify="ar", max_new_tokens=length))
        if window > 1
        else speed(model, decode.Autoregressive(length))
        for window in WINDOWS
    }
    model = _loaded(task)  # what was learned of costs goes with the one before
    auto = decode.WeDLM("auto", verify="ar", max_new_tokens=length)
    return found | {"chosen": [speed(model, auto) for _ in range(rounds)]}


def _loaded(task: str) -> DiffusionModel:
    model = d2f.load(MODELS[task])
    model.compile()
    return model


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    best = max(row["fixed"].values())
    shares = [*row["fixed"].values(), row["chosen"][0], float(np.mean(row["chosen"][1:]))]
    return f"{row['task']:<8}{row['machine']:<9}{row['in_flight']:>9}" + "".join(
        f"{share / best:>8.2f}" for share in shares
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.made_up_costs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    numbers = {"type": int, "nargs": "+"}
    parser.add_argument("--tasks", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--machines", nargs="+", default=list(MACHINES), choices=MACHINES)
    parser.add_argument("--in-flight", default=[1, 2, 4, 8, 16, 32, 64], **numbers)
    parser.add_argument("--waves", type=int, default=4, help="problems for each request in flight")
    parser.add_argument("--rounds", type=int, default=5, help="of the engine's choice, at least 2")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    facts = {"waves": options.waves, "scatter": SCATTER, "machines": MACHINES}
    table = RowFile(options.json, facts)
    windows = "".join(f"{f'w{window}':>8}" for window in WINDOWS)
    print(f"{'task':<8}{'machine':<9}{'in flight':>9}{windows}{'first':>8}{'chosen':>8}")
    for task in options.tasks:
        for machine in options.machines:
            for in_flight in options.in_flight:
                row = measured(task, machine, in_flight, options.waves, options.rounds)
                table.add(row)
                print(line(row), flush=True)


if __name__ == "__main__":
    main()
