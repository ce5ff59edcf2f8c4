"""python -m benchmarks.forward --shape llada-1b

Does decoding in parallel pay on this CPU, at this shape, in which precision? A model with random
weights is made layer by layer in each precision, and timed:

1. Milliseconds of the engine's forward of 1, 16, 32 and 64 rows behind --cached rows, from tokens
   on the host to tokens on the host, against its own floor: the bytes that it must read over the
   measured memory bandwidth, or its operations over the measured rate of a large product, whichever
   is longer. The numbers of rows between are for 2.
2. Tokens a second of D2F's pipeline: the rows of each forward as --model decodes held-out problems,
   one at a time, the first with the prompt, at the milliseconds of 1; between two numbers of rows
   that were timed a straight line. Counted are visible tokens.
3. The same prompts and numbers of tokens, a token a forward: by the same engine, at the
   milliseconds of 1, and by vLLM (--vllm-python), which is run, with weights of the same shape.

For figures worth keeping nothing else may run. The report is report.json, report.md and rows.png in
--output.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.at_shape.floors import Machine, Work
from benchmarks.at_shape.report import draw, render
from benchmarks.at_shape.traces import (
    Trace,
    autoregressive_seconds,
    pipeline_seconds,
    record,
    widest,
)
from benchmarks.at_shape.vllm_baseline import run_vllm
from benchmarks.decode_step import ours, seconds
from benchmarks.shapes import SHAPES, build, build_by_layers
from benchmarks.timing import about
from d2f.device import parse_dtype
from d2f.errors import InputError
from d2f.files import make_folder, write_beside
from d2f.model import DiffusionModel
from d2f.quantize import QUANTISATIONS, available, check_quantize, slowness
from d2f.quiet import quiet
from d2f.tasks.task import TASKS
from decode.cli import Parser, check_least, command, require_matplotlib, say
from decode.engine.async_engine import free_bytes
from decode.report import processor

CPU = torch.device("cpu")
DTYPES = ("float32", "bfloat16")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for."""
    traces = {task: record(options.model, task, options.problems) for task in options.tasks}
    widths = [widest(some) for some in traces.values()]
    rows = sorted({*options.rows, *(n for n in (4, 8, 24, 48, 96) if n < max(widths)), max(widths)})
    machine = Machine()
    found = []
    for precision in options.precisions:
        say(f"{options.shape} in {precision}")
        found.append(measured(options, precision, rows, machine, traces))
        gc.collect()
    servers = []
    for dtype in options.vllm_dtypes if options.vllm_python else ():
        say(f"{options.shape} by vLLM in {dtype}")
        servers.append(
            run_vllm(options.vllm_python, options.shape, dtype, traces, options.vllm_seconds)
        )
    return {
        "shape": options.shape,
        "parameters": build(options.shape, torch.float32, "meta").backbone.num_parameters(),
        "shown": options.rows,
        "cached": options.cached,
        "repeat": options.repeat,
        "about": {**about("see precision"), "processor": processor()},
        "machine": machine.facts(),
        "traces": {"model": options.model, "problems": options.problems}
        | {task: _counted(some) for task, some in traces.items()},
        "precisions": found,
        "vllm": servers,
    }


def measured(
    options: argparse.Namespace,
    precision: str,
    rows: Sequence[int],
    machine: Machine,
    traces: dict[str, list[Trace]],
) -> dict[str, Any]:
    """A precision's forwards, and what the traces come to; or why it was left out."""
    dtype, quantize = parts(precision)
    # Not quantised, as an upper bound; what is quantised is made layer after layer.
    needed = Work.of(build(options.shape, dtype, "meta"), options.shape).weights * 1.2
    if quantize is None and needed > free_bytes(CPU):
        return {
            "precision": precision,
            "left_out": f"about {needed / 2**30:.0f} GiB of weights, "
            f"{free_bytes(CPU) / 2**30:.0f} GiB are free",
        }
    model = build_by_layers(options.shape, dtype, quantize)
    if options.compile:
        model.compile()
    work = Work.of(model, options.shape)
    forwards = {
        count: timed(model, count, options.cached, options.repeat) for count in sorted(rows)
    }
    floors = {count: work.floor(machine, count, options.cached) for count in forwards}
    return {
        "precision": precision,
        "dtype": str(dtype).removeprefix("torch."),
        "compiled": options.compile,
        "gigabytes": work.weights / 1e9,
        "slow": slowness(precision, CPU),
        "forwards": [
            {"rows": n, "ms": ms, "bytes_ms": floors[n][0], "operations_ms": floors[n][1]}
            for n, ms in forwards.items()
        ],
        "tokens_per_second": {
            task: {
                "d2f": _tokens(some) / pipeline_seconds(some, forwards),
                "autoregressive": _tokens(some) / autoregressive_seconds(some, forwards),
            }
            for task, some in traces.items()
        },
    }


def timed(model: DiffusionModel, rows: int, cached: int, repeat: int) -> float:
    """Median milliseconds of the engine's forward."""
    return 1e3 * seconds(ours(model, rows, cached, "cpu")["eager"], "cpu", repeat)


def parts(precision: str) -> tuple[torch.dtype, str | None]:
    """Its dtype, which for a quantisation is the one that this CPU is fast in, and quantisation."""
    if precision in QUANTISATIONS:
        return parse_dtype("auto", CPU), precision
    return parse_dtype(precision, CPU), None


def _tokens(traces: Sequence[Trace]) -> int:
    return sum(trace.tokens for trace in traces)


def _counted(traces: Sequence[Trace]) -> dict[str, float]:
    """What the traces are, a forward in the mean, without the first one and its prompt."""
    later = [rows for trace in traces for rows in trace.rows[1:]]
    forwards = sum(len(trace.rows) for trace in traces)
    return {
        "visible_tokens": _tokens(traces),
        "forwards": forwards,
        "prompt_tokens": sum(trace.prompt for trace in traces) / len(traces),
        "rows_per_forward": sum(later) / max(1, len(later)),
        "tokens_per_forward": _tokens(traces) / forwards,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `precisions`, `tasks` and `vllm_dtypes` are lists. Raises InputError."""
    parser = Parser("python -m benchmarks.forward --shape NAME", description=__doc__)
    parser.add_argument("--shape", required=True, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument(
        "--precisions",
        help="with commas: float32, bfloat16 and quantisations (default: all that the CPU has but "
        "int8 where it is slow)",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--cached", type=int, default=256, help="rows before them (default 256)")
    parser.add_argument("--repeat", type=int, default=5, help="median of so many (default 5)")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    parser.add_argument("--model", default="tiny-d2f", help="whose pipeline is recorded")
    parser.add_argument("--tasks", default="story,sudoku")
    parser.add_argument("--problems", type=int, default=16, help="recorded of each task")
    parser.add_argument("--vllm-python", help="of vLLM's environment (default: without vLLM)")
    parser.add_argument("--vllm-dtypes", default=",".join(reversed(DTYPES)), help="with commas")
    parser.add_argument("--vllm-seconds", type=float, default=1800.0, help="at most, a dtype")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/forward/SHAPE")
    options = parser.parse_args(arguments)
    if options.shape not in SHAPES:
        raise InputError(f"--shape must be one of {', '.join(SHAPES)}, got {options.shape!r}")
    check_least(options, cached=0, repeat=1, problems=1)
    if min(options.rows) < 1:
        raise InputError(f"--rows must be at least 1, got {min(options.rows)}")
    options.rows = sorted({1, *options.rows})
    options.tasks, options.vllm_dtypes = options.tasks.split(","), options.vllm_dtypes.split(",")
    for task in options.tasks:
        if task not in TASKS:
            raise InputError(f"--tasks: {task!r} is none of {', '.join(TASKS)}")
    fast = [name for name in available(CPU) if not slowness(name, CPU)]
    given = options.precisions
    options.precisions = given.split(",") if given else [*DTYPES, *fast]
    for precision in options.precisions:
        if precision not in DTYPES:
            check_quantize(precision, CPU, parse_dtype("auto", CPU))
    if options.vllm_python is not None:
        # Absolute, as it is started elsewhere; not resolved: a link to the interpreter is what says
        # which environment it is.
        python = shutil.which(options.vllm_python)
        if python is None:
            raise InputError(f"--vllm-python {options.vllm_python}: no such program")
        options.vllm_python = os.path.abspath(python)
    options.output = options.output or Path("benchmarks/results/forward") / options.shape
    return options


@command(interrupted="interrupted; nothing was written")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    options = parse(arguments)
    require_matplotlib()
    make_folder(options.output)
    with quiet():
        report = run(options)
    write_beside(options.output / "report.json", json.dumps(report, indent=1) + "\n")
    text = render(report)
    write_beside(options.output / "report.md", text)
    draw(report, options.output / "rows")
    print(text, end="")


if __name__ == "__main__":
    sys.exit(main())
