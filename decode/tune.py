"""python -m decode.tune --tasks story --output runs/tune

Searches a decoder's settings for a model on the tuning split of a task, chooses the fastest one
that is accurate enough, measures it on held-out problems, and writes it as YAML for
`python -m decode.pipeline --config`. docs/tuning.md says how; the parts are in decode/tuning.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.locks import locked
from d2f.quiet import quiet
from decode.commands.run_command import command
from decode.reporting.extras import require_matplotlib
from decode.reporting.places import check_folder
from decode.reporting.shown_progress import ShownProgress, standard_output
from decode.tuning.tuning_flags import parse

if TYPE_CHECKING:
    from rich.console import Console

    from d2f.model import DiffusionModel
    from decode.cluster.workers import Crew
    from decode.tuning.space import Space
    from decode.tuning.tuning_report import TuningReport
    from decode.tuning.tuning_run import Tuning

LEDGER = "measurements.jsonl"  # of the folder of --output


def tune(
    model: DiffusionModel,
    tuning: Tuning,
    output: str | Path,
    *,
    name: str | None = None,
    adapter: str | None = None,
    weights: str | None = None,
    figures: bool = True,
    display: ShownProgress | None = None,
) -> TuningReport:
    """Search, choose, measure on held-out problems and write the folder `output`.

    What is in its ledger is not measured again. name, adapter: of the model, for files and
    reports; by default where it was loaded from. weights: their hash, by default that of the model
    as it is. figures: draw the frontier, which needs matplotlib. The speeds are of this machine,
    in visible tokens per second. Raises InputError before any decoding, NonFiniteLogitsError.
    """
    from decode.cluster.workers import OneWorker
    from decode.commands.load_model import weights_hash

    with locked(check_folder(output)) as folder:
        crew = OneWorker(model, weights or weights_hash(model))
        name = name or model.path or model.family
        return _tune(crew, model, tuning, folder, name, adapter, figures, display)


def _tune(
    crew: Crew,
    shape: DiffusionModel,
    tuning: Tuning,
    folder: Path,
    name: str,
    adapter: str | None,
    figures: bool,
    display: ShownProgress | None,
) -> TuningReport:
    """shape: the model, or its outline."""
    from decode.tuning.bench import Bench, check_prompts, make_all_problems
    from decode.tuning.tune_task import tune_task
    from decode.tuning.tuning_ledger import TuningLedger
    from decode.tuning.tuning_report import TuningReport

    if figures:
        require_matplotlib("--no-figures")
    display = display or ShownProgress(None, "problems")
    space = tuning.space().fitted(shape.contract)
    problems = make_all_problems(tuning)
    check_prompts(shape, tuning, space, problems)
    run, around = crew.ask(_about, tuning, space, crew.count)
    ledger = TuningLedger(folder / LEDGER, run)
    if ledger.torn:
        display.say(f"notice: {ledger.path}: its last line was cut short and is measured again")
    if ledger.done:
        display.say(f"notice: {len(ledger.done)} measurements are already in {ledger.path}")
    with display:
        bench = Bench(
            crew,
            space,
            problems,
            ledger,
            tasks=tuning.chosen,
            batch_size=tuning.batch_size,
            on_done=lambda done: display.advance(done.measured.problems, done.text),
        )
        outcomes = [
            tune_task(bench, tuning, task.name, shape.contract, display) for task in tuning.chosen
        ]
    report = TuningReport(
        name,
        adapter,
        space,
        run,
        around,
        outcomes,
        folder,
        tuning.repetitions,
        tuning.chosen,
    )
    report.write(figures=figures)
    if figures:
        from decode.tuning.tuning_figure import draw

        draw(report)
    return report


def _about(
    options: object, model: DiffusionModel, weights: str, tuning: Tuning, space: Space, workers: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a loaded model: what decides the run, and what it is measured on."""
    from decode.reporting.environment import environment
    from decode.tuning.tuning_run import describe

    return describe(model, tuning, space, weights, workers), environment(model)


def run(options: argparse.Namespace, console: Console | None = None) -> None:
    """Tune as the options say, and show the result. Raises InputError before any work."""
    from decode.cluster.workers import workers
    from decode.commands.load_model import check_options, outline
    from decode.commands.task_problems import give_notices
    from decode.tuning.bench import check_prompts, make_all_problems
    from decode.tuning.choose import Goal
    from decode.tuning.summary import PLAIN_WIDTH, show
    from decode.tuning.tuning_ledger import TuningLedger
    from decode.tuning.tuning_run import Tuning, describe

    console = console or standard_output(PLAIN_WIDTH)
    names = ("tasks", "decoder", "lists", "search", "problems", "eta", "budget", "batch_size")
    tuning = Tuning(
        **{name: getattr(options, name) for name in (*names, "heldout", "repetitions", "seed")},
        goal=Goal(options.within, options.min_accuracy),
    )
    check_options(options)
    shape = outline(options.model, options.adapter, options.family)
    # Against the shapes, before the weights are read; `_tune` does so again for who calls `tune`.
    space = tuning.space().fitted(shape.contract)
    check_prompts(shape, tuning, space, make_all_problems(tuning))
    give_notices(tuning.chosen)
    with locked(check_folder(options.output)) as folder:
        known = describe(shape, tuning, space, "", options.workers)
        TuningLedger.refuse_early(folder / LEDGER, known)
        display = ShownProgress(console, "problems")
        with workers(options) as crew:
            names_of_model = options.model, crew.ask(_adapter)
            report = _tune(crew, shape, tuning, folder, *names_of_model, options.figures, display)
    show(report, console)


def _adapter(options: argparse.Namespace, model: DiffusionModel, weights: str) -> str | None:
    """That beside a loaded model: one that was named alone, in its place, finds its base."""
    adapter: str | None = options.adapter
    return None if adapter == options.model else adapter


@command(interrupted="interrupted; the same command goes on where it stopped", goes_on_unread=True)
def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> None:
    """Run the command; its exit status. console: where to show it, by default standard output."""
    options = parse(arguments)
    with quiet(options.verbose):
        run(options, console)


if __name__ == "__main__":
    sys.exit(main())
