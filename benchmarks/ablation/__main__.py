"""python -m benchmarks.ablation --config d2f --output FOLDER

Trains every variant of a configuration with every seed, decodes the same held-out problems with
each, and writes report.json and report.md: accuracies and paired differences with intervals. What
they read (a teacher, rollouts) is made before, where the configuration says how (`first`). Runs are
kept in `--runs` (default runs/ and the output's name); the same command again goes on where it was.
`--only "* 300 of 8-11"` does a part, `--report-only` none; the report, written after each run, is
of all that is there, and says which seeds each figure has. What the output's report.json has of the
same trainings is not done again where its folder is gone, so a report goes on on another machine.
Keys of the configuration can be overridden: --problems 50 --set.steps 20.
`python -m benchmarks.ablation.figures FOLDER` draws it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.ablation.ablation_config import Ablation, Run, read_ablation
from benchmarks.ablation.ablation_report import render
from benchmarks.ablation.first_steps import make, needed
from benchmarks.ablation.reported import Reported, key_of
from benchmarks.ablation.run_processes import carry_out_all
from benchmarks.ablation.runs import found, is_kept, is_whole
from d2f.command import CommandParser
from d2f.errors import InputError, NonFiniteLogitsError
from d2f.files import locked, write_beside
from d2f.quiet import quiet
from decode.cli import check_least, command


def run(ablation: Ablation, output: Path, runs: Path, jobs: int, only: str, command: str) -> None:
    """Do what is left of the runs whose folders' names match `only`, and report all that is there.
    Raises InputError."""
    plan = ablation.plan(runs)  # read once: what is edited meanwhile is for the next call
    chosen = [run for run in plan if fnmatchcase(run.name, only)]
    if only and not chosen:
        names = ", ".join(run.name for run in plan)
        raise InputError(f"--only {only}: expected a pattern that matches some of {names}")
    reported = Reported.read(output / "report.json")
    if chosen:  # what the report has is compared with what it was trained on, too
        make(needed(ablation.first, [run for run in plan if run in chosen or reported.has(run)]))
    kept = [run for run in plan if is_kept(run) or found(ablation, run, reported)]
    reported.check_kept(map(key_of, [*kept, *chosen]))
    left = [run for run in chosen if not is_whole(ablation, run, reported)]

    def report_so_far() -> dict[str, Any]:
        return report_of(ablation, plan, reported, output.name, command)

    def keep_so_far() -> None:  # the folders may be on a disk that does not last
        report = report_so_far()
        if not reported.lost(map(key_of, report["runs"])):  # else once those are done again
            write(report, output)

    if left:
        carry_out_all(ablation, left, reported, jobs, keep_so_far)
    report = report_so_far()
    if not report["runs"]:
        raise InputError(f"{runs}: nothing of this ablation is measured yet")
    write(report, output)


def report_of(
    ablation: Ablation, plan: Sequence[Run], reported: Reported, name: str, command: str
) -> dict[str, Any]:
    """What is measured of a plan so far."""
    return {
        "title": f"Ablation {name}",
        "command": command,
        "config": ablation.model_dump(mode="json"),
        "planned": [
            {"name": run.name, "rows": len(run.decode) * len(ablation.chosen)} for run in plan
        ],
        "runs": [done for run in plan if (done := found(ablation, run, reported)) is not None],
    }


def write(report: dict[str, Any], output: Path) -> None:
    write_beside(output / "report.json", json.dumps(report, indent=1) + "\n")
    write_beside(output / "report.md", render(report))


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
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--only", default="*", metavar="PATTERN", help="runs whose folders' names match, as in *-11"
    )
    part.add_argument(
        "--report-only", action="store_const", dest="only", const="", help="train nothing, "
        "decode nothing: the report of what is there",
    )  # fmt: skip
    options, overrides = parser.parse_known_args(arguments)
    check_least(options, jobs=1)
    if find_spec("scipy") is None:
        raise InputError("intervals need scipy: pip install 'd2f-toolkit[ablation]'")
    with quiet():
        ablation = read_ablation(options.config, overrides)
    runs = options.runs or Path("runs") / options.output.name
    whole = [*usual.split(), "--config", options.config, "--output", str(options.output)]
    with quiet(), locked(options.output):
        command = shlex.join([*whole, *overrides])
        run(ablation, options.output, runs, options.jobs, options.only, command)


if __name__ == "__main__":
    sys.exit(main())
