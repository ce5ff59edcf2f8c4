"""Search a decoder's settings for a model and a task, and check the choice on held-out problems:
d2f tune."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
from rich.console import Console
from tyro.conf import Suppress, arg

from d2f import __version__
from d2f import flags as command_line
from d2f.command import command
from d2f.contract import Contract
from d2f.errors import InputError
from d2f.files import locked
from d2f.quiet import quiet
from d2f.tasks import DEFAULT_TASKS, Problem, Task, find_tasks
from decode import cli
from decode.cli import (
    OneProcessModel,
    TaskOptions,
    WorkerOptions,
    help_of,
    offered,
    options_by_name,
    require_matplotlib,
)
from decode.decoders import Decoder, find_decoder
from decode.decoders.base import default_grid, options_of, searchable, whole_number
from decode.display import ShownProgress, standard_output
from decode.jobs import draw_problems, encode_problems, give_notices
from decode.ledger import Ledger, check_folder, refuse_early
from decode.report import Measurements, environment, joined
from decode.tune_report import (
    ROLES,
    TOUCH,
    Final,
    Goal,
    Outcome,
    Setting,
    TuningReport,
    described,
    show,
)
from decode.workers import Crew, OneWorker, workers

if TYPE_CHECKING:
    import optuna

    from d2f.model import DiffusionModel

LEDGER = "measurements.jsonl"  # of the output folder
SEARCHES = ("halving", "grid", "tpe")
SMALLEST_RUNG = 20  # problems
PLAIN_WIDTH = 160  # columns, where the output is not a terminal


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
        return {
            name: _numbers(name, text, int if name in whole else float)
            for name, text in self.given.items()
        }

    def check(self) -> None:
        """Raise InputError for a list that is none of numbers."""
        _ = self.lists


def _numbers(name: str, text: str, kind: type[int] | type[float]) -> list[int | float]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        flag = name.replace("_", "-")
        raise InputError(f"--{flag}: expected numbers with commas, got {text!r}") from error


@dataclass(kw_only=True)
class SearchOptions:
    """Search and choice."""

    search: Literal["halving", "grid", "tpe"] = "halving"
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

    def check(self) -> None:
        """Raise InputError for flags that do not go together."""
        if self.within is not None and self.min_accuracy is not None:
            raise InputError("--within and --min-accuracy exclude each other: expected one")


@dataclass(kw_only=True)
class OutputOptions:
    """Final measurement and output."""

    heldout: Annotated[int, arg(metavar="N")] = 500
    """held-out problems of the final measurement"""
    repetitions: Annotated[int, arg(metavar="N")] = 3
    """of the final measurement, for its timing"""
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


# What is asked for.


@dataclass(frozen=True)
class Tuning:
    """One run of tuning. Raises InputError for a value that is out of range.

    tasks: tasks, or names or files of some, each tuned on its own. decoder: its name. lists: values
    to search by option, over the decoder's default grid. search: ``halving`` drops settings that
    cannot reach the goal after rungs of few problems; ``grid`` drops none; ``tpe`` is halving that
    tries only some, `trials` of them, which Optuna's estimator finds promising.
    problems: of the tuning split, at the last rung. eta: each rung has so many times the problems
    of the one before. budget: seconds of measuring in the search, None without limit, shared
    equally by the tasks; the first rung is always measured. goal: what is chosen. batch_size:
    problems decoded together. heldout: problems of the final measurement, repetitions of it. seed:
    of the problems, and of the order in which settings are tried.
    """

    tasks: Sequence[Task | str] = DEFAULT_TASKS
    decoder: str = "d2f"
    lists: Mapping[str, Sequence[int | float]] = field(default_factory=dict)
    search: str = "halving"
    problems: int = 200
    eta: int = 3
    trials: int = 30
    budget: float | None = None
    goal: Goal = field(default_factory=Goal)
    batch_size: int = 1
    heldout: int = 500
    repetitions: int = 3
    seed: int = 0
    chosen: tuple[Task, ...] = field(init=False)

    def __post_init__(self) -> None:
        # Found here, so that a task that there is not is known at once, and read but once.
        object.__setattr__(self, "chosen", find_tasks(self.tasks))
        if self.search not in SEARCHES:
            raise InputError(f"search must be one of {', '.join(SEARCHES)}, got {self.search!r}")
        for name in ("problems", "trials", "batch_size", "heldout", "repetitions"):
            whole_number(name, getattr(self, name))
        if self.eta < 2:
            raise InputError(f"eta must be at least 2, got {self.eta}")
        if self.seed < 0:
            raise InputError(f"seed must be 0 or more, got {self.seed}")
        if self.budget is not None and not (math.isfinite(self.budget) and self.budget > 0):
            raise InputError(f"budget must be more than 0 seconds, got {self.budget}")
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
        for task in self.chosen:
            for numbers in product(*grid.values()):
                self.build(dict(zip(grid, numbers, strict=True)), task)
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


def describe(
    model: DiffusionModel, tuning: Tuning, grid: Mapping[str, Any], weights: str, count: int = 1
) -> dict[str, Any]:
    """Collect what decides a run's measurements. The goal, the budget and the final measurement's
    size are not in it: they may change over one output."""
    around = environment(model)
    return {
        "version": __version__,
        "weights": weights,
        "family": model.family,
        # What changes speeds: measurements of two machines are not to be mixed.
        **{key: around[key] for key in ("device", "threads", "dtype", "compiled", "torch")},
        "decoder": tuning.decoder,
        "grid": {name: list(values) for name, values in grid.items()},
        "tasks": [task.identity for task in tuning.chosen],
        "search": tuning.search,
        "problems": tuning.problems,
        "eta": tuning.eta,
        "batch_size": tuning.batch_size,
        "seed": tuning.seed,
        **({"workers": count} if count > 1 else {}),  # those beside it take memory bandwidth
    }


# Measuring: problems decoded and judged with a setting.


@dataclass(frozen=True)
class Job:
    """Problems to decode with a decoder."""

    task: Task
    decoder: Decoder
    problems: Sequence[Problem]
    batch_size: int


_WARM: WeakKeyDictionary[DiffusionModel, set[Decoder]] = WeakKeyDictionary()


def measure_jobs(
    model: DiffusionModel, jobs: Iterable[tuple[str, Job]]
) -> Iterator[tuple[str, Measurements]]:
    """Measure each job. A setting decodes one problem untimed before its first job on this model in
    this process."""
    from decode.evaluate import decode_and_judge

    warm = _WARM.setdefault(model, set())
    for name, job in jobs:
        decode = partial(decode_and_judge, model, job.decoder, job.task, batch_size=job.batch_size)
        if job.decoder not in warm:
            decode(job.problems[:1])
            warm.add(job.decoder)
        yield name, decode(job.problems).measurements()


def to_json(measured: Measurements) -> dict[str, list[Any]]:
    """Return lists with a value for each problem, as the ledger keeps them."""
    return {name: values.tolist() for name, values in vars(measured).items()}


def from_json(values: Mapping[str, Any]) -> Measurements:
    """Read what `to_json` wrote."""
    columns = [field.name for field in fields(Measurements)]
    return Measurements(*(np.array(values[name]) for name in columns))


# The search, the choice, and the check on problems that no decision has used.


def choose(goal: Goal, measured: Sequence[Measurements]) -> tuple[int, int, float]:
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
        settings = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
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
                lost = so_far.interval[1] < self.tuning.goal.bound(self.best[stop])
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
                jobs[name] = Job(self.task, decoder, problems, self.tuning.batch_size)
        self.display.advance((len(names) - len(jobs)) * len(problems))
        for name, measured in self.crew.map(measure_jobs, jobs.items(), 1):
            self.ledger.add({"id": name, **to_json(measured)})
            self.display.advance(len(problems))
        return [from_json(self.ledger.rows[name]) for name in names]

    def outcome(self, heldout: Sequence[Problem], contract: Contract) -> Outcome:
        """Choose among what was searched, and measure the choice on held-out problems, beside the
        most accurate setting and the decoder's defaults, in turn in each repetition: a machine that
        gets slower meanwhile does so for all of them."""
        goal, searched = self.tuning.goal, self.searched
        most = max(measured.problems for _, measured in searched)
        compared = [i for i, (_, measured) in enumerate(searched) if measured.problems == most]
        common = [searched[i][1] for i in compared]
        chosen, reference, bound = choose(goal, common)
        finals: list[Final] = []
        defaults = self.tuning.defaults(self.grid, contract)
        settings = (searched[compared[chosen]][0], searched[compared[reference]][0], defaults)
        for role, setting in zip(ROLES, settings, strict=True):
            same = next((final for final in finals if final.setting == setting), None)
            if same is None:
                finals.append(same := Final([], setting, []))
            same.roles.append(role)
        total = len(finals) * self.tuning.repetitions * len(heldout)
        self.display.begin(total, f"{self.task.name}, {len(finals)} settings on held-out problems")
        for repetition in range(self.tuning.repetitions):
            what = f"heldout {repetition}"
            measured = self._measure(what, [final.setting for final in finals], heldout)
            for final, one in zip(finals, measured, strict=True):
                final.repetitions.append(one)
        return Outcome(
            self.task.name,
            goal,
            searched,
            compared,
            [compared[i] for i in frontier(common)],
            compared[chosen],
            bound,
            self.budget <= 0,
            finals,
        )


# The command.


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
    from decode.cli import weights_hash

    require_optuna()
    if figures:
        require_matplotlib("--no-figures")
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
    display = display or ShownProgress(None, "problems")
    grid = tuning.grid(shape.contract)
    problems = draw_problems_of(tuning, shape, grid)
    run, around = crew.ask(_about, tuning, grid, crew.count)
    outcomes = []
    with display, Ledger(folder / LEDGER, run, sync=True) as ledger:
        if ledger.rows:
            display.say(f"notice: {len(ledger.rows)} measurements are already in {ledger.path}")
        for task in tuning.chosen:
            search = Search(task, tuning, grid, crew, ledger, display)
            search.run(problems[task.name, "tuning"])
            outcomes.append(search.outcome(problems[task.name, "heldout"], shape.contract))
    report = TuningReport(name, adapter, run, around, outcomes, folder, tuning.chosen)
    report.write(figures=figures)
    return report


def _about(
    options: object,
    model: DiffusionModel,
    weights: str,
    tuning: Tuning,
    grid: Mapping[str, Any],
    count: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Describe the run and the machine where the model is loaded."""
    return describe(model, tuning, grid, weights, count), environment(model)


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


def require_optuna() -> None:
    """Raise InputError if Optuna, which searches, is not installed."""
    if find_spec("optuna") is None:
        raise InputError("optuna is not installed: pip install 'd2f-toolkit[tune]'")


def run(options: Options, console: Console | None = None) -> None:
    """Tune as the options say, and show the result. Raises InputError before any work."""
    from decode.cli import check_options, outline

    console = console or standard_output(PLAIN_WIDTH)
    require_optuna()
    names = ("decoder", "lists", "search", "problems", "eta", "trials", "budget", "batch_size")
    tuning = Tuning(
        **{name: getattr(options, name) for name in (*names, "heldout", "repetitions", "seed")},
        tasks=options.chosen,
        goal=Goal(1.0 if options.within is None else options.within, options.min_accuracy),
    )
    check_options(options)
    shape = outline(options.model, options.adapter, options.family)
    grid = tuning.grid(shape.contract)
    draw_problems_of(tuning, shape, grid)  # before the weights are read
    give_notices(tuning.chosen)
    with locked(check_folder(options.output)) as folder:
        refuse_early(folder / LEDGER, describe(shape, tuning, grid, "", options.workers))
        display = ShownProgress(console, "problems")
        with workers(options) as crew:
            named = options.model, crew.ask(_adapter)
            report = _tune(crew, shape, tuning, folder, *named, options.figures, display)
    show(report, console)


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
