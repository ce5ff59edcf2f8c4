"""python -m distill.rollouts --model tiny-teacher --decoder wino --output rollouts.jsonl

Decodes training problems of the tiny tasks and keeps the responses that the checker accepts, each
with the forward that decided every token for good: what `objective: wino_plus` trains on. The file
is written line by line in the order of the problems; the same command again goes on where it
stopped. `--decoder d2f` records the pipeline, with the forward that each block was there from.

All of the response is decoded, not only up to its end token, as in WINO+'s own collection. A
problem whose answer is wrong is decoded again at the next of `--temperatures`, if there is one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from d2f.errors import InputError
from d2f.quiet import quiet
from decode.commands.decoder_flags import add_flags, given_options, own_names
from decode.commands.parser import (
    Parser,
    add_model,
    add_tasks,
    add_verbose,
    add_workers,
    check_least,
    check_workers,
    chosen_tasks,
)
from decode.commands.run_command import command
from decode.decoders import DECODERS
from decode.reporting.places import hold_output

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from decode.cluster.workers import Crew
    from distill.rollouts.collect import TrajectoryJob
    from distill.rollouts.rollout_ledger import RolloutLedger
    from distill.rollouts.trajectories import Rollout

RECORDED = ("wino", "d2f")
_NOT_TAKEN = ("max_new_tokens", "early_exit", "lossless")  # all of a task's response is decoded


def run(options: argparse.Namespace) -> None:
    """Collect what the options say. Raises InputError before any work."""
    with hold_output(options.output):
        _run(options)


def _run(options: argparse.Namespace) -> None:
    from decode.cluster.workers import workers
    from decode.commands.decoder_settings import DecoderSettings
    from decode.commands.load_model import check_options, outline
    from decode.commands.task_problems import give_notices
    from distill.rollouts.collect import make_jobs
    from distill.rollouts.rollout_ledger import RolloutLedger

    given = given_options(options)
    # All of the response is wanted, also what follows the end token.
    settings = DecoderSettings(options.decoder, given | {"early_exit": False})
    settings.check([task.response_length for task in options.tasks])
    check_options(options)
    shape = outline(options.model, options.adapter)
    jobs = make_jobs(shape, settings, options.tasks, options.problems, options.seed)
    RolloutLedger.refuse_early(options.output, describe(options, shape, "", jobs))
    give_notices(options.tasks)
    with workers(options) as crew:
        file = RolloutLedger(options.output, crew.ask(describe, jobs))
        _collect(options, crew, jobs, file)
    for task in options.tasks:
        kept = sum(name.startswith(f"{task.name}-") for name in file.done)
        print(f"{task.name:<10} {kept} of {options.problems} right and kept")


def _collect(
    options: argparse.Namespace, crew: Crew, jobs: list[TrajectoryJob], file: RolloutLedger
) -> None:
    """Collect what the file does not have."""
    from rich.console import Console

    from decode.cluster.workers import chunk_size
    from decode.reporting.shown_progress import ShownProgress
    from distill.rollouts.collect import collect

    order = {job.name: number for number, job in enumerate(jobs)}
    places = [order.get(name, -1) for name in file.done]
    # Rollouts are written in the order of the problems: the last one says how far the run was.
    if -1 in places or places != sorted(places):
        raise InputError(f"{file.path}: its rollouts are not problems of this run in their order")
    first = places[-1] + 1 if places else 0
    if first:
        print(f"{file.path}: going on after {[*file.done][-1]}", file=sys.stderr)
    work = partial(
        collect,
        temperatures=options.temperatures,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    left = [*enumerate(jobs)][first:]
    size = chunk_size(options.batch_size, len(left), crew.count)
    waiting: dict[int, Rollout | None] = {}
    display = ShownProgress(Console(stderr=True) if sys.stderr.isatty() else None, "problems")
    file.start()
    with display:
        display.begin(len(jobs))
        display.advance(first)
        for number, rollout in crew.spread(work, left, size):
            # None for a problem that no temperature solved: it takes its turn and leaves no line.
            waiting[number] = rollout
            display.advance()
            # Requests finish in any order; one is written when all before it are written or have
            # failed.
            while first in waiting:
                found = waiting.pop(first)
                if found is not None:
                    file.add(found)
                first += 1


def describe(
    options: argparse.Namespace, model: DiffusionModel, weights: str, jobs: list[TrajectoryJob]
) -> dict[str, Any]:
    """What decides a run's rollouts, and what their reader checks."""
    from d2f import __version__
    from decode.decoders.visibility import mask_kind
    from distill.rollouts.trajectories import tokenizer_hash

    assert model.tokenizer is not None
    mask = "block-causal" if options.decoder == "d2f" else mask_kind(model.contract)
    return {
        "version": __version__,
        "model": options.model,
        "adapter": options.adapter,
        "weights": weights,
        "tokenizer": tokenizer_hash(model.tokenizer),
        "mask_id": model.mask_id,
        "mask": mask.replace("-", "_"),
        "dtype": model.precision,
        "device": model.device.type,
        "compiled": model.is_compiled,
        "decoder": options.decoder,
        "options": asdict(jobs[0].decoder) | {"max_new_tokens": None},
        "tasks": [task.identity for task in options.tasks],
        "problems": options.problems,
        "seed": options.seed,
        "temperatures": options.temperatures,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace. Raises InputError, SystemExit after --help."""
    parser = Parser(
        "python -m distill.rollouts",
        description=__doc__,
        usage=argparse.SUPPRESS,  # the description opens with it
        allow_abbrev=False,
    )
    add_model(parser, "compile", default=None)
    parser.add_argument("--decoder", choices=RECORDED, default="wino", help="default: wino")
    add_tasks(parser)
    parser.add_argument(
        "--problems", type=int, default=1000, help="training problems a task (default 1000)"
    )
    parser.add_argument("--output", required=True, help="JSONL file of the rollouts")
    parser.add_argument(
        "--temperatures",
        default="0",
        help="tried in this order until an answer is right (default 0: greedy alone; the official "
        "collection takes 0,0.1,0.2,0.3,0.4,0.5)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of problems and sampling (default 0)")
    parser.add_argument(
        "--batch-size", type=int, default=32, help="problems a forward (default 32)"
    )
    add_workers(parser)
    add_verbose(parser)
    group = parser.add_argument_group("decoder")
    kinds = [DECODERS[name] for name in RECORDED]
    add_flags(group, kinds, [name for name in own_names(kinds) if name not in _NOT_TAKEN])
    options = parser.parse_args(arguments)
    options.tasks = chosen_tasks(options)
    check_least(options, problems=1, batch_size=1)
    check_workers(options)
    if options.seed < 0:
        raise InputError(f"--seed must be 0 or more, got {options.seed}")
    options.temperatures = _temperatures(options.temperatures)
    return options


def _temperatures(text: str) -> list[float]:
    try:
        ladder = [float(part) for part in text.split(",")]
    except ValueError:
        ladder = []
    if not ladder or not all(0 <= t < float("inf") for t in ladder):
        raise InputError(f"--temperatures must be numbers of 0 or more, got {text!r}")
    return ladder


@command(interrupted="interrupted: the same command goes on", goes_on_unread=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    options = parse(arguments)
    with quiet(options.verbose):
        run(options)


if __name__ == "__main__":
    sys.exit(main())
