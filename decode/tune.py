"""python -m decode.tune --tasks story --output runs/tune

Searches a decoder's settings for a model on the tuning split of a task, chooses the fastest one
that is accurate enough, measures it on held-out problems, and writes it as YAML for
`python -m decode.pipeline --config`. docs/tuning.md says how; the parts are in decode/tuning.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.errors import InputError
from d2f.locks import locked
from d2f.quiet import quiet
from decode.commands.run_command import command
from decode.reporting.extras import require_matplotlib
from decode.reporting.places import is_there
from decode.tuning.tuning_flags import parse

if TYPE_CHECKING:
    from rich.console import Console

    from d2f.model import DiffusionModel
    from decode.tuning.bench import Bench, Problems
    from decode.tuning.measurements import Measurements
    from decode.tuning.outcome import Final, Outcome
    from decode.tuning.space import Setting, Space
    from decode.tuning.tuning_display import Silent
    from decode.tuning.tuning_report import TuningReport
    from decode.tuning.tuning_run import Tuning


def tune(
    model: DiffusionModel,
    tuning: Tuning,
    output: str | Path,
    *,
    name: str | None = None,
    adapter: str | None = None,
    weights: str | None = None,
    figures: bool = True,
    display: Silent | None = None,
) -> TuningReport:
    """Search, choose, measure on held-out problems and write the folder `output`.

    What is in its ledger is not measured again. name, adapter: of the model, for files and
    reports; by default where it was loaded from. weights: their hash, by default that of the model
    as it is. figures: draw the frontier, which needs matplotlib. The speeds are of this machine,
    in visible tokens per second. Raises InputError before any decoding, NonFiniteLogitsError.
    """
    with locked(check_folder(output)) as folder:
        return _tune(model, tuning, folder, name, adapter, weights, figures, display)


def _tune(
    model: DiffusionModel,
    tuning: Tuning,
    folder: Path,
    name: str | None,
    adapter: str | None,
    weights: str | None,
    figures: bool,
    display: Silent | None,
) -> TuningReport:
    from decode.commands.load_model import weights_hash
    from decode.evaluate import environment
    from decode.tuning.bench import Bench, check_prompts
    from decode.tuning.tuning_display import Silent
    from decode.tuning.tuning_ledger import TuningLedger
    from decode.tuning.tuning_report import TuningReport

    if figures:
        require_matplotlib("--no-figures")
    display = display or Silent()
    space = tuning.space().fitted(model.contract)
    problems = all_problems(tuning)
    check_prompts(model, space, problems)
    run = describe(model, tuning, space, weights or weights_hash(model))
    ledger = TuningLedger(folder / "measurements.jsonl", run)
    if ledger.torn:
        display.say(f"notice: {ledger.path}: its last line was cut short and is measured again")
    if ledger.done:
        display.say(f"notice: {len(ledger.done)} measurements are already in {ledger.path}")
    with display:
        bench = Bench(
            model,
            space,
            problems,
            ledger,
            batch_size=tuning.batch_size,
            on_done=display.done,
        )
        outcomes = [tune_task(bench, tuning, task, display) for task in tuning.tasks]
    report = TuningReport(
        name or model.path or model.family,
        adapter,
        space,
        run,
        environment(model),
        outcomes,
        folder,
        tuning.repetitions,
    )
    report.write(figures=figures)
    return report


def all_problems(tuning: Tuning) -> Problems:
    """The problems of both splits. Raises InputError for more than there are."""
    from decode.tuning.bench import make_all_problems

    counts = {"tuning": tuning.problems, "heldout": tuning.heldout}
    return make_all_problems(tuning.tasks, counts, tuning.seed)


def tune_task(bench: Bench, tuning: Tuning, task: str, display: Silent) -> Outcome:
    """One task: the search on its tuning problems, the choice, the final measurement."""
    from decode.tuning.choose import choose
    from decode.tuning.outcome import Outcome
    from decode.tuning.search import make_plan, run_search
    from decode.tuning.tuning_ledger import job

    settings = bench.space.settings
    used: list[float] = []  # seconds of this search, what the ledger had of it included

    def seconds_left() -> float:
        return tuning.budget_per_task - sum(used)

    def measure(setting: Setting, first: int, stop: int) -> Measurements | None:
        wanted = job(task, "tuning", setting, first, stop)
        spent = bench.ledger.spent(task) >= tuning.budget_per_task
        if spent and wanted not in bench.ledger.done and stop > plan.look:
            return None
        measured = bench.measure(wanted)
        used.append(bench.ledger.done[wanted].wall)
        return measured

    def on_rung(alive: int, first: int, stop: int) -> None:
        what = f"{task}, {alive} settings on tuning problems {first + 1} to {stop}"
        display.begin(what, alive * (stop - first))

    plan = make_plan(
        tuning.search,
        len(settings),
        tuning.problems,
        eta=tuning.eta,
        batch_size=tuning.batch_size,
    )
    goal = tuning.goal
    found = run_search(
        settings,
        measure,
        plan,
        goal,
        seed=tuning.seed,
        seconds_left=seconds_left,
        on_rung=on_rung,
    )
    choice = choose(goal, found.comparable())
    chosen, reference = (
        settings[found.compared[i]] for i in (choice.chosen, choice.reference)
    )  # fmt: skip
    finals = measure_heldout(bench, tuning, task, chosen, reference, display)
    return Outcome(task, goal, settings, found, choice, finals)


def measure_heldout(
    bench: Bench,
    tuning: Tuning,
    task: str,
    chosen: Setting,
    reference: Setting,
    display: Silent,
) -> list[Final]:
    """The chosen, the most accurate and the default setting on the held-out problems, in turn."""
    from decode.tuning.measurements import joined
    from decode.tuning.outcome import Final
    from decode.tuning.search import passes, smallest_pass
    from decode.tuning.tuning_ledger import job
    from decode.tuning.tuning_report import finals_of

    defaults = bench.space.defaults(bench.model.contract)
    wanted = finals_of(chosen, reference, defaults)
    parts = passes(0, tuning.heldout, smallest_pass(tuning.batch_size))
    total = len(wanted) * tuning.repetitions * tuning.heldout
    display.begin(f"{task}, {len(wanted)} settings on held-out problems", total)
    parts_of: dict[tuple[int, int], list[Measurements]] = {}
    for repetition in range(tuning.repetitions):
        for first, stop in parts:
            for i, (_, setting) in enumerate(wanted):
                measured = bench.measure(job(task, "heldout", setting, first, stop, repetition))
                parts_of.setdefault((i, repetition), []).append(measured)
    return [
        Final(roles, setting, [joined(parts_of[i, r]) for r in range(tuning.repetitions)])
        for i, (roles, setting) in enumerate(wanted)
    ]


def describe(model: DiffusionModel, tuning: Tuning, space: Space, weights: str) -> dict[str, Any]:
    """What decides a run's measurements. The goal, the budget and the final measurement's size
    are not in it: they may change over one ledger."""
    from d2f import __version__
    from decode.evaluate import environment

    around = environment(model)
    return {
        "version": __version__,
        "weights": weights,
        "family": model.family,
        **{key: around[key] for key in ("device", "threads", "dtype", "compiled", "torch")},
        "decoder": space.decoder,
        "grid": {name: list(values) for name, values in space.grid.items()},
        "tasks": list(tuning.tasks),
        "search": tuning.search,
        "problems": tuning.problems,
        "eta": tuning.eta,
        "batch_size": tuning.batch_size,
        "seed": tuning.seed,
    }


def check_folder(output: str | Path) -> Path:
    """The folder. Raises InputError if there is one that cannot be written, or something else."""
    if not str(output):
        raise InputError("--output is empty: expected a folder")
    folder = Path(os.path.realpath(output))
    if is_there(folder, "--output") and not folder.is_dir():
        raise InputError(f"--output {output}: no folder can be there: it is a file")
    if folder.exists() and not os.access(folder, os.W_OK):
        raise InputError(f"--output {output}: the folder cannot be written")
    return folder


def run(options: argparse.Namespace, console: Console | None = None) -> None:
    """Tune as the options say, and show the result. Raises InputError before any work."""
    from rich.console import Console

    from decode.commands.load_model import check_options, load, outline
    from decode.tuning.bench import check_prompts
    from decode.tuning.choose import Goal
    from decode.tuning.summary import show
    from decode.tuning.tuning_display import Live, Plain
    from decode.tuning.tuning_run import Tuning

    console = console or Console(force_terminal=sys.stdout.isatty(), highlight=False)
    names = ("tasks", "decoder", "lists", "search", "problems", "eta", "budget", "batch_size")
    tuning = Tuning(
        **{name: getattr(options, name) for name in (*names, "heldout", "repetitions", "seed")},
        goal=Goal(options.within, options.min_accuracy),
    )
    check_options(options)
    shape = outline(options.model, options.adapter, options.family)
    check_prompts(shape, tuning.space().fitted(shape.contract), all_problems(tuning))
    live = console.is_terminal and not console.is_dumb_terminal
    with locked(check_folder(options.output)) as folder:
        model, weights = load(options)
        display = Live(console) if live else Plain(console)
        names_of_model = options.model, options.adapter, weights
        report = _tune(model, tuning, folder, *names_of_model, options.figures, display)
    show(report, console)


@command(interrupted="interrupted; the same command goes on where it stopped")
def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> None:
    """Run the command; its exit status. console: where to show it, by default standard output."""
    options = parse(arguments)
    with quiet(options.verbose):
        run(options, console)


if __name__ == "__main__":
    sys.exit(main())
