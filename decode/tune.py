"""Search a decoder's settings for a model and a task, and check the choice on held-out problems:
d2f tune."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
from rich.console import Console
from tyro.conf import Positional, Suppress, arg

from d2f import __version__
from d2f import flags as command_line
from d2f.command import command, require_extra
from d2f.config import dump
from d2f.contract import Contract
from d2f.errors import InputError, did_you_mean
from d2f.files import locked, write_beside
from d2f.flags import check_least
from d2f.quiet import quiet
from d2f.tasks import DEFAULT_TASKS, Problem, Task, find_tasks
from decode.cli import (
    DEFAULT_MODEL,
    OneProcessModel,
    TaskOptions,
    WorkerOptions,
    decoder_options,
    require_matplotlib,
)
from decode.decoders import Decoder, find_decoder
from decode.decoders.base import (
    common_options,
    default_grid,
    number,
    one_of,
    options_of,
    searchable,
)
from decode.display import ShownProgress, standard_output
from decode.jobs import draw_problems, encode_problems, give_notices
from decode.ledger import Ledger, check_folder, refuse_early
from decode.report import Measurements, environment, joined, markdown_table, paired
from decode.workers import Crew, OneWorker, workers

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

LEDGER = "measurements.jsonl"  # of the output folder
SMALLEST_RUNG = 20  # problems
PLAIN_WIDTH = 160  # columns, where the output is not a terminal
ROLES = ("chosen", "most accurate in the search", "defaults")
TOUCH = 1e-9  # accuracies are shares of small counts: what is closer than this is equal
NOT_SEARCHED = (*common_options(), "max_new_tokens")
DECIDES = ("search", "problems", "eta", "batch_size", "seed")  # of a run's measurements
Kind = Literal["halving", "grid", "tpe"]

Setting = Mapping[str, int | float]
"""Values of some of a decoder's options that are numbers."""
Grid = Mapping[str, Sequence[int | float]]
Searched = list[tuple[Setting, Measurements]]


# The command line.


@dataclass(kw_only=True)
class SearchOptions:
    """Choose the settings (every combination of the lists is one), the search and the goal.

    chosen: the tasks, each tuned on its own.
    """

    decoder: Annotated[str, arg(metavar="NAME")] = "d2f"
    """--decoder NAME --help shows the options of another"""
    given: Suppress[dict[str, Any]] = field(default_factory=dict)
    search: Annotated[Kind, arg(metavar="NAME")] = "halving"
    """halving: drop settings that cannot reach the bound; grid: all on all problems; tpe: halving
    of --trials settings"""
    trials: Annotated[int, arg(metavar="N")] = 30
    """settings that tpe tries"""
    problems: Annotated[int, arg(metavar="N")] = 200
    """tuning problems at the last rung"""
    eta: Annotated[int, arg(metavar="N")] = 3
    """each rung has N times the problems of the one before"""
    budget: Annotated[float | None, arg(metavar="SECONDS")] = None
    """of measuring in the search, over all runs into this output"""
    within: Annotated[float | None, arg(metavar="POINTS")] = None
    """choose the fastest within so many percentage points of the most accurate (default: 1)"""
    min_accuracy: Annotated[float | None, arg(metavar="SHARE")] = None
    """choose the fastest with at least this accuracy, in [0, 1]"""
    batch_size: Annotated[int, arg(metavar="N")] = 1
    """problems decoded together; speed is that of such batches"""
    seed: Annotated[int, arg(metavar="N")] = 0
    """of the problems and draws"""
    heldout: Annotated[int, arg(metavar="N")] = 500
    """held-out problems of the final measurement"""
    repetitions: Annotated[int, arg(metavar="N")] = 3
    """of the final measurement, for its timing"""

    if TYPE_CHECKING:

        @property
        def chosen(self) -> tuple[Task, ...]: ...

    @classmethod
    def more(cls, words: Sequence[str]) -> list[Any]:
        """Make a flag of each option that is a number: a list of values to try."""
        flags = []
        for one in decoder_options(words, "d2f"):
            if one.is_number and one.name not in NOT_SEARCHED:
                tried = ",".join(f"{value:g}" for value in one.search)
                said = f"{one.help} (default: {tried or one.shown})"
                about = arg(metavar="LIST", help=said, help_behavior_hint="")
                flags.append((one.name, Annotated[str | None, about], None))
        return flags

    def check(self) -> None:
        """Read the lists. Raises InputError for values out of range, and flags that do not go
        together."""
        whole = {o.name for o in options_of(find_decoder(self.decoder)) if o.kind is int}
        for name, text in self.given.items():
            kind = int if name in whole else float
            try:
                if isinstance(text, str):
                    self.given[name] = [kind(value) for value in text.split(",")]
            except ValueError as error:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag}: expected numbers with commas, got {text!r}") from error
        one_of("search", self.search, get_args(Kind))
        check_least(
            self, trials=1, problems=1, eta=2, batch_size=1, seed=0, heldout=1, repetitions=1
        )
        bounds: dict[str, Any] = {"budget": {"above": True, "most": 1e9}, "within": {"most": 100}}
        for name, bound in (bounds | {"min_accuracy": {"most": 1}}).items():
            if (value := getattr(self, name)) is not None:
                number(name, value, **bound)
        if self.within is not None and self.min_accuracy is not None:
            raise InputError("--within and --min-accuracy exclude each other: expected one")

    def bound(self, best: float) -> float:
        """Return the accuracy to reach where the best setting has `best`."""
        if self.min_accuracy is not None:
            return self.min_accuracy
        return best - (1.0 if self.within is None else self.within) / 100

    @property
    def goal(self) -> str:
        if self.min_accuracy is not None:
            return f"the fastest with an accuracy of at least {self.min_accuracy:.1%}"
        return f"the fastest within {-100 * self.bound(0.0):g} points of the most accurate"

    def grid(self, contract: Contract | None = None) -> dict[str, tuple[int | float, ...]]:
        """Return the values to search of each option: those given, else the decoder's default ones,
        and of a model's contract what it was trained with, such as its block size.

        Raises InputError for an option that the decoder does not have, a value that it refuses for
        a task, and a model that it cannot decode.
        """
        kind = find_decoder(self.decoder)
        known = searchable(kind)
        values = {**default_grid(kind), **self.given}
        there = f"of those that can be searched it has {', '.join(known) or 'none'}"
        for name in self.given.keys() - {*known}:
            near = did_you_mean(name, known)
            raise InputError(f"the decoder {self.decoder} has no option {name}{near}; {there}")
        if not values:
            raise InputError(f"the decoder {self.decoder} has no default grid: give lists; {there}")
        grid = {name: tuple(dict.fromkeys(values[name])) for name in known if name in values}
        for task, setting in product(self.chosen, settings_of(grid)):
            self.build(setting, task)
        if contract is not None:
            kind().check(contract)
            own = {name: (value,) for name, value in kind.with_model_defaults({}, contract).items()}
            grid = {**own, **grid}
        return grid

    def build(self, setting: Setting, task: Task) -> Decoder:
        """Make the decoder with this setting, for responses of the task."""
        values: dict[str, Any] = {"max_new_tokens": task.response_length, "stop": task.stop}
        return find_decoder(self.decoder)(**values | dict(setting))

    def defaults(self, grid: Grid, contract: Contract) -> Setting:
        """Return the decoder's defaults of the searched options, without those that are None."""
        kind = find_decoder(self.decoder)
        decoder = kind(**kind.with_model_defaults({}, contract))
        values = {name: getattr(decoder, name) for name in searchable(kind) if name in grid}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def rungs(self) -> list[tuple[int, int]]:
        """Return the problems ``[first, stop)`` after which settings are looked at again: 200
        problems and eta 3 are [0, 23), [23, 67), [67, 200)."""
        stops = [self.problems]
        # Enough problems for the batch to be full most of the time.
        smallest = max(SMALLEST_RUNG, 4 * self.batch_size)
        while -(-stops[0] // self.eta) >= smallest:
            stops.insert(0, -(-stops[0] // self.eta))
        return list(pairwise([0, *stops]))

    def draw(self, model: DiffusionModel, grid: Grid) -> dict[str, list[list[Problem]]]:
        """Draw the tuning and the held-out problems of each task. Raises InputError unless the
        model can take every one with the task's response length."""
        found: dict[str, list[list[Problem]]] = {}
        for task in self.chosen:
            decoder = self.build({name: values[0] for name, values in grid.items()}, task)
            found[task.name] = []
            for split, count in (("tuning", self.problems), ("heldout", self.heldout)):
                option = "--problems" if split == "tuning" else "--heldout"
                problems = draw_problems(task, split, count, self.seed, option)
                encode_problems(model, problems, decoder, f" of the {split} split")
                found[task.name].append(problems)
        return found


@dataclass(kw_only=True)
class Options(OneProcessModel, TaskOptions, SearchOptions, WorkerOptions):
    """Search the settings of a decoder on tuning problems, choose the fastest one that is accurate
    enough, measure it on held-out problems, and write it as YAML for `d2f decode --config`.

    The same command again goes on where it stopped. docs/evaluation.md says how it chooses. Exit
    status: 0 done; 1 NaN or infinite logits; 2 bad input, found before any work; 130 interrupted.
    """

    examples = (
        "d2f tune runs/tune --tasks story",
        "d2f tune runs/tune2 --within 2 --tau-conf 0.9,0.95,0.99 --block-size 8,16",
    )

    output: Positional[str]
    """folder for measurements.jsonl, the frontier, the report and a YAML a task"""
    figures: bool = True
    """draw the frontier (needs the extra plot)"""

    def check(self) -> None:
        """Raise InputError without what the command needs."""
        require_extras(self.figures)


@dataclass(kw_only=True)
class Tuning(SearchOptions):
    """Say in Python what is tuned, and how: the flags of the command. Raises InputError for a value
    that is out of range.

    Args:
        tasks: tasks, or names or files of some, each tuned on its own.
        lists: values to search by option, over the decoder's default grid.
    """

    tasks: Sequence[Task | str] = DEFAULT_TASKS
    lists: Mapping[str, Sequence[int | float]] = field(default_factory=dict)

    @cached_property
    def chosen(self) -> tuple[Task, ...]:
        return find_tasks(self.tasks)

    def __post_init__(self) -> None:
        self.given = dict(self.lists)
        self.check()
        self.grid()  # a bad value of an option is found here


def settings_of(grid: Grid) -> list[dict[str, int | float]]:
    """List every combination of the values."""
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


# Measuring: problems decoded and judged with a setting.

Job = tuple[Task, Decoder, Sequence[Problem], int]
"""Problems to decode with a decoder, so many together."""


def measure_jobs(
    model: DiffusionModel, jobs: Iterable[tuple[str, Job]]
) -> Iterator[tuple[str, Measurements]]:
    """Measure each job, after one problem of it that is not timed."""
    from decode.evaluate import decode_and_judge

    for name, (task, decoder, problems, batch_size) in jobs:
        for some in (problems[:1], problems):
            _, measured = decode_and_judge(model, decoder, task, some, batch_size=batch_size)
        yield name, measured


@dataclass
class Bench:
    """Measure settings of a task, and keep what was measured in the ledger."""

    tuning: SearchOptions
    task: Task
    crew: Crew
    ledger: Ledger
    display: ShownProgress

    def measure(
        self, what: str, settings: Sequence[Setting], problems: Sequence[Problem]
    ) -> list[Measurements]:
        """Decode problems with each setting that the ledger does not have. what: names them."""
        where, jobs = f"{self.task.name} {what} {len(problems)}", {}
        names = [f"{where} {json.dumps(setting, sort_keys=True)}" for setting in settings]
        for name, setting in zip(names, settings, strict=True):
            if name not in self.ledger.rows:  # two trials of tpe may have one setting
                decoder = self.tuning.build(setting, self.task)
                jobs[name] = self.task, decoder, problems, self.tuning.batch_size
        self.display.advance((len(names) - len(jobs)) * len(problems))
        for name, measured in self.crew.map(measure_jobs, jobs.items(), 1):
            values = {key: array.tolist() for key, array in vars(measured).items()}
            self.ledger.add({"id": name, **values})
            self.display.advance(len(problems))
        rows = [self.ledger.rows[name].items() for name in names]
        return [Measurements(**{k: np.array(v) for k, v in row if k != "id"}) for row in rows]


# The search, the choice, and the check on problems that no decision has used.


def search(bench: Bench, grid: Grid, problems: Sequence[Problem]) -> tuple[Searched, bool]:
    """Try settings until all, or the budget, are done, as a study of Optuna: all of a grid in turn,
    rung by rung, so that a machine that gets slower does so for all; tpe as many at a time as there
    are workers. With the same measurements the search comes out the same. Return what was measured,
    and whether the budget ended it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    tuning, task, display, together = bench.tuning, bench.task, bench.display, bench.crew.count
    sampler = optuna.samplers.TPESampler(seed=tuning.seed)
    # Accuracy and tokens a second.
    study = optuna.create_study(directions=["maximize", "maximize"], sampler=sampler)
    categories = optuna.distributions.CategoricalDistribution
    options: dict[str, Any] = {name: categories(values) for name, values in grid.items()}
    settings = settings_of(grid)
    left = len(settings)
    if tuning.search == "tpe":  # which finds settings by itself
        left = min(left, tuning.trials)
    else:
        together = left
        for setting in settings:
            study.enqueue_trial(setting)
    budget = (tuning.budget or math.inf) / len(tuning.chosen)
    best: dict[int, float] = {}  # accuracy that any setting has shown on so many problems
    searched: dict[str, tuple[Setting, Measurements]] = {}
    display.begin(left * len(problems), f"{task.name}: search of {left} settings")
    while left and budget > 0:
        trials = [study.ask(options) for _ in range(min(left, together))]
        left -= len(trials)
        running: list[tuple[Any, list[Measurements]]] = [(trial, []) for trial in trials]
        for first, stop in tuning.rungs:
            settings = [trial.params for trial, _ in running]
            found = bench.measure(f"tuning {first}", settings, problems[first:stop])
            for (_, parts), part in zip(running, found, strict=True):
                parts.append(part)
                budget -= float(part.seconds.sum())
            so_far = [(trial, parts, joined(parts)) for trial, parts in running]
            best[stop] = max([best.get(stop, 0.0), *(one.accuracy for *_, one in so_far)])
            running = []
            for trial, parts, measured in so_far:
                # By Wilson's interval less accurate than the goal asks for.
                lost = measured.interval[1] < tuning.bound(best[stop])
                if stop == len(problems):
                    study.tell(trial, [measured.accuracy, measured.tokens_per_second])
                elif budget <= 0 or (lost and tuning.search != "grid"):
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                    display.advance(len(problems) - stop)
                else:
                    running.append((trial, parts))
                    continue
                searched.setdefault(described(trial.params), (trial.params, measured))
                display.say(
                    f"{task.name}, {described(trial.params)}: {measured.count_right} of {stop} "
                    f"right, {measured.tokens_per_second:.1f} tokens/s"
                )
    return [*searched.values()], budget <= 0


def choose(goal: SearchOptions, measured: Sequence[Measurements]) -> tuple[int, int, float]:
    """Choose among settings measured on the same problems; return the places of the chosen and of
    the most accurate one, and the bound. If none reaches it, the most accurate one is chosen."""
    best = max(one.accuracy for one in measured)
    bound = goal.bound(best)
    # With few problems, the slowest of equally accurate settings is the better reference.
    found = []
    for least, sign in ((min(bound, best), 1), (best, -1)):
        ranks = [(sign * one.tokens_per_second, one.accuracy) for one in measured]
        enough = [i for i, one in enumerate(measured) if one.accuracy >= least - TOUCH]
        found.append(max(enough, key=ranks.__getitem__))
    return found[0], found[1], bound


def frontier(measured: Sequence[Measurements]) -> list[int]:
    """Return the places of those that no other one dominates, fastest first: none is at least as
    fast and as accurate and better in one of the two."""
    points = [(one.tokens_per_second, one.accuracy) for one in measured]
    front: list[int] = []
    # In order of speed a slower one must be more accurate than the last on the front.
    for i in sorted(range(len(points)), key=lambda i: points[i], reverse=True):
        if not front or points[i][1] > points[front[-1]][1]:
            front.append(i)
    return front


def check_choice(
    bench: Bench, searched: Searched, spent: bool, defaults: Setting, heldout: Sequence[Problem]
) -> dict[str, Any]:
    """Choose among what was searched, measure the choice on held-out problems, beside the most
    accurate setting and the decoder's defaults, and return the task's part of the report. spent:
    the budget ended the search."""
    tuning, task = bench.tuning, bench.task
    most = max(measured.problems for _, measured in searched)
    compared = [one for one in searched if one[1].problems == most]
    common = [measured for _, measured in compared]
    chosen, reference, bound = choose(tuning, common)
    front = [compared[place][0] for place in frontier(common)]
    wanted = (compared[chosen][0], compared[reference][0], defaults)
    settings = [s for place, s in enumerate(wanted) if s not in wanted[:place]]
    total = len(settings) * tuning.repetitions * len(heldout)
    bench.display.begin(total, f"{task.name}: {len(settings)} settings held out")
    # In turn in each repetition: a machine that gets slower does so for all of them.
    runs = [bench.measure(f"heldout {n}", settings, heldout) for n in range(tuning.repetitions)]
    speeds = [[one.tokens_per_second for one in own] for own in zip(*runs, strict=True)]
    best, accurate, usual = (settings.index(setting) for setting in wanted)
    margin = margin_of(tuning, runs[0][best], runs[0][accurate])
    share, low, high = (100 * value for value in margin)
    more = [100 * value for value in difference(runs[0][best], runs[0][usual])]
    times = median(speeds[best]) / median(speeds[usual])
    text = [
        f"{len(searched)} settings were measured, {len(common)} of them on {most} tuning problems."
        + " The budget ended the search there." * spent,
        f"On held-out problems the choice {'holds' if share >= -TOUCH else 'does not hold'} up: "
        f"{abs(share):.1f} points {'above' if share >= 0 else 'below'} the bound "
        f"(95 % {low:+.1f} to {high:+.1f}"
        + ("" if low >= 0 or high < 0 else ": these problems do not settle it")
        + f"); {times:.2f} times as fast as the decoder's defaults, {more[0]:+.1f} points "
        f"(95 % {more[1]:+.1f} to {more[2]:+.1f}).",
    ]
    if common[chosen].accuracy < bound - TOUCH:
        text.insert(0, f"No setting reached the bound of {bound:.1%}: this is the most accurate.")
    rows = [
        {"setting": dict(setting), "compared": one.problems == most, "frontier": setting in front}
        | one.numbers()
        for setting, one in searched
    ]
    finals = []
    for setting, one, rates in zip(settings, runs[0], speeds, strict=True):
        roles = [role for role, other in zip(ROLES, wanted, strict=True) if other == setting]
        row = {"roles": roles, "setting": dict(setting), **one.numbers()}
        row |= {"tokens_per_second": median(rates), "tokens_per_second_of_repetitions": rates}
        finals.append(row)
    return {
        "task": task.name,
        "flags": list(task.words),
        "goal": tuning.goal,
        "bound": bound,
        "chosen": dict(wanted[0]),
        "settings": rows,
        "budget_spent": spent,
        "heldout": finals,
        "margin": dict(zip(("share", "low", "high"), margin, strict=True)),
        "text": text,
    }


def margin_of(
    goal: SearchOptions, chosen: Measurements, reference: Measurements
) -> tuple[float, float, float]:
    """Compute how far the chosen setting's accuracy is above the bound (negative: below), a share,
    and its 95 % interval. With a bound below the reference that is of the paired difference."""
    if goal.min_accuracy is not None:
        low, high = (end - goal.min_accuracy for end in chosen.interval)
        return chosen.accuracy - goal.min_accuracy, low, high
    share, low, high = (x - goal.bound(0.0) for x in difference(chosen, reference))
    return share, low, high


def difference(a: Measurements, b: Measurements) -> tuple[float, float, float]:
    """Compute the accuracy of a minus that of b, on the same problems, and its 95 % interval."""
    gained, lost = int((a.right & ~b.right).sum()), int((~a.right & b.right).sum())
    return (gained - lost) / a.problems, *paired(gained, lost, a.problems)


# The report: what was measured as JSON, which the other files show.

COLUMNS = (
    "measured", "setting", "right", "accuracy (95 %)", "tokens/s (repetitions)", "tokens a forward",
    "forwards a problem",
)  # fmt: skip


LOOKS = {  # of a setting in the figure: how it is drawn, whether it is on the frontier, compared
    "frontier": ("line", True, True),
    "other settings, the same problems": ("light", False, True),
    "dropped on fewer problems (no bars)": ("faint", False, False),
}


def write(report: Mapping[str, Any], folder: Path, *, figures: bool) -> None:
    """Write report.json, report.md, a YAML a task and the figure, each whole or not at all."""
    for task in report["tasks"]:
        write_beside(folder / task["config"], yaml_of(report, task))
    write_beside(folder / "report.json", json.dumps(report, indent=2) + "\n")
    picture = "![accuracy against speed](frontier.png)\n\n" if figures else ""
    write_beside(folder / "report.md", picture + markdown(report, folder))
    if figures:
        draw(report, folder)


def markdown(report: Mapping[str, Any], folder: Path) -> str:
    """Write the report for reading: of each task what was chosen, whether it holds up, the command
    that uses it, and a table of all that was measured."""
    command = ["python", "-m", "decode.pipeline"]
    if report["model"] != DEFAULT_MODEL:
        command += ["--model", report["model"]]
    if report["adapter"] is not None:
        command += ["--adapter", report["adapter"]]
    lines = [f"# Settings of {report['run']['decoder']} for {report['model']}", ""]
    for task in report["tasks"]:
        use = [*command, "--config", str(folder / task["config"]), *task["flags"]]
        rows = [("held-out: " + ", ".join(row["roles"]), *cells(row)) for row in task["heldout"]]
        # The compared settings, fastest first, then the dropped.
        order = sorted(task["settings"], key=lambda r: (-r["problems"], -r["tokens_per_second"]))
        for row in order:
            marks = ["chosen"] * (row["setting"] == task["chosen"])
            marks += ["frontier"] * row["frontier"] + ["dropped"] * (not row["compared"])
            rows.append((f"search{': ' * bool(marks)}{', '.join(marks)}", *cells(row)))
        lines += [f"## {task['task']}", "", *summary(task), "", "```", shlex.join(use), "```", ""]
        lines += [*markdown_table(COLUMNS, rows), ""]
    return "\n".join([*lines, report["counted"], ""])


def summary(task: Mapping[str, Any]) -> list[str]:
    """Say what was chosen, and how it did."""
    chosen = f"Chosen: {described(task['chosen'])}: {task['goal']}, a bound of {task['bound']:.1%}."
    return [chosen, *task["text"]]


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Format a measurement for `COLUMNS`, from the setting on."""
    speeds = row.get("tokens_per_second_of_repetitions")
    spread = f" ({min(speeds):.1f} to {max(speeds):.1f})" if speeds else ""
    return (
        described(row["setting"]) or "defaults",
        f"{row['right']} of {row['problems']}",
        f"{row['accuracy']:.1%} ({row['accuracy_low']:.1%} to {row['accuracy_high']:.1%})",
        f"{row['tokens_per_second']:.1f}{spread}",
        f"{row['tokens_per_forward']:.2f}",
        f"{row['forwards'] / row['problems']:.1f}",
    )


def yaml_of(report: Mapping[str, Any], task: Mapping[str, Any]) -> str:
    """Return decoder options for `d2f decode --config` below comments that say where they come
    from."""
    run, adapter = report["run"], report["adapter"]
    tuned = next(row for row in task["settings"] if row["setting"] == task["chosen"])
    lines = [
        f"d2f tune, model {report['model']}" + (f", adapter {adapter}" if adapter else ""),
        f"weights {run['weights'][:16]}, task {task['task']}, seed {run['seed']}, batch "
        f"{run['batch_size']}, {machine(report)}",
        *summary(task),
    ]
    for what, row in (("tuning", tuned), ("held-out", task["heldout"][0])):
        _, right, accuracy, speed, forward, _ = cells(row)
        lines.append(f"{what}: {right} right, {accuracy}, {speed} tokens/s, {forward} a forward")
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + dump({"decoder": run["decoder"], **task["chosen"]})


def machine(report: Mapping[str, Any]) -> str:
    e = report["environment"]
    compiled = ", compiled" * e["compiled"]
    return f"{e['dtype']}{compiled}, {e['device']}, {e['threads']} threads, {e['date']}"


def described(setting: Setting) -> str:
    """Format a setting: ``tau_conf 0.9, tau_add 0.1``."""
    return ", ".join(f"{name} {value:g}" for name, value in setting.items())


def draw(report: Mapping[str, Any], folder: Path) -> None:
    """Write frontier.png and frontier.svg, light and dark: a panel a task, with the search and the
    held-out measurement, whose speeds are of another time."""
    from decode import plots

    run = report["run"]
    several = [name for name, values in run["grid"].items() if len(values) > 1]

    def point(row: Mapping[str, Any], task: Mapping[str, Any]) -> plots.Point:
        y, low, high = (100 * row[f"accuracy{end}"] for end in ("", "_low", "_high"))
        short = {n.removeprefix("tau_"): v for n, v in row["setting"].items() if n in several}
        label = described(short) if row.get("frontier") else ", ".join(row.get("roles", ()))
        speeds = row.get("tokens_per_second_of_repetitions")
        left, right = (min(speeds), max(speeds)) if speeds else (None, None)
        chosen = row["setting"] == task["chosen"]
        return plots.Point(row["tokens_per_second"], y, low, high, label, left, right, chosen)

    panels = []
    for task in report["tasks"]:
        rows, finals = task["settings"], task["heldout"]
        series = []
        for name, (look, *kind) in LOOKS.items():
            its = [row for row in rows if [row["frontier"], row["compared"]] == kind]
            series.append(plots.Series(name, [point(row, task) for row in its], **{look: True}))
        held = f"{finals[0]['problems']} held-out problems, range of repetitions"
        series.append(plots.Series(held, [point(row, task) for row in finals]))
        most = max(row["problems"] for row in rows)
        title = f"{task['task']}: the search, {most} tuning problems"
        bound = (100 * task["bound"], "accuracy to reach")
        panels.append(plots.Panel(title, series, bound=bound))
    caption = (
        f"{report['model']}, decoder {run['decoder']}, batch {run['batch_size']}, "
        f"{machine(report)}. Bars: 95 % Wilson intervals."
    )
    plots.save(panels, caption, folder / "frontier", columns=1)


# The command.


def require_extras(figures: bool) -> None:
    """Raise InputError without optuna, or without matplotlib where figures are drawn."""
    require_extra("tune", "tuning", "optuna")
    if figures:
        require_matplotlib("--no-figures")


def tune(
    model: DiffusionModel, tuning: Tuning, output: str | Path, *, figures: bool = True
) -> dict[str, Any]:
    """Search, choose, measure on held-out problems and write the folder `output`; return what its
    report.json has. What is in its ledger is not measured again. figures: draw the frontier, which
    needs matplotlib. Raises InputError before any decoding, NonFiniteLogitsError."""
    from decode.cli import weights_hash

    require_extras(figures)
    with locked(check_folder(output)) as folder:
        crew, named = OneWorker(model, weights_hash(model)), (model.path or model.family, None)
        return _tune(crew, model, tuning, folder, named, None, figures)


def _tune(
    crew: Crew,
    shape: DiffusionModel,
    tuning: SearchOptions,
    folder: Path,
    named: tuple[str, str | None],
    console: Console | None,
    figures: bool,
) -> dict[str, Any]:
    """shape: the model, or its outline. named: the model and its adapter."""
    grid = tuning.grid(shape.contract)
    problems, defaults = tuning.draw(shape, grid), tuning.defaults(grid, shape.contract)
    run, around = crew.ask(describe, tuning, grid, crew.count)
    report: dict[str, Any] = {"model": named[0], "adapter": named[1], "run": run}
    report |= {"environment": around, "tasks": []}
    with (
        ShownProgress(console, "problems") as display,
        Ledger(folder / LEDGER, run, sync=True) as ledger,
    ):
        if ledger.rows:
            display.say(f"notice: {len(ledger.rows)} measurements are already in {ledger.path}")
        for task in tuning.chosen:
            bench = Bench(tuning, task, crew, ledger, display)
            of_tuning, heldout = problems[task.name]
            part = check_choice(bench, *search(bench, grid, of_tuning), defaults, heldout)
            part["config"] = f"{Path(named[0]).resolve().name}-{task.name}.yaml"
            report["tasks"].append(part)
    report["counted"] = (
        "Counted: visible tokens, before the first end token; wall seconds of decoding in batches "
        f"of {tuning.batch_size}, after one untimed problem; Wilson's intervals, Tango's of "
        f"differences. {named[0]}, {machine(report)}, torch {around['torch']}."
    )
    write(report, folder, figures=figures)
    return report


def describe(
    options: object,
    model: DiffusionModel,
    weights: str,
    tuning: SearchOptions,
    grid: Grid,
    count: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what decides a run's measurements, and the machine, where the model is loaded. The
    goal, the budget and the final measurement's size may change over one output."""
    around = environment(model)
    run = {
        "version": __version__,
        "weights": weights,
        "family": model.family,
        "mask_id": model.mask_id,
        "end_ids": list(model.end_ids),
        # These change speeds: measurements of two machines must not be mixed.
        **{key: around[key] for key in ("device", "threads", "dtype", "compiled", "torch")},
        "decoder": tuning.decoder,
        "grid": {name: list(values) for name, values in grid.items()},
        "tasks": [task.identity for task in tuning.chosen],
        **{key: getattr(tuning, key) for key in DECIDES},
        **({"workers": count} if count > 1 else {}),  # those beside it take memory bandwidth
    }
    return run, around


@command(interrupted="interrupted; the same command goes on where it stopped")
def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> None:
    """Run the command and return its exit status. console: default standard output."""
    options = command_line.parse(Options, arguments, usual="python -m decode.tune")
    with quiet(options.verbose):
        run(options, console or standard_output(PLAIN_WIDTH))


def run(options: Options, console: Console) -> None:
    """Tune as the options say, and show the result. Raises InputError before any work."""
    from decode.cli import checked_outline

    options.grid()  # a bad value of an option is found here
    shape = checked_outline(options)
    grid = options.grid(shape.contract)
    options.draw(shape, grid)  # before the weights are read
    give_notices(options.chosen)
    with locked(check_folder(options.output)) as folder:
        early, _ = describe(options, shape, "", options, grid, options.workers)
        refuse_early(folder / LEDGER, early)
        with workers(options) as crew:
            named = options.model, options.adapter
            report = _tune(crew, shape, options, folder, named, console, options.figures)
    # Not wrapped: a command must stay in one line.
    print(markdown(report, folder), f"written: {folder}", sep="\n", file=console.file)


if __name__ == "__main__":
    sys.exit(main())
