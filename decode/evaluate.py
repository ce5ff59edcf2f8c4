"""python -m decode.evaluate --model tiny-d2f --problems 500

Decodes problems of tasks with one model and one decoder, judges the answers, and says how right and
how fast they were. `--help` lists the options, docs/evaluation.md says what a task is; the parts
are in decode/evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.errors import OutputError
from d2f.files import write_beside
from d2f.locks import locked
from d2f.quiet import quiet
from decode.commands.run_command import command, say
from decode.commands.several_ranks import followed
from decode.evaluation.evaluation_flags import parse
from decode.reporting.places import check_folder, check_place
from decode.reporting.shown_progress import ShownProgress, standard_output

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from decode.cluster.workers import Crew
    from decode.commands.prompt_jobs import PromptJob


ANSWERS = "answers.jsonl"  # of the folder of --output


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The report that the command line asks for: settings, environment and what was measured
    of each task. Raises InputError before any decoding, NonFiniteLogitsError."""
    if options.output is None:
        return _run(options, None)
    with locked(check_folder(options.output)) as folder:
        report = _run(options, folder)
        _keep(report, folder / "report.json")
    return report


def _run(options: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    from decode.cluster.workers import workers

    given, jobs = _jobs(options, folder)
    _give_notices(options, jobs)
    with workers(options) as crew:
        return _measure(options, crew, given, jobs, folder)


def _measure(
    options: argparse.Namespace,
    crew: Crew,
    given: dict[str, Any],
    jobs: dict[str, list[PromptJob]],
    folder: Path | None,
) -> dict[str, Any]:
    from decode.evaluation.evaluate_task import evaluate_jobs
    from decode.evaluation.judge_pool import JudgePool, default_jobs
    from decode.evaluation.scores import line
    from decode.reporting.record import Output

    every = [job for some in jobs.values() for job in some]
    settled, around, doubt = crew.ask(_about, every)
    if doubt is not None:
        say(f"notice: {doubt}")
    output = None
    if folder is not None:
        output = Output(folder / ANSWERS, settled, [job.source.id for job in every])
        if output.torn:
            say(f"notice: {output.path}: its last line was cut short and is decoded again")
        if output.done:
            say(f"notice: {len(output.done)} of {len(every)} answers are already in {output.path}")
    measured = []
    judges = JudgePool(options.judge_jobs or default_jobs())
    with ShownProgress(standard_output(), "answers") as shown, judges:
        for task in options.tasks:
            measured.append(
                evaluate_jobs(
                    crew,
                    task,
                    jobs[task.name],
                    split=options.split,
                    batch_size=options.batch_size,
                    samples=options.samples,
                    pass_at=options.pass_at,
                    output=output,
                    shown=shown,
                    judges=judges,
                )
            )
            shown.say(line(measured[-1]))
    if judges.failed:
        say(f"notice: {judges.failed} responses were judged wrong because their judge did not end")
    return {
        "model": options.model,
        "adapter": settled["adapter"],
        "decoder": every[0].decoder.name,
        "settings": given,
        "environment": around,
        "rows": measured,
    }


def _about(
    options: argparse.Namespace, model: DiffusionModel, weights: str, jobs: list[PromptJob]
) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """Of a loaded model: what decides the run, what it is measured on, what to doubt."""
    from decode.reporting.environment import environment
    from decode.reporting.notices import doubt_of

    settled = describe(options, model, weights, jobs)
    return settled, environment(model), doubt_of(model, jobs[0].decoder)


def _jobs(
    options: argparse.Namespace, folder: Path | None
) -> tuple[dict[str, Any], dict[str, list[PromptJob]]]:
    """The decoder options that were given, and what is decoded of each task. From the cheapest
    check to the dearest: flags, data, the model's shape, whose the folder is. Raises InputError."""
    from decode.commands.decoder_settings import read_settings
    from decode.commands.load_model import check_options, outline
    from decode.commands.prompt_jobs import make_jobs, refuse_equal_samples, task_sources
    from decode.commands.task_problems import draw_problems
    from decode.reporting.record import Output

    settings = read_settings(options)
    length = settings.given.get("max_new_tokens")
    settings.check([length or task.response_length for task in options.tasks])
    check_options(options)
    sources = {
        task.name: task_sources(
            task, draw_problems(task, options.split, options.problems or task.default_count)
        )
        for task in options.tasks
    }
    shape = outline(options.model, options.adapter, options.family, options.tensor_parallel)
    jobs = {
        name: make_jobs(shape, known, settings, raw=False, n=options.samples)
        for name, known in sources.items()
    }
    every = [job for some in jobs.values() for job in some]
    if folder is not None:
        Output.refuse_early(folder / ANSWERS, describe(options, shape, "", every))
    refuse_equal_samples("--samples", options.samples, every)
    return settings.given, jobs


def describe(
    options: argparse.Namespace, model: DiffusionModel, weights: str, jobs: list[PromptJob]
) -> dict[str, Any]:
    """What decides a run's answers and verdicts."""
    from decode.commands.run_header import header

    return {
        **header(options, model, weights, jobs),
        "tasks": {task.name: task.identity for task in options.tasks},
        "split": options.split,
        "samples": options.samples,
    }


def _give_notices(options: argparse.Namespace, jobs: dict[str, list[PromptJob]]) -> None:
    """What the user should know before it starts, on standard error."""
    from decode.commands.task_problems import give_notices

    give_notices(options.tasks)
    for task in options.tasks:
        kept = task.kept_back(options.split)
        if kept and options.problems is None:
            count = len(jobs[task.name]) // options.samples
            say(
                f"notice: {task.name}: the {options.split} split has {count} of its "
                f"{count + kept} problems; --split all takes every one"
            )


def _keep(report: dict[str, Any], path: Path) -> None:
    """Write the report; where that fails, hours of work go to standard output instead."""
    text = json.dumps(report, indent=2) + "\n"
    try:
        write_beside(path, text)
    except OutputError as error:
        print(text, end="", flush=True)
        raise OutputError(f"{error}; the numbers are above instead") from error


@command(
    interrupted="interrupted; the answers in an --output stay, the same command goes on",
    goes_on_unread=True,
)
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    options = parse(arguments)
    with quiet(options.verbose):
        if followed(options):
            return
        if options.json is not None:  # a link is followed, as by --output
            options.json = Path(os.path.realpath(options.json))
            check_place(options.json, "--json")
        report = run(options)
    if options.json is not None:
        _keep(report, options.json)


if __name__ == "__main__":
    sys.exit(main())
