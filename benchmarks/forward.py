"""python -m benchmarks.forward --model tiny-d2f

Where the time of a forward goes, at several batch sizes: held-out problems are decoded by the
engine, and each of its parts is timed in every forward. Printed are medians over the forwards, in
milliseconds: `cpu` is the processor time of the whole process, the others are wall time.

    forward   all of it
    build     the requests' steps as one flat batch on the device
    model     the model's call; on a GPU only its launch
    predict   from logits to tokens and confidences; on a GPU only its launch
    wait      for both, and their way to the host
    accept    the decoders' own work: taking the predictions, the next step
    event     what the caller is told of it

`--profile` lists the operators of the first batch size by their own time instead.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

import d2f
import decode
import decode.engine.engine
from benchmarks import parser
from d2f.files import write_beside
from d2f.model import DiffusionModel
from d2f.tasks import make_problems
from d2f.tasks.task import RESPONSE_LENGTH, TASKS
from decode.decoders import Decoder
from decode.engine.batch import FlatRows
from decode.engine.cuda_graphs import GraphForwards
from decode.engine.engine import Engine
from decode.engine.prompts import encode
from decode.engine.request import Request
from decode.report import environment

PARTS = ("build", "model", "predict", "wait", "accept", "event")


def requests_of(model: DiffusionModel, task: str, problems: int) -> list[Request]:
    """Held-out problems, decoded by the model's own kind of decoder."""
    length = RESPONSE_LENGTH[task]
    decoder: Decoder = decode.Autoregressive(length)
    if model.is_diffusion:
        decoder = decode.D2F(max_new_tokens=length)
    requests = []
    for i, problem in enumerate(make_problems(task, "heldout", problems)):
        ids = encode(model, [{"role": "user", "content": problem.question}], f"{task} {i + 1}")
        requests.append(Request(i, ids, decoder, model.contract, model.tokenizer))
    return requests


def engine_of(model: DiffusionModel, requests: list[Request], batch_size: int) -> Engine:
    """Make an engine with the requests queued."""
    sizes = sorted((request.session.slots for request in requests), reverse=True)
    engine = Engine(model, batch_size=batch_size, slots=sum(sizes[:batch_size]))
    for request in requests:
        engine.submit(request)
    return engine


@contextmanager
def timed_parts(model: DiffusionModel) -> Iterator[dict[str, float]]:
    """Count the seconds of each part while the context lasts."""
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed_run(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(*arguments, **options)
            finally:
                seconds[part] += time.perf_counter() - began

        return timed_run

    def waited(start: Callable[..., Any]) -> Callable[..., Any]:
        """Time also the wait for what is started."""

        def started(*arguments: Any) -> Any:
            pending = start(*arguments)
            return None if pending is None else timed("wait", pending)

        return started

    places: list[tuple[str, Any, str]] = [
        ("build", decode.engine.engine, "join"),
        ("build", FlatRows, "on"),
        ("model", model, "decode_rows"),
        ("model", GraphForwards, "start"),
        ("predict", decode.engine.engine, "table_of"),
        ("predict", decode.engine.engine, "split"),
        ("accept", Request, "accept"),
        ("event", Request, "event"),
    ]
    with ExitStack() as stack:
        for part, place, name in places:
            stack.enter_context(patch.object(place, name, timed(part, getattr(place, name))))
        for place, name in ((GraphForwards, "start"), (Engine, "_compute")):
            stack.enter_context(patch.object(place, name, waited(getattr(place, name))))
        yield seconds


def measure(model: DiffusionModel, task: str, problems: int, batch_size: int) -> dict[str, float]:
    """Median milliseconds of each part of a forward, the median rows fed and the forwards."""
    engine_of(model, requests_of(model, task, 1), 1).advance()  # pays for what is done only once
    engine = engine_of(model, requests := requests_of(model, task, problems), batch_size)
    times: dict[str, list[float]] = {part: [] for part in ("forward", "cpu", *PARTS)}
    with timed_parts(model) as seconds:
        while engine.waiting or engine.running:
            seconds.update(dict.fromkeys(PARTS, 0.0))
            wall, cpu = time.perf_counter(), time.process_time()
            engine.advance()
            times["cpu"].append(time.process_time() - cpu)
            times["forward"].append(time.perf_counter() - wall)
            for part in PARTS:
                times[part].append(seconds[part])
    calls = [request.result.calls for request in requests if request.result is not None]
    rows = statistics.median(fed for own in calls for fed, _ in own)
    medians = {part: 1e3 * statistics.median(values) for part, values in times.items()}
    return {"forwards": engine.forwards, "rows": rows, **medians}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    given = parser(__doc__)
    given.add_argument("--model", default="tiny-d2f", help="folder, hub name or bundled model")
    given.add_argument("--task", default="story", choices=TASKS)
    given.add_argument("--problems", type=int, default=16, help="held-out problems (default 16)")
    given.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16], metavar="N")
    given.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 elsewhere")
    given.add_argument("--device", help="default: cuda where there is one")
    given.add_argument("--compile", action="store_true", help="through torch.compile")
    given.add_argument("--profile", action="store_true", help="the operators instead")
    given.add_argument("--json", type=Path, help="file for the numbers")
    options = given.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    model = d2f.load(options.model, dtype=options.dtype, device=options.device)
    if options.compile:
        model.compile()
    about = environment(model)
    print(
        f"{options.model} on {options.task}, {options.problems} problems; {about['device']}, "
        f"{about['dtype']}, {about['threads']} threads, "
        f"{'compiled' if options.compile else 'not compiled'}; torch {about['torch']}, "
        f"transformers {about['transformers']}, Python {about['python']}"
    )
    if options.profile:
        requests = requests_of(model, options.task, options.problems)
        engine = engine_of(model, requests, options.batch_sizes[0])
        with torch.profiler.profile() as profile:
            for _ in engine.run():
                pass
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
        return 0
    columns = ("forward", "cpu", *PARTS)
    print(f"{'batch':>6}{'forwards':>10}{'rows':>7}" + "".join(f"{c:>9}" for c in columns))
    measured = {}
    for batch_size in options.batch_sizes:
        measured[batch_size] = row = measure(model, options.task, options.problems, batch_size)
        counts = f"{batch_size:>6}{row['forwards']:>10}{row['rows']:>7.0f}"
        print(counts + "".join(f"{row[column]:>9.3f}" for column in columns), flush=True)
    if options.json is not None:
        write_beside(options.json, json.dumps(measured) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
