"""python -m benchmarks.serve_load --guidellm-python .venv-guidellm/bin/python

Runs `guidellm` and `vllm bench serve` against `python -m decode.serve` (tiny-d2f with d2f, tiny-ar
with autoregressive) and against vLLM's server with tiny-ar, at several rates of requests: the same
held-out story and sudoku problems as text, greedy, streamed. All servers are up; one is measured at
a time, in turn at each rate. What the tools report goes to --output as it comes, a line a run, and
the same command goes on where it was; at the end a table, load.png and load.svg beside it.

guidellm needs an environment of its own (`pip install guidellm`), vLLM's is that of `make vllm`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.errors import InputError, one_line
from d2f.files import make_folder
from decode.ledger import Ledger

if TYPE_CHECKING:
    from benchmarks.serve_load.load_tools import Load
    from d2f.tasks import Problem
    from decode.compare.server import Server

OUTPUT = Path("benchmarks/results/serve/load.jsonl")
TASKS = ("story", "sudoku")
LENGTH = 64
TOOL_SECONDS = 1200.0  # the longest run
OURS = {"D2F": ("tiny-d2f", ("--config", "tiny-d2f-story")), "autoregressive": ("tiny-ar", ())}
VLLM = {"vLLM": {}, "vLLM one thread": {"VLLM_CPU_OMP_THREADS_BIND": "1"}}
SERVERS = (*OURS, *VLLM)

Run = tuple[str, str, float]  # tool, server, rate


class Points(Ledger):
    """The runs that were made."""

    def __init__(self, path: Path, run: dict[str, Any]):
        super().__init__(path, run, key=lambda row: (row["tool"], row["server"], row["rate"]))


def start(name: str, options: argparse.Namespace, logs: Path) -> tuple[Server, str]:
    """A server by its name here, not started yet, and what it calls its model."""
    from benchmarks.our_server import our_server
    from decode.compare.config import Vllm
    from decode.compare.server import VllmServer

    log = logs / f"{name}.log"
    if name in OURS:
        model, arguments = OURS[name]
        # Nobody is refused: vLLM's queue has no end either.
        more = ("--compile", "--max-waiting", "100000", *arguments)
        return our_server([model], log, *more, threads=options.threads), model
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **VLLM[name]}
    entry = Vllm(name="tiny-ar", kind="vllm", model="tiny-ar", dtype="float32", env=env)
    return VllmServer(entry, options.vllm_python, log), "tiny-ar"


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """All of them, the servers in turn."""
    for rate in options.rates:
        for tool in options.tools:
            for server in options.servers:
                yield tool, server, rate


def measure(
    tool: str, load: Load, problems: Sequence[Problem], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """One run of a tool. Raises InputError where it fails."""
    from benchmarks.serve_load.load_tools import TOOLS

    command_of, read = TOOLS[tool]
    python = options.guidellm_python if tool == "guidellm" else options.vllm_python
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    done = subprocess.run(
        command_of(str(Path(python).absolute()), load, report),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TOOL_SECONDS,
    )
    if done.returncode or not report.is_file():
        said = (done.stdout + done.stderr).strip()[-2000:]
        raise InputError(f"{tool} ended with status {done.returncode}: {said}")
    return read(report, problems)


def work(options: argparse.Namespace, points: Points) -> None:
    """Make the runs that are missing."""
    from benchmarks.serve_load.load_tools import Load
    from d2f.models import resolve
    from d2f.tasks import make_problems
    from decode.compare.entries import tokenizer_of

    missing = [run for run in runs(options) if run not in points.rows]
    if not missing:
        return
    most = max(_count(rate, options) for rate in options.rates)
    halves = [make_problems(t, "heldout", -(-most // 2), seed=options.seed) for t in TASKS]
    problems = [problem for pair in zip(*halves, strict=True) for problem in pair]
    # Of tiny-ar for all: the models share their tokenizer, and libraries take tiny-d2f's
    # folder for Qwen2's.
    tokenizer: Any = tokenizer_of("tiny-ar")
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for problem in problems
    ]
    place = Path(resolve("tiny-ar")).absolute()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        up: dict[str, tuple[Server, str]] = {}
        for name in dict.fromkeys(server for _, server, _ in missing):
            print(f"starting {name} ...", flush=True)
            server, model = start(name, options, folder)
            up[name] = stack.enter_context(server), model
        for tool, name, rate in missing:
            server, model = up[name]
            count = _count(rate, options)
            url = f"http://127.0.0.1:{server.port}"
            load = Load(url, model, place, texts[:count], rate, LENGTH, options.seed)
            found = measure(tool, load, problems[:count], options, folder)
            server.check()
            points.add({"tool": tool, "server": name, "rate": rate, **found})
            print(line(points.rows[tool, name, rate]), flush=True)


def line(point: dict[str, Any]) -> str:
    """A run as a line of the table."""
    right = f", {point['right']} right" if "right" in point else ""
    error = f"; the first: {one_line(str(point['error']))[:200]}" if point["error"] else ""
    return (
        f"{point['tool']:<17}{point['server']:<16}{point['rate']:>6g} requests/s: "
        f"{point['tokens_per_second']:8,.0f} tokens/s, first after {point['first_ms']:8,.0f} ms "
        f"(95 %: {point['first_ms_95']:8,.0f}); {point['failed']} of {point['requests']} failed"
        f"{right}{error}"
    )


def _count(rate: float, options: argparse.Namespace) -> int:
    """Requests of a run."""
    return max(16, round(rate * options.seconds))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tools = ("vllm bench serve", "guidellm")
    parser.add_argument("--rates", type=float, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=15, help="of arrivals, a run (default 15)")
    parser.add_argument("--tools", nargs="+", choices=tools, default=list(tools))
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--threads", type=int, default=1, help="of ours (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of problems and arrivals")
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--guidellm-python", default=".venv-guidellm/bin/python")
    parser.add_argument("--output", type=Path, default=OUTPUT, help=f"default {OUTPUT}")
    options = parser.parse_args(arguments)
    try:
        if min(*options.rates, options.seconds, options.threads) <= 0:
            raise InputError("expected more than 0 for --rates, --seconds and --threads")
        for python in (options.vllm_python, options.guidellm_python):
            if not Path(python).is_file():
                raise InputError(f"there is no {python}: see --help for the two environments")
        make_folder(options.output.parent)
        points = Points(options.output, _facts(options))
        work(options, points)
        _finish(points)
    except (InputError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130
    return 0


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    """What makes a file of results another one."""
    from decode.report import processor

    return {
        "processor": processor(),
        "seconds": options.seconds,
        "threads": options.threads,
        "seed": options.seed,
        "tasks": TASKS,
        "max_tokens": LENGTH,
        "counted": "output tokens as each server counts them: ours those that are visible, "
        "vLLM's the end token, too; times as each tool takes them; right: problems solved",
    }


def _finish(points: Points) -> None:
    """The table and the figure."""
    from benchmarks.serve_load.load_figure import load_figure
    from decode.plots import save

    found = list(points.rows.values())
    for point in found:
        print(line(point))
    run = points.run
    caption = (
        f"{run['processor']}; held-out {' and '.join(run['tasks'])}, greedy, at most "
        f"{run['max_tokens']} tokens; {run['seconds']:g} s of arrivals at each rate"
    )
    for path in save(load_figure(found, caption), points.path.with_suffix("")):
        print(path)


if __name__ == "__main__":
    sys.exit(main())
