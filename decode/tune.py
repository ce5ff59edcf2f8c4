"""Search a decoder's settings for a model and a task, and check the choice on held-out problems:
d2f tune."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
from rich.console import Console
from tyro.conf import Suppress, arg

from d2f import __version__
from d2f import flags as command_line
from d2f.command import command
from d2f.config import dump
from d2f.contract import Contract
from d2f.errors import InputError
from d2f.files import locked, write_beside
from d2f.quiet import quiet
from d2f.tasks import DEFAULT_TASKS, Problem, Task, find_tasks
from decode import cli
from decode.cli import (
    DEFAULT_MODEL,
    OneProcessModel,
    TaskOptions,
    WorkerOptions,
    help_of,
    offered,
    options_by_name,
    require_extra,
    require_matplotlib,
)
from decode.decoders import Decoder, find_decoder
from decode.decoders.base import default_grid, options_of, searchable, whole_number
from decode.display import ShownProgress, standard_output
from decode.jobs import draw_problems, encode_problems, give_notices
from decode.ledger import Ledger, check_folder, refuse_early
from decode.report import Measurements, environment, joined, markdown_table, paired
from decode.workers import Crew, OneWorker, workers

if TYPE_CHECKING:
    import optuna

    from d2f.model import DiffusionModel

LEDGER = "measurements.jsonl"  # of the output folder
SMALLEST_RUNG = 20  # problems
PLAIN_WIDTH = 160  # columns, where the output is not a terminal
ROLES = ("chosen", "most accurate in the search", "defaults")
TOUCH = 1e-9  # accuracies are shares of small counts: what is closer than this is equal
Kind = Literal["halving", "grid", "tpe"]

Setting = Mapping[str, int | float]
"""Values of some of a decoder's options that are numbers."""


# The command line.


@dataclass(kw_only=True)
class SettingsOptions:
    """Settings to search: lists, with commas; every combination is a setting. An option that the
    decoder does not have is an error."""

    decoder: Annotated[str, arg(metavar="NAME", help=cli.SUMMARIES)] = "d2f"
    given: Suppress[dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def lists(self) -> dict[str, list[int | float]]:
        """Read the values of each option that was given. Raises InputError."""
        whole = {o.name for o in options_of(find_decoder(self.decoder)) if o.kind is int}
        found: dict[str, list[int | float]] = {}
        for name, text in self.given.items():
            kind = int if name in whole else float
            try:
                found[name] = [kind(part) for part in text.split(",")]
            except ValueError as error:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag}: expected numbers with commas, got {text!r}") from error
        return found

    def check(self) -> None:
        """Raise InputError for a list that is none of numbers."""
        _ = self.lists


@dataclass(kw_only=True)
class SearchOptions:
    """Search, choice and final measurement."""

    search: Kind = "halving"
    """halving: every setting, on more problems as long as it may reach the bound; grid: all on all;
    tpe: as halving, but only --trials settings, which Optuna's estimator finds promising"""
    trials: Annotated[int, arg(metavar="N")] = 30
    """tpe: settings to try"""
    problems: Annotated[int, arg(metavar="N")] = 200
    """tuning problems at the last rung"""
    eta: Annotated[int, arg(metavar="N")] = 3
    """each rung has N times the problems of the one before"""
    budget: Annotated[float | None, arg(metavar="SECONDS")] = None
    """of measuring in the search, over all runs into this output, shared equally by the tasks: when
    they are spent no further rung, of tpe no further setting, is begun (default: no limit)"""
    within: Annotated[float | None, arg(metavar="POINTS")] = None
    """choose the fastest setting within so many percentage points of the most accurate one
    (default: 1)"""
    min_accuracy: Annotated[float | None, arg(metavar="SHARE")] = None
    """choose the fastest setting with at least this accuracy, in [0, 1]"""
    batch_size: Annotated[int, arg(metavar="N")] = 1
    """problems decoded together; speed is that of such batches"""
    seed: Annotated[int, arg(metavar="N")] = 0
    """of the problems and draws"""
    heldout: Annotated[int, arg(metavar="N")] = 500
    """held-out problems of the final measurement"""
    repetitions: Annotated[int, arg(metavar="N")] = 3
    """of the final measurement, for its timing"""

    def check(self) -> None:
        """Raise InputError for values out of range, and flags that do not go together."""
        if self.search not in get_args(Kind):
            expected = ", ".join(get_args(Kind))
            raise InputError(f"search must be one of {expected}, got {self.search!r}")
        for name in ("problems", "trials", "batch_size", "heldout", "repetitions"):
            whole_number(name, getattr(self, name))
        if self.eta < 2:
            raise InputError(f"eta must be at least 2, got {self.eta}")
        if self.seed < 0:
            raise InputError(f"seed must be 0 or more, got {self.seed}")
        if self.budget is not None and not (math.isfinite(self.budget) and self.budget > 0):
            raise InputError(f"budget must be more than 0 seconds, got {self.budget}")
        if self.within is not None and self.min_accuracy is not None:
            raise InputError("--within and --min-accuracy exclude each other: expected one")
        if not 0 <= self.points <= 100:
            raise InputError(f"within must lie in [0, 100] percentage points, got {self.within}")
        if self.min_accuracy is not None and not 0 <= self.min_accuracy <= 1:
            raise InputError(f"min_accuracy must lie in [0, 1], got {self.min_accuracy}")

    @property
    def points(self) -> float:
        return 1.0 if self.within is None else self.within

    def bound(self, best: float) -> float:
        """Return the accuracy to reach where the best setting has `best`."""
        return best - self.points / 100 if self.min_accuracy is None else self.min_accuracy

    @property
    def goal(self) -> str:
        if self.min_accuracy is not None:
            return f"the fastest setting with an accuracy of at least {self.min_accuracy:.1%}"
        points = f"{self.points:g} percentage point{'' if self.points == 1 else 's'}"
        return f"the fastest setting within {points} of the most accurate one"


@dataclass(kw_only=True)
class OutputOptions:
    """Output."""

    output: Annotated[str, arg(metavar="DIR")]
    """folder for measurements.jsonl, the frontier, the report and a YAML a task"""
    figures: bool = True
    """draw frontier.png and frontier.svg, which needs matplotlib"""

    def check(self) -> None:
        """Raise InputError where figures are asked for and cannot be drawn."""
        if self.figures:
            require_matplotlib("--no-figures")


@dataclass(kw_only=True)
class Options(
    OneProcessModel, TaskOptions, SettingsOptions, SearchOptions, OutputOptions, WorkerOptions
):
    """Search the settings of a decoder on the tuning split of a task, draw the frontier of accuracy
    against tokens per second, choose the fastest setting that is accurate enough, measure it on
    held-out problems, and write it as YAML for `d2f decode --config`.

    The same command again goes on where it stopped. docs/tuning.md says how it chooses.

    Exit status: 0 done; 1 the model gave NaN or infinite logits; 2 bad input, found before any
    work; 130 interrupted, what was measured stays.
    """


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises InputError, SystemExit after --help."""
    kinds = offered(arguments)
    flags = []
    for name, every in options_by_name(kinds).items():
        having = [(kind, option) for kind, option in every if name in searchable(kind)]
        tried = [
            f"{kind.name} {','.join(f'{value:g}' for value in default_grid(kind)[name])}"
            for kind, _ in having
            if name in default_grid(kind)
        ]
        if having:
            said = f"; searched by default: {'; '.join(tried)}" if tried else ""
            about = arg(
                metavar="LIST", help=help_of(having, len(kinds)) + said, help_behavior_hint=""
            )
            flags.append((name, Annotated[str | None, about], None))
    more = {SettingsOptions: flags}
    return command_line.parse(Options, arguments, usual="python -m decode.tune", more=more)


# The settings.


@dataclass(kw_only=True)
class Tuning(SearchOptions):
    """Say what is tuned, and how. Raises InputError for a value that is out of range.

    Args:
        tasks: tasks, or names or files of some, each tuned on its own.
        decoder: its name.
        lists: values to search by option, over the decoder's default grid.
    """

    tasks: Sequence[Task | str] = DEFAULT_TASKS
    decoder: str = "d2f"
    lists: Mapping[str, Sequence[int | float]] = field(default_factory=dict)
    chosen: tuple[Task, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.chosen = find_tasks(self.tasks)
        self.check()
        self.grid()  # a bad value of an option is found here

    def grid(self, contract: Contract | None = None) -> dict[str, tuple[int | float, ...]]:
        """Return the values to search of each option: those given, else the decoder's default ones,
        and of a model's contract what it was trained with, such as its block size.

        Raises InputError for an option that the decoder does not have, a value that it refuses for
        a task, and a model that it cannot decode.
        """
        kind = find_decoder(self.decoder)
        known = searchable(kind)
        unknown = [name for name in self.lists if name not in known]
        if not known or unknown:
            raise InputError(
                f"the decoder {self.decoder} has no option "
                f"{', '.join(unknown) or 'that can be searched'}; "
                f"of those that can be searched it has {', '.join(known) or 'none'}"
            )
        values = {**default_grid(kind), **self.lists}
        if not values:
            raise InputError(
                f"the decoder {self.decoder} has no default grid: give {', '.join(known)}"
            )
        for name, choices in values.items():
            if not choices or len(set(choices)) < len(choices):
                said = "at least one value, got none" if not choices else "each value once, got "
                raise InputError(f"{name} must have {said}{list(choices) or ''}")
        grid = {name: tuple(values[name]) for name in known if name in values}
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

    def defaults(self, grid: Mapping[str, object], contract: Contract) -> Setting:
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


def settings_of(grid: Mapping[str, Sequence[int | float]]) -> list[dict[str, int | float]]:
    """List every combination of the values."""
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


# Measuring: problems decoded and judged with a setting.

Job = tuple[Task, Decoder, Sequence[Problem], int]
"""Problems to decode with a decoder, so many together."""

_WARM: WeakKeyDictionary[DiffusionModel, set[Decoder]] = WeakKeyDictionary()


def measure_jobs(
    model: DiffusionModel, jobs: Iterable[tuple[str, Job]]
) -> Iterator[tuple[str, Measurements]]:
    """Measure each job. A setting decodes one problem untimed before its first job on this model in
    this process."""
    from decode.evaluate import decode_and_judge

    warm = _WARM.setdefault(model, set())
    for name, (task, decoder, problems, batch_size) in jobs:
        decode = partial(decode_and_judge, model, decoder, task, batch_size=batch_size)
        if decoder not in warm:
            decode(problems[:1])
            warm.add(decoder)
        yield name, decode(problems).measurements()


# The search, the choice, and the check on problems that no decision has used.


def choose(goal: SearchOptions, measured: Sequence[Measurements]) -> tuple[int, int, float]:
    """Choose among settings measured on the same problems; return the places of the chosen and of
    the most accurate one, and the bound. If none reaches it, the most accurate one is chosen."""
    best = max(one.accuracy for one in measured)
    bound = goal.bound(best)

    def fastest(least: float, sign: int = 1) -> int:
        enough = [i for i, one in enumerate(measured) if one.accuracy >= least - TOUCH]
        return max(
            enough, key=lambda i: (sign * measured[i].tokens_per_second, measured[i].accuracy)
        )

    # Of equally accurate ones the slowest is the better reference where problems are few.
    return fastest(min(bound, best)), fastest(best, -1), bound


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


class Search:
    """The search of one task, as a study of Optuna, and its check on held-out problems. What the
    ledger has is not measured again; with the same answers the search comes out the same."""

    def __init__(
        self,
        task: Task,
        tuning: Tuning,
        grid: Mapping[str, Sequence[int | float]],
        crew: Crew,
        ledger: Ledger,
        display: ShownProgress,
    ):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.task, self.tuning, self.grid = task, tuning, grid
        self.crew, self.ledger, self.display = crew, ledger, display
        # Of accuracy and tokens a second.
        sampler = optuna.samplers.TPESampler(seed=tuning.seed)
        self.study = optuna.create_study(directions=["maximize", "maximize"], sampler=sampler)
        settings = settings_of(grid)
        self.left = len(settings)
        if tuning.search == "tpe":  # which finds settings by itself
            self.left = min(self.left, tuning.trials)
        else:
            for setting in settings:
                self.study.enqueue_trial(setting)
        self.budget = (tuning.budget or math.inf) / len(tuning.chosen)
        self.searched: list[tuple[Setting, Measurements]] = []
        self.best: dict[int, float] = {}  # accuracy that any setting has shown on so many problems

    def run(self, problems: Sequence[Problem]) -> None:
        """Try settings until all, or the budget, are done: all of a grid in turn, rung by rung, so
        that a machine that gets slower does so for all; tpe as many at a time as there are
        workers."""
        what = f"{self.task.name}, {self.left} settings on tuning problems"
        self.display.begin(self.left * len(problems), what)
        while self.left and self.budget > 0:
            tpe = self.tuning.search == "tpe"
            count = min(self.left, self.crew.count) if tpe else self.left
            self._try([self.study.ask() for _ in range(count)], problems)
            self.left -= count

    def _try(self, trials: list[optuna.Trial], problems: Sequence[Problem]) -> None:
        """Measure these settings, rung by rung."""
        from optuna.trial import TrialState

        for trial in trials:
            for name, values in self.grid.items():
                trial.suggest_categorical(name, list(values))
        parts: dict[int, list[Measurements]] = {trial.number: [] for trial in trials}
        for first, stop in self.tuning.rungs:
            measured = self._measure(
                f"tuning {first}", [t.params for t in trials], problems[first:stop]
            )
            for trial, part in zip(trials, measured, strict=True):
                parts[trial.number].append(part)
                self.budget -= float(part.seconds.sum())
                accuracy = joined(parts[trial.number]).accuracy
                self.best[stop] = max(self.best.get(stop, 0.0), accuracy)
            for trial in list(trials):
                so_far = joined(parts[trial.number])
                # By Wilson's interval less accurate than the goal asks for.
                lost = so_far.interval[1] < self.tuning.bound(self.best[stop])
                dropped = lost and self.tuning.search != "grid"
                if stop < len(problems) and not dropped and self.budget > 0:
                    continue
                if stop < len(problems):
                    self.study.tell(trial, state=TrialState.PRUNED)
                    self.display.advance(len(problems) - stop)
                else:
                    self.study.tell(trial, [so_far.accuracy, so_far.tokens_per_second])
                trials.remove(trial)
                if trial.params not in [setting for setting, _ in self.searched]:
                    self.searched.append((trial.params, so_far))
                self.display.say(
                    f"{self.task.name}, {described(trial.params)}: {so_far.count_right} of {stop} "
                    f"right, {so_far.tokens_per_second:.1f} tokens/s"
                )

    def _measure(
        self, what: str, settings: Sequence[Setting], problems: Sequence[Problem]
    ) -> list[Measurements]:
        """Decode problems with each setting that the ledger does not have. what: names them."""
        names, jobs = [], {}
        for setting in settings:
            name = f"{self.task.name} {what} {len(problems)} {json.dumps(setting, sort_keys=True)}"
            names.append(name)
            if name not in self.ledger.rows:
                decoder = self.tuning.build(setting, self.task)
                jobs[name] = self.task, decoder, problems, self.tuning.batch_size
        self.display.advance((len(names) - len(jobs)) * len(problems))
        for name, measured in self.crew.map(measure_jobs, jobs.items(), 1):
            values = {key: array.tolist() for key, array in vars(measured).items()}
            self.ledger.add({"id": name, **values})
            self.display.advance(len(problems))
        rows = [dict(self.ledger.rows[name]) for name in names]
        return [Measurements(**{k: np.array(v) for k, v in r.items() if k != "id"}) for r in rows]

    def outcome(self, heldout: Sequence[Problem], contract: Contract) -> dict[str, Any]:
        """Choose among what was searched, measure the choice on held-out problems, beside the most
        accurate setting and the decoder's defaults, and return the task's part of the report."""
        most = max(measured.problems for _, measured in self.searched)
        compared = [(s, measured) for s, measured in self.searched if measured.problems == most]
        common = [measured for _, measured in compared]
        chosen, reference, bound = choose(self.tuning, common)
        front = [compared[place][0] for place in frontier(common)]
        defaults = self.tuning.defaults(self.grid, contract)
        wanted = (compared[chosen][0], compared[reference][0], defaults)
        settings = [s for place, s in enumerate(wanted) if s not in wanted[:place]]
        runs: list[list[Measurements]] = []
        total = len(settings) * self.tuning.repetitions * len(heldout)
        self.display.begin(
            total, f"{self.task.name}, {len(settings)} settings on held-out problems"
        )
        # In turn in each repetition: a machine that gets slower does so for all of them.
        for repetition in range(self.tuning.repetitions):
            runs.append(self._measure(f"heldout {repetition}", settings, heldout))
        finals = [[run[place] for run in runs] for place in range(len(settings))]
        roles = [finals[settings.index(setting)] for setting in wanted]
        margin = margin_of(self.tuning, roles[0][0], roles[1][0])
        lines = [
            f"{len(self.searched)} settings were measured, {len(compared)} of them on {most} "
            "tuning problems."
        ]
        if self.budget <= 0:
            lines.append("The budget ended the search there.")
        if common[chosen].accuracy < bound - TOUCH:
            lines.append(
                f"No setting reached the bound of {bound:.1%}: the most accurate one was chosen."
            )
        return {
            "task": self.task.name,
            "flags": list(self.task.words),
            "goal": self.tuning.goal,
            "bound": bound,
            "chosen": dict(wanted[0]),
            "settings": [
                {
                    "setting": dict(setting),
                    "compared": measured.problems == most,
                    "frontier": setting in front,
                    **numbers(measured),
                }
                for setting, measured in self.searched
            ],
            "budget_spent": self.budget <= 0,
            "heldout": [
                {
                    "roles": [
                        r for r, other in zip(ROLES, wanted, strict=True) if other == setting
                    ],
                    "setting": dict(setting),
                    **numbers(own[0]),
                    "tokens_per_second": median(speeds := [one.tokens_per_second for one in own]),
                    "tokens_per_second_of_repetitions": speeds,
                }
                for setting, own in zip(settings, finals, strict=True)
            ],
            "margin": dict(zip(("share", "low", "high"), margin, strict=True)),
            "text": [*lines, say_margin(margin), say_gain(roles[0], roles[2])],
        }


def numbers(measured: Measurements) -> dict[str, Any]:
    """Return sums and rates."""
    return measured.numbers() | {
        "tokens_per_second": measured.tokens_per_second,
        "seconds_per_problem": measured.seconds_per_problem,
    }


def margin_of(
    goal: SearchOptions, chosen: Measurements, reference: Measurements
) -> tuple[float, float, float]:
    """Compute how far the chosen setting's accuracy is above the bound (negative: below), a share,
    and its 95 % interval. With a bound below the reference that is of the paired difference."""
    if goal.min_accuracy is not None:
        low, high = (end - goal.min_accuracy for end in chosen.interval)
        return chosen.accuracy - goal.min_accuracy, low, high
    low, high = (end + goal.points / 100 for end in paired_interval(chosen, reference))
    return chosen.accuracy - reference.accuracy + goal.points / 100, low, high


def paired_interval(a: Measurements, b: Measurements) -> tuple[float, float]:
    """Compute the 95 % interval of the accuracy of a minus that of b, on the same problems."""
    return paired(int((a.right & ~b.right).sum()), int((~a.right & b.right).sum()), a.problems)


def say_margin(margin: tuple[float, float, float]) -> str:
    """Say whether the choice holds up, also where it does not."""
    share, low, high = margin
    held = "holds up" if share >= -TOUCH else "does not hold up"
    sure = "" if low >= 0 or high < 0 else "; these problems do not settle it at 95 %"
    return (
        f"On held-out problems the choice {held}: its accuracy is {100 * abs(share):.1f} points "
        f"{'above' if share >= 0 else 'below'} the bound (95 % {100 * low:+.1f} to "
        f"{100 * high:+.1f}){sure}."
    )


def say_gain(chosen: Sequence[Measurements], defaults: Sequence[Measurements]) -> str:
    """Say what the choice gains over the defaults; both as their repetitions."""
    if chosen is defaults:
        return "These are the decoder's defaults."
    low, high = paired_interval(chosen[0], defaults[0])
    times = median(o.tokens_per_second for o in chosen) / median(
        o.tokens_per_second for o in defaults
    )
    more = 100 * (chosen[0].accuracy - defaults[0].accuracy)
    return (
        f"Against the decoder's defaults it is {times:.2f} times as fast, its accuracy differs by "
        f"{more:+.1f} points (95 % {100 * low:+.1f} to {100 * high:+.1f})."
    )


# The report: what was measured as JSON, which the other files show.


def counted(report: Mapping[str, Any]) -> str:
    """Say what was counted, and on what."""
    e = report["environment"]
    return (
        "Tokens are visible ones, before the first end token. Seconds are wall time of decoding in "
        f"batches of {report['run']['batch_size']}, prompts included, after one untimed problem of "
        "the setting. A forward is a call of the model that a request was in. Intervals are "
        "Wilson's, those of differences are paired (Tango). "
        f"{report['model']}, {e['dtype']}{', compiled' if e['compiled'] else ''}, {e['device']}, "
        f"{e['threads']} threads, torch {e['torch']}, transformers {e['transformers']}, Python "
        f"{e['python']}, {e['date']}."
    )


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
        # The compared settings, fastest first, then the dropped.
        searched = sorted(task["settings"], key=lambda r: (-r["problems"], -r["tokens_per_second"]))
        rows = [("held-out: " + ", ".join(r["roles"]), *cells(r)) for r in task["heldout"]]
        for row in searched:
            marks = ["chosen"] * (row["setting"] == task["chosen"])
            marks += ["frontier"] * row["frontier"] + ["dropped"] * (not row["compared"])
            rows.append((f"search{': ' * bool(marks)}{', '.join(marks)}", *cells(row)))
        use = [*command, "--config", str(folder / task["config"]), *task["flags"]]
        lines += [
            f"## {task['task']}",
            "",
            f"Chosen: {described(task['chosen'])}: {task['goal']}, which was a bound of "
            f"{task['bound']:.1%}.",
            *task["text"],
            "",
            "```",
            shlex.join(use),
            "```",
            "",
            *markdown_table(("measured", *COLUMNS), rows),
            "",
        ]
    return "\n".join([*lines, "## What was counted", "", report["counted"], ""])


COLUMNS = (
    "setting", "right", "accuracy (95 %)", "tokens/s (repetitions)", "tokens a forward",
    "forwards a problem",
)  # fmt: skip


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Format a measurement for `COLUMNS`."""
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
    """Return decoder options for `decode.pipeline --config` below comments that say where they
    come from."""
    run, around, adapter = report["run"], report["environment"], report["adapter"]
    tuned = next(row for row in task["settings"] if row["setting"] == task["chosen"])
    measured = []
    for row in (tuned, task["heldout"][0]):
        _, right, accuracy, speed, forward, _ = cells(row)
        measured.append(f"{right} right, {accuracy}, {speed} tokens/s, {forward} tokens a forward")
    lines = [
        "Written by python -m decode.tune.",
        f"model {report['model']}" + (f", adapter {adapter}" if adapter else ""),
        f"weights {run['weights'][:16]}, task {task['task']}, seed {run['seed']}, batch "
        f"{run['batch_size']}",
        f"chosen: {task['goal']}",
        f"tuning: {measured[0]}",
        f"held-out: {measured[1]}",
        *task["text"],
        f"{around['device']}, {around['threads']} threads, {around['dtype']}"
        f"{', compiled' if around['compiled'] else ''}, {around['date']}",
    ]
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + dump({"decoder": run["decoder"], **task["chosen"]})


def described(setting: Setting) -> str:
    """Format a setting: ``tau_conf 0.9, tau_add 0.1``."""
    return ", ".join(f"{name} {value:g}" for name, value in setting.items())


def draw(report: Mapping[str, Any], folder: Path) -> None:
    """Write frontier.png and frontier.svg: a panel a task, with the search and the held-out
    measurement, whose speeds are of another time."""
    from decode.plots import Panel, Point, Series, save
    from decode.plots import frontier as figure_of

    run, e = report["run"], report["environment"]
    told = [name for name, values in run["grid"].items() if len(values) > 1]

    def points(rows: Iterable[Mapping[str, Any]], task: Mapping[str, Any]) -> list[Point]:
        found = []
        for row in rows:
            speeds = row.get("tokens_per_second_of_repetitions", [row["tokens_per_second"]])
            short = {n.removeprefix("tau_"): v for n, v in row["setting"].items() if n in told}
            label = ", ".join(row["roles"]) if "roles" in row else described(short)
            chosen = (
                ROLES[0] in row["roles"] if "roles" in row else row["setting"] == task["chosen"]
            )
            values = (row["tokens_per_second"], row["accuracy"], row["accuracy_low"])
            label = label if row.get("frontier", True) else ""
            ends = min(speeds), max(speeds)
            found.append(Point(*values, row["accuracy_high"], label, *ends, chosen=chosen))
        return found

    panels = []
    for task in report["tasks"]:
        rows = task["settings"]
        most = max(row["problems"] for row in rows)
        below = [row for row in rows if row["compared"] and not row["frontier"]]
        dropped = points((row for row in rows if not row["compared"]), task)
        held = f"{task['heldout'][0]['problems']} held-out problems, range of repetitions"
        front = points((row for row in rows if row["frontier"]), task)
        series = [
            Series("frontier", front, line=True),
            Series("other settings, the same problems", points(below, task), light=True),
            Series("dropped on fewer problems (no bars)", dropped, faint=True),
            Series(held, points(task["heldout"], task)),
        ]
        title = f"{task['task']}: the search, {most} tuning problems"
        panels.append(Panel(title, series, bound=(task["bound"], "accuracy to reach")))
    caption = (
        f"{report['model']}, decoder {run['decoder']}, batch {run['batch_size']}, {e['dtype']}, "
        f"{e['device']}, {e['threads']} threads, {e['date']}. Bars: 95 % Wilson intervals."
    )
    save(figure_of(panels, caption, columns=1), folder / "frontier")


# The command.


def tune(
    model: DiffusionModel, tuning: Tuning, output: str | Path, *, figures: bool = True
) -> dict[str, Any]:
    """Search, choose, measure on held-out problems and write the folder `output`; return what its
    report.json has. What is in its ledger is not measured again. figures: draw the frontier, which
    needs matplotlib. Raises InputError before any decoding, NonFiniteLogitsError."""
    from decode.cli import weights_hash

    require_extra("tune", "tuning", "optuna")
    if figures:
        require_matplotlib("--no-figures")
    with locked(check_folder(output)) as folder:
        crew = OneWorker(model, weights_hash(model))
        named, display = (model.path or model.family, None), ShownProgress(None, "problems")
        return _tune(crew, model, tuning, folder, named, display, figures=figures)


def _tune(
    crew: Crew,
    shape: DiffusionModel,
    tuning: Tuning,
    folder: Path,
    named: tuple[str, str | None],
    display: ShownProgress,
    *,
    figures: bool,
) -> dict[str, Any]:
    """shape: the model, or its outline. named: the model and its adapter."""
    grid = tuning.grid(shape.contract)
    problems = draw_problems_of(tuning, shape, grid)
    run, around = crew.ask(describe, tuning, grid, crew.count)
    tasks = []
    with display, Ledger(folder / LEDGER, run, sync=True) as ledger:
        if ledger.rows:
            display.say(f"notice: {len(ledger.rows)} measurements are already in {ledger.path}")
        for task in tuning.chosen:
            search = Search(task, tuning, grid, crew, ledger, display)
            search.run(problems[task.name, "tuning"])
            found = search.outcome(problems[task.name, "heldout"], shape.contract)
            tasks.append(found | {"config": f"{Path(named[0]).resolve().name}-{task.name}.yaml"})
    report: dict[str, Any] = {"model": named[0], "adapter": named[1], "run": run}
    report |= {"environment": around, "tasks": tasks}
    report["counted"] = counted(report)
    write(report, folder, figures=figures)
    return report


def describe(
    options: object,
    model: DiffusionModel,
    weights: str,
    tuning: Tuning,
    grid: Mapping[str, Any],
    count: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what decides a run's measurements, and the machine, where the model is loaded. The
    goal, the budget and the final measurement's size may change over one output."""
    around = environment(model)
    run = {
        "version": __version__,
        "weights": weights,
        "family": model.family,
        # What changes speeds: measurements of two machines are not to be mixed.
        **{key: around[key] for key in ("device", "threads", "dtype", "compiled", "torch")},
        "decoder": tuning.decoder,
        "grid": {name: list(values) for name, values in grid.items()},
        "tasks": [task.identity for task in tuning.chosen],
        **{
            key: getattr(tuning, key) for key in ("search", "problems", "eta", "batch_size", "seed")
        },
        **({"workers": count} if count > 1 else {}),  # those beside it take memory bandwidth
    }
    return run, around


def draw_problems_of(
    tuning: Tuning, model: DiffusionModel, grid: Mapping[str, Sequence[int | float]]
) -> dict[tuple[str, str], list[Problem]]:
    """Draw the problems by task and split. Raises InputError unless the model can take every one
    with the task's response length."""
    found = {}
    setting = {name: values[0] for name, values in grid.items()}
    for task in tuning.chosen:
        decoder = tuning.build(setting, task)
        for split, count, option in (
            ("tuning", tuning.problems, "--problems"),
            ("heldout", tuning.heldout, "--heldout"),
        ):
            problems = draw_problems(task, split, count, tuning.seed, option)
            encode_problems(model, problems, decoder, f" of the {split} split")
            found[task.name, split] = problems
    return found


def run(options: Options, console: Console | None = None) -> None:
    """Tune as the options say, and show the result. Raises InputError before any work."""
    from decode.cli import check_options, outline

    console = console or standard_output(PLAIN_WIDTH)
    require_extra("tune", "tuning", "optuna")
    values = {one.name: getattr(options, one.name) for one in fields(SearchOptions)}
    tuning = Tuning(tasks=options.chosen, decoder=options.decoder, lists=options.lists, **values)
    check_options(options)
    shape = outline(options.model, options.adapter, options.family)
    grid = tuning.grid(shape.contract)
    draw_problems_of(tuning, shape, grid)  # before the weights are read
    give_notices(tuning.chosen)
    with locked(check_folder(options.output)) as folder:
        described_run, _ = describe(options, shape, "", tuning, grid, options.workers)
        refuse_early(folder / LEDGER, described_run)
        display = ShownProgress(console, "problems")
        with workers(options) as crew:
            named = options.model, crew.ask(_adapter)
            report = _tune(crew, shape, tuning, folder, named, display, figures=options.figures)
    # Not wrapped: a command must stay in one line.
    print(markdown(report, folder), f"written: {folder}", sep="\n", file=console.file)


def _adapter(options: Options, model: DiffusionModel, weights: str) -> str | None:
    """Return the adapter that was named beside a model, not one named in its place."""
    adapter: str | None = options.adapter
    return None if adapter == options.model else adapter


@command(interrupted="interrupted; the same command goes on where it stopped")
def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> None:
    """Run the command; its exit status. console: where to show it, by default standard output."""
    options = parse(arguments)
    with quiet(options.verbose):
        run(options, console)


if __name__ == "__main__":
    sys.exit(main())
