"""python -m benchmarks.max_rows --json benchmarks/results/max-rows.json

Compare the default `max_rows` with fixed windows of verified WeDLM. A window drafts so many tokens
a forward; the tokens are the same for every window. With few requests in flight rows are nearly
free and wide windows win, with many each row costs. `max_rows` narrows the window where many
requests run: printed are visible tokens a second of each fixed window and of the default, and the
default over the best fixed window of each point. All settings take turns in one process, so that
what else the machine does hits all of them; with one thread (OMP_NUM_THREADS=1) seconds are those
of the processor, without what other programs take.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import d2f
import decode
from benchmarks import parser
from d2f.model import DiffusionModel
from d2f.tasks import find_task, make_problems
from decode.report import environment, markdown_table

MODELS = {"story": "tiny-wedlm", "sudoku": "tiny-wedlm", "coding": "tiny-code-wedlm"}
IN_FLIGHT = (1, 4, 16, 64)
WINDOWS = (2, 4, 8, 16)
UNBOUNDED = 2**20
DEFAULT = "default"


def speed(
    model: DiffusionModel, task: str, count: int, in_flight: int, setting: int | str
) -> float:
    """Decode problems of a task; returns visible tokens a second."""
    prompts = [problem.prompt for problem in make_problems(task, "heldout", count)]
    fixed = isinstance(setting, int)
    decoder = decode.WeDLM(
        setting if fixed else 16, max_new_tokens=find_task(task).response_length, verify="ar"
    )
    rows = UNBOUNDED if fixed else None if setting == DEFAULT else int(str(setting).split()[0])
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    results = decode.generate(model, prompts, decoder, batch_size=in_flight, max_rows=rows)
    return sum(len(result.tokens) for result in results) / (clock() - began)


def measure(task: str, settings: Sequence[int | str], repeat: int) -> list[dict[str, Any]]:
    """Measure a task at each number in flight; returns a row each."""
    model = d2f.load(MODELS[task], device="cpu", dtype="float32")
    model.compile()
    rows = []
    for in_flight in IN_FLIGHT:
        count = max(2, in_flight)
        found: dict[int | str, list[float]] = {setting: [] for setting in settings}
        for turn in range(repeat + 1):
            for setting in settings:
                rate = speed(model, task, count, in_flight, setting)
                if turn:  # the first one warms up
                    found[setting].append(rate)
        rates = {str(setting): statistics.median(values) for setting, values in found.items()}
        best = max(rates[str(window)] for window in WINDOWS)
        over = {s: rates[str(s)] / best for s in settings if isinstance(s, str)}
        rows.append({"task": task, "in_flight": in_flight, "rates": rates, "over_best": over})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the summary."""
    given = parser(__doc__)
    given.add_argument("--tasks", nargs="+", default=list(MODELS), choices=MODELS)
    given.add_argument("--max-rows", nargs="*", default=[], help="other values to try")
    given.add_argument("--repeat", type=int, default=5, help="turns that count")
    given.add_argument("--json", type=Path, help="where to write the summary")
    options = given.parse_args(arguments)
    named = [DEFAULT, *(f"{rows} rows" for rows in options.max_rows)]
    rows = [row for t in options.tasks for row in measure(t, [*WINDOWS, *named], options.repeat)]
    header = ["task", "in flight", *map(str, WINDOWS), *named, *(f"{n} / best" for n in named)]
    lines = [
        [row["task"], row["in_flight"]]
        + [f"{row['rates'][str(setting)]:,.0f}" for setting in (*WINDOWS, *named)]
        + [f"{row['over_best'][name]:.3f}" for name in named]
        for row in rows
    ]
    print("\n".join(markdown_table(header, lines)))
    means = {n: statistics.mean(row["over_best"][n] for row in rows) for n in named}
    print(", ".join(f"{name}: {mean:.3f} of the best fixed window" for name, mean in means.items()))
    if options.json is not None:
        model = d2f.load(MODELS[options.tasks[0]], device="cpu", dtype="float32")
        about = environment(model) | {"compiled": True}
        summary = {"environment": about, "mean_over_best": means, "points": rows}
        options.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
