"""python -m benchmarks.ablation --config d2f --output FOLDER

Trains every variant of a configuration with every seed, decodes the same held-out problems with
each, and writes report.json and report.md: means over seeds with intervals. Runs are kept in
`--runs` (default runs/ and the output's name); the same command again goes on where it was.
Keys of the configuration can be overridden: --problems 50 --set.steps 20.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.ablation.ablation_config import Ablation, read_ablation
from benchmarks.ablation.ablation_report import render
from benchmarks.ablation.runs import measure_untrained, train_and_measure
from d2f.command import CommandParser
from d2f.errors import InputError, NonFiniteLogitsError
from d2f.files import write_beside
from d2f.locks import locked
from decode.commands.parser import check_least
from decode.commands.run_command import command


def run(ablation: Ablation, output: Path, runs: Path, jobs: int, command: str) -> None:
    """Run what is left of an ablation and write its report. Raises InputError."""
    configs = ablation.trainings(runs)  # read once: what is edited meanwhile is for the next call
    threads = max(1, (os.cpu_count() or 1) // jobs)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when a process loads torch
    context = multiprocessing.get_context("spawn")
    # A process a run: what a run leaves in accelerate or torch cannot reach the next.
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        waiting = [
            pool.submit(measure_untrained, ablation, entry, runs / entry.name)
            for entry in ablation.untrained
        ]
        for variant, config in configs:
            waiting.append(pool.submit(train_and_measure, ablation, variant, config))
        found = []
        try:
            for future in waiting:
                found.append(future.result())
                print(_line(found[-1]), flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    rest = len(ablation.untrained)
    report = {
        "title": f"Ablation {output.name}",
        "command": command,
        "config": ablation.model_dump(mode="json"),
        "untrained": found[:rest],
        "runs": found[rest:],
    }
    write_beside(output / "report.json", json.dumps(report, indent=1) + "\n")
    write_beside(output / "report.md", render(report))


def _line(found: dict[str, Any]) -> str:
    name = f"{found['variant']} {found.get('seed', '')}".strip()
    rows = (f"{row['decoding']} {row['task']} {row['right']}" for row in found["rows"])
    return f"{name}: {'; '.join(rows)} right"


@command(
    FloatingPointError,
    BrokenProcessPool,
    NonFiniteLogitsError,
    interrupted="interrupted: the same command goes on",
)
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    usual = "python -m benchmarks.ablation"
    parser = CommandParser(usual, description=__doc__)
    parser.add_argument(
        "--config", required=True, help="YAML file, or a name of ablations in `d2f configs`"
    )
    parser.add_argument("--output", required=True, type=Path, help="folder of the report")
    parser.add_argument("--runs", type=Path, help="folder of the trained models")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    options, overrides = parser.parse_known_args(arguments)
    given = sys.argv[1:] if arguments is None else list(arguments)
    check_least(options, jobs=1)
    if find_spec("scipy") is None:
        raise InputError("intervals need scipy: pip install 'd2f-toolkit[ablation]'")
    ablation = read_ablation(options.config, overrides)
    runs = options.runs or Path("runs") / options.output.name
    with locked(options.output):
        run(ablation, options.output, runs, options.jobs, shlex.join([*usual.split(), *given]))


if __name__ == "__main__":
    sys.exit(main())
