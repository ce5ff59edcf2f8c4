"""python -m decode.tune --tasks story --output runs/tune

Searches a decoder's settings for a model on the tuning split of a task, chooses the fastest one
that is accurate enough, measures it on held-out problems, and writes it as YAML for
`python -m decode.pipeline --config`. docs/tuning.md says how; the parts are in decode/tuning.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from tyro.conf import Suppress, arg

from d2f import __version__
from d2f import command as command_line
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
    command,
    help_of,
    offered,
    options_by_name,
    require_matplotlib,
)
from decode.decoders import Decoder, find_decoder
from decode.decoders.base import default_grid, options_of, searchable, whole_number
from decode.display import ShownProgress, standard_output
from decode.evaluate import decode_and_judge
from decode.jobs import encode_problems
from decode.ledger import Ledger, check_folder, refuse_early
from decode.plots import Panel, Point, Series, save
from decode.plots import frontier as frontier_tuning_figure
from decode.report import Measurements, environment, joined, markdown_table, paired
from decode.workers import Crew

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

LEDGER = "measurements.jsonl"  # of the folder of --output


@dataclass(kw_only=True)
class SettingsOptions:
    """Settings to search: lists, with commas; every combination is a setting. An option that the
    decoder does not have is an error."""

    decoder: Annotated[str, arg(metavar="NAME", help=cli.SUMMARIES)] = "d2f"
    given: Suppress[dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def lists(self) -> dict[str, list[int | float]]:
        """The values of each option that was given. Raises InputError."""
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
    """How settings are searched, and which one is chosen."""

    search: Literal["halving", "grid"] = "halving"
    """halving: all settings on few problems, the best on more; grid: all on all"""
    problems: Annotated[int, arg(metavar="N")] = 200
    """tuning problems at the last rung"""
    eta: Annotated[int, arg(metavar="N")] = 3
    """halving: 1/N go on"""
    budget: Annotated[float | None, arg(metavar="SECONDS")] = None
    """of measuring in the search, over all runs into this output, shared equally by the tasks:
    after a first look at every setting, which it always takes, those that promise most go on, as
    many as there are seconds for (default: no limit)"""
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
    from decode.workers import OneWorker

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
    with display, ledger:
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
        draw(report)
    return report


def _about(
    options: object, model: DiffusionModel, weights: str, tuning: Tuning, space: Space, workers: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a loaded model: what decides the run, and what it is measured on."""
    from decode.report import environment

    return describe(model, tuning, space, weights, workers), environment(model)


def run(options: Options, console: Console | None = None) -> None:
    """Tune as the options say, and show the result. Raises InputError before any work."""
    from decode.cli import check_options, outline
    from decode.jobs import give_notices
    from decode.workers import workers

    console = console or standard_output(PLAIN_WIDTH)
    names = ("decoder", "lists", "search", "problems", "eta", "budget", "batch_size")
    tuning = Tuning(
        **{name: getattr(options, name) for name in (*names, "heldout", "repetitions", "seed")},
        tasks=options.chosen,
        goal=Goal(1.0 if options.within is None else options.within, options.min_accuracy),
    )
    check_options(options)
    shape = outline(options.model, options.adapter, options.family)
    # Against the shapes, before the weights are read; `_tune` does so again for who calls `tune`.
    space = tuning.space().fitted(shape.contract)
    check_prompts(shape, tuning, space, make_all_problems(tuning))
    give_notices(tuning.chosen)
    with locked(check_folder(options.output)) as folder:
        known = describe(shape, tuning, space, "", options.workers)
        refuse_early(folder / LEDGER, known, key="task")
        display = ShownProgress(console, "problems")
        with workers(options) as crew:
            names_of_model = options.model, crew.ask(_adapter)
            report = _tune(crew, shape, tuning, folder, *names_of_model, options.figures, display)
    show(report, console)


def _adapter(options: Options, model: DiffusionModel, weights: str) -> str | None:
    """That beside a loaded model: one that was named alone, in its place, finds its base."""
    adapter: str | None = options.adapter
    return None if adapter == options.model else adapter


@command(interrupted="interrupted; the same command goes on where it stopped")
def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> None:
    """Run the command; its exit status. console: where to show it, by default standard output."""
    options = parse(arguments)
    with quiet(options.verbose):
        run(options, console)


# The settings that are searched: a grid over a decoder's options.

Setting = Mapping[str, int | float]
"""Values of some of a decoder's options that are numbers."""


@dataclass(frozen=True)
class Space:
    """A decoder's name and the values of each option that is searched."""

    decoder: str
    grid: Mapping[str, tuple[int | float, ...]]

    @property
    def settings(self) -> list[Setting]:
        """Every combination, the last option changing fastest."""
        return [
            dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())
        ]

    @property
    def varying(self) -> list[str]:
        """The options with more than one value, the ones by which settings are told apart."""
        return [name for name, values in self.grid.items() if len(values) > 1]

    def build(self, setting: Setting, task: Task) -> Decoder:
        """The decoder with this setting, for responses of the task."""
        of_task = {"max_new_tokens": task.response_length, "stop": task.stop}
        values: dict[str, Any] = {**of_task, **setting}
        return find_decoder(self.decoder)(**values)

    def defaults(self, contract: Contract) -> Setting:
        """What the decoder takes for these options where nothing is given; an option whose default
        is None is not in it."""
        kind = find_decoder(self.decoder)
        decoder = kind(**kind.with_model_defaults({}, contract))
        values = {name: getattr(decoder, name) for name in searchable(kind) if name in self.grid}
        return {name: value for name, value in values.items() if value is not None}

    def fitted(self, contract: Contract) -> Space:
        """The same with what follows from how the model was trained (its block size) where that
        is not searched. Raises InputError for a model that the decoder cannot decode."""
        kind = find_decoder(self.decoder)
        kind().check(contract)
        own = {name: (value,) for name, value in kind.with_model_defaults({}, contract).items()}
        return Space(self.decoder, {**own, **self.grid})


def make_space(
    decoder: str, lists: Mapping[str, Sequence[int | float]], tasks: Iterable[Task]
) -> Space:
    """The settings that are asked for. lists: values by option; an option that is missing has its
    values of its decoder's `default_grid`.

    Raises InputError for an unknown decoder, an option that it does not have, an empty list, a
    value that comes twice, and a setting that the decoder refuses for a task.
    """
    kind = find_decoder(decoder)
    known = searchable(kind)
    unknown = [name for name in lists if name not in known]
    if not known or unknown:
        raise InputError(
            f"the decoder {decoder} has no option {', '.join(unknown) or 'that can be searched'}; "
            f"of those that can be searched it has {', '.join(known) or 'none'}"
        )
    values = {**default_grid(kind), **lists}
    if not values:
        raise InputError(f"the decoder {decoder} has no default grid: give {', '.join(known)}")
    for name, choices in values.items():
        if not choices:
            raise InputError(f"{name} must have at least one value, got none")
        if len(set(choices)) < len(choices):
            raise InputError(f"{name} must have each value once, got {list(choices)}")
    space = Space(decoder, {name: tuple(values[name]) for name in known if name in values})
    for task in tasks:
        # Built once here, so that a refusal comes before the search and not in its middle.
        for setting in space.settings:
            space.build(setting, task)
    return space


def described(setting: Setting, options: Iterable[str] | None = None) -> str:
    """A setting for reading: ``tau_conf 0.9, tau_add 0.1``. options: which of its values."""
    chosen = [name for name in (setting if options is None else options) if name in setting]
    return ", ".join(f"{name} {setting[name]:g}" for name in chosen)


# The jobs of a tuning run, and their ledger: a line for every one that is done.


@dataclass(frozen=True)
class TuningJob:
    """Problems ``[first, stop)`` of a split to decode with a setting, as (option, value) pairs.
    repetition: the same again, for its timing."""

    task: str
    split: Literal["tuning", "heldout"]
    setting: tuple[tuple[str, int | float], ...]
    first: int
    stop: int
    repetition: int = 0


def job(task: str, split: Literal["tuning", "heldout"], setting: Setting, *place: int) -> TuningJob:
    """The job of a setting. place: first, stop and, if not 0, the repetition."""
    # Sorted: the same setting is the same job, whatever order its options were given in.
    return TuningJob(task, split, tuple(sorted(setting.items())), *place)


@dataclass(frozen=True)
class JobDone:
    """A job done. wall: seconds that it took with everything around the decoding."""

    job: TuningJob
    measured: Measurements
    wall: float

    @property
    def text(self) -> str:
        """For the progress bar."""
        setting = described(dict(self.job.setting))
        return f"{self.job.task}, {setting}: {self.measured.accuracy:.0%} right"

    def to_json(self) -> dict[str, Any]:
        """A line of the ledger; lists have a value a problem."""
        return {
            **asdict(self.job),
            "setting": dict(self.job.setting),
            "wall": self.wall,
            "right": self.measured.right.astype(int).tolist(),
            "tokens": self.measured.tokens.tolist(),
            "forwards": self.measured.forwards.tolist(),
            "seconds": self.measured.seconds.tolist(),
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> JobDone:
        """The measurement of a line. Raises ValueError."""
        line = _Line.model_validate(values)
        done = job(line.task, line.split, line.setting, line.first, line.stop, line.repetition)
        lists = line.right, line.tokens, line.forwards, line.seconds
        if {len(values) for values in lists} != {done.stop - done.first}:
            raise ValueError("not a value a problem")
        measured = Measurements(
            np.array(line.right, dtype=bool),
            np.array(line.tokens, dtype=np.int64),
            np.array(line.forwards, dtype=np.int64),
            np.array(line.seconds, dtype=np.float64),
        )
        return JobDone(done, measured, line.wall)


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Line(BaseModel):
    """A measurement as `JobDone.to_json` writes it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    task: str
    split: Literal["tuning", "heldout"]
    setting: dict[str, int | float]
    first: _Count
    stop: _Count
    repetition: _Count
    wall: _Seconds
    right: list[Literal[0, 1]]
    tokens: list[_Count]
    forwards: list[_Count]
    seconds: list[_Seconds]


class TuningLedger(Ledger):
    """The jobs done of a tuning run."""

    def __init__(self, path: Path, run: dict[str, Any]):
        super().__init__(path, run, key=lambda row: JobDone.from_json(row).job, sync=True)
        self.done = {key: JobDone.from_json(row) for key, row in self.rows.items()}

    def add_done(self, done: JobDone) -> None:
        """Append a job's measurement. Raises OutputError."""
        self.add(done.to_json())
        self.done[done.job] = done

    def spent(self, task: str) -> float:
        """Seconds that the search of a task has measured, over all runs."""
        return sum(m.wall for j, m in self.done.items() if (j.task, j.split) == (task, "tuning"))


# The frontier of accuracy against speed, and the choice on it.
#
# A goal is a bound on the accuracy; the choice is the fastest setting that reaches it.

TOUCH = 1e-9  # accuracies are shares of small counts: what is closer than this is equal


@dataclass(frozen=True)
class Goal:
    """How accurate a setting must be: at least min_accuracy (a share), or where that is None at
    most `within` percentage points below the best of the settings. Raises InputError."""

    within: float = 1.0
    min_accuracy: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.within) and 0 <= self.within <= 100):
            raise InputError(f"within must lie in [0, 100] percentage points, got {self.within}")
        if self.min_accuracy is not None and not 0 <= self.min_accuracy <= 1:
            raise InputError(f"min_accuracy must lie in [0, 1], got {self.min_accuracy}")

    def bound(self, best: float) -> float:
        """The accuracy to reach where the best has `best`."""
        return best - self.within / 100 if self.min_accuracy is None else self.min_accuracy

    @property
    def text(self) -> str:
        if self.min_accuracy is not None:
            return f"the fastest setting with an accuracy of at least {self.min_accuracy:.1%}"
        points = f"{self.within:g} percentage point{'' if self.within == 1 else 's'}"
        return f"the fastest setting within {points} of the most accurate one"


@dataclass(frozen=True)
class Choice:
    """What was chosen from a list of settings.

    chosen, reference: places in that list; the reference is the most accurate setting. bound: the
    accuracy that had to be reached. reached: whether any setting does; where none does, the chosen
    one is the most accurate.
    """

    chosen: int
    reference: int
    bound: float
    reached: bool


def most_accurate(measured: Sequence[Measurements]) -> int:
    """The place of the most accurate setting, of equally accurate ones the slowest: the careful
    one, and so the better reference where problems are few."""
    return max(
        range(len(measured)), key=lambda i: (measured[i].accuracy, -measured[i].tokens_per_second)
    )


def choose(goal: Goal, measured: Sequence[Measurements]) -> Choice:
    """The choice among settings measured on the same problems. measured: at least one."""
    reference = most_accurate(measured)
    bound = goal.bound(measured[reference].accuracy)
    allowed = [i for i, e in enumerate(measured) if e.accuracy >= bound - TOUCH]
    if not allowed:
        # Only a fixed bound can be out of reach; then accuracy decides.
        best = measured[reference].accuracy
        allowed = [i for i, e in enumerate(measured) if e.accuracy >= best - TOUCH]
    chosen = max(allowed, key=lambda i: (measured[i].tokens_per_second, measured[i].accuracy))
    reached = measured[chosen].accuracy >= bound - TOUCH
    return Choice(chosen, reference, bound, reached)


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """The places of the (speed, accuracy) points that no other one dominates, fastest first: none
    is at least as fast and as accurate and better in one of the two. Of equal points the first."""
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1], i))
    front: list[int] = []
    for i in order:
        # In order of speed a slower point must be more accurate than all before it, of which the
        # last on the front is the most accurate.
        if not front or points[i][1] > points[front[-1]][1]:
            front.append(i)
    return front


@dataclass(frozen=True)
class Verdict:
    """Whether a choice holds up on other problems.

    margin: accuracy above the bound, a share (negative: below). low, high: its 95 % interval.
    """

    margin: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.margin >= -TOUCH

    @property
    def certain(self) -> bool:
        """Whether the interval lies on one side of the bound."""
        return self.low >= 0 or self.high < 0


def verdict(goal: Goal, chosen: Measurements, reference: Measurements) -> Verdict:
    """The chosen setting against the goal, both measured on the same problems. With a bound below
    the reference the interval is that of the paired difference."""
    if goal.min_accuracy is not None:
        low, high = chosen.interval
        least = goal.min_accuracy
        return Verdict(chosen.accuracy - least, low - least, high - least)
    points = goal.within / 100
    low, high = paired_interval(chosen, reference)
    return Verdict(chosen.accuracy - reference.accuracy + points, low + points, high + points)


def paired_interval(a: Measurements, b: Measurements) -> tuple[float, float]:
    """95 % interval of the accuracy of a minus that of b, on the same problems."""
    return paired(int((a.right & ~b.right).sum()), int((~a.right & b.right).sum()), a.problems)


# Who goes on to the next rung of successive halving.
#
# On a small rung accuracies are noise for the most part, so a setting is not judged by its measured
# accuracy but by how probably it still matters. What was measured is drawn again `DRAWS` times
# (Bayesian bootstrap, Rubin 1981: each problem gets a random weight, the same for all settings,
# since
# they decoded the same problems). To each setting half a right and half a wrong problem are added
# with weights of their own, which makes the spread of its accuracy that of Jeffreys' interval, also
# where all or none were right. In each draw the choice is made as at the end. A setting matters if
# it
# is the choice, or the most accurate one, which the bound depends on: without it a later rung would
# take too low a bound for reached.

DRAWS = 2000
LEAST_CHANCE = 0.02  # a setting with this chance goes on whatever its rank

Chances = npt.NDArray[np.float64]


def chances(goal: Goal, measured: Sequence[Measurements], seed: int) -> tuple[Chances, Chances]:
    """Of each setting, the share of draws in which it is the choice, and in which it is the most
    accurate, [settings] each. measured: of the same problems."""
    rng = np.random.default_rng(seed)
    settings, problems = len(measured), measured[0].problems
    # Gamma(1) weights, divided by their sum, are uniform over all ways to weigh the problems.
    weights = rng.standard_gamma(1.0, (DRAWS, problems))
    # Gamma(1/2) twice is Jeffreys' prior, Beta(1/2, 1/2), on the same scale.
    also_right, also_wrong = rng.standard_gamma(0.5, (2, DRAWS, settings))
    right = weights @ np.stack([e.right for e in measured], 1) + also_right  # [draws, settings]
    accuracy = right / (weights.sum(1, keepdims=True) + also_right + also_wrong)
    tokens = weights @ np.stack([e.tokens for e in measured], 1)
    speed = tokens / (weights @ np.stack([e.seconds for e in measured], 1))
    best = accuracy.max(1, keepdims=True)
    bound = best - goal.within / 100 if goal.min_accuracy is None else goal.min_accuracy
    # As in `choose`: where nothing reaches a fixed bound, the most accurate is taken.
    allowed = (accuracy >= bound) | (accuracy == best)
    chosen = np.where(allowed, speed, -1.0).argmax(1)
    return (
        np.bincount(chosen, minlength=settings) / DRAWS,
        np.bincount(accuracy.argmax(1), minlength=settings) / DRAWS,
    )


def who_goes_on(goal: Goal, measured: Sequence[Measurements], *, eta: int, seed: int) -> list[int]:
    """The places of the settings that go on, the most promising first.

    Those are what would be chosen now, the most accurate now, each that is the choice or, where
    the bound depends on it, the most accurate in at least `LEAST_CHANCE` of the draws, and the top
    1/eta; eta 1 is all. The order: what would be chosen and the most accurate, then by the sum of
    the two chances; of equal chance first what reaches the bound, then by speed.
    """
    now = choose(goal, measured)
    sure = list(dict.fromkeys((now.chosen, now.reference)))
    is_choice, is_best = chances(goal, measured, seed)
    if goal.min_accuracy is not None:
        # A fixed bound does not depend on the most accurate setting.
        is_best = np.zeros_like(is_best)

    def rank(i: int) -> tuple[float, ...]:
        return (
            -is_choice[i] - is_best[i],
            measured[i].accuracy < now.bound,
            -measured[i].tokens_per_second,
        )

    # The two sure ones go first below, so a cut by seconds never drops them.
    order = sorted(range(len(measured)), key=rank)
    quota = -(-len(measured) // eta)
    matters = np.maximum(is_choice, is_best) >= LEAST_CHANCE
    kept = {*order[:quota], *np.flatnonzero(matters).tolist()}
    return [*sure, *(i for i in order if i in kept and i not in sure)]


def affordable(costs: Sequence[float], seconds: float) -> int:
    """How many settings, from the first on, so many seconds have room for together. costs: the
    seconds of each. It is at least two, where there are two, so that something is left to
    compare."""
    fits = int(np.searchsorted(np.cumsum(costs), seconds, side="right"))
    return min(len(costs), max(2, fits))


# Grid search and successive halving, over any function that measures.
#
# A rung is a number of problems; rungs are nested, so what a setting has done on a small one counts
# on the next. Within a rung all settings decode a few problems in turn, then the next few: a
# machine
# that gets slower meanwhile does so for all of them, and where the budget ends the search, all have
# done the same problems. The first few are a look at every setting. Where the seconds are bounded,
# halving lets no more settings go on from there, and from each rung, than they have room for.

LOOK = 4  # problems that every setting decodes first
SMALLEST_PASS = 20  # problems
SEARCHES = ("halving", "grid")

Measure = Callable[[Setting, int, int], Measurements | None]
"""(setting, first, stop): problems ``[first, stop)``, or None once the budget is spent."""


@dataclass(frozen=True)
class Plan:
    """How a search goes about it.

    rungs: numbers of problems, rising. eta: after each rung but the last, 1/eta of the settings go
    on. smallest: the fewest problems that a setting decodes at a time after the first ones, where a
    rung has as many. look: how many problems the first pass has, 0 where it is like the others.
    halving: whether settings may be dropped; a grid drops none.
    """

    rungs: tuple[int, ...]
    eta: int
    smallest: int = SMALLEST_PASS
    look: int = 0
    halving: bool = True


@dataclass(frozen=True)
class Cut:
    """What happened at the end of a look or a rung, after `problems` problems: of `settings`
    settings `kept` went on. fitted: whether more would have, had there been seconds for them."""

    problems: int
    settings: int
    kept: int
    fitted: bool = False


@dataclass(frozen=True)
class Found:
    """What a search measured.

    measured: of each setting, None where the budget ended before its first problem. compared: the
    places of the settings that the choice is among, `problems`: on how many problems, the first
    ones, which all of them decoded. spent: whether the budget ended the search.
    """

    measured: list[Measurements | None]
    compared: list[int]
    problems: int
    cuts: list[Cut]
    spent: bool

    def comparable(self) -> list[Measurements]:
        """The measured of the compared settings on the common problems."""
        found = [self.measured[i] for i in self.compared]
        return [e.first(self.problems) for e in found if e is not None]


def make_plan(search: str, settings: int, problems: int, *, eta: int, batch_size: int) -> Plan:
    """The rungs of a search over so many settings whose last rung has `problems`.

    Halving has as many rungs as it takes to come from all settings to one, but none below
    `Plan.smallest` problems. A grid has one. The look is `LOOK` problems, a batch where that is
    more, or all there are.
    """
    smallest = smallest_pass(batch_size)
    rungs = [problems]
    if search == "halving":
        # From the last rung backwards: each one before has 1/eta of its problems, rounded up.
        while settings > 1 and -(-rungs[0] // eta) >= smallest:
            rungs.insert(0, -(-rungs[0] // eta))
            settings = -(-settings // eta)
    look = min(max(LOOK, batch_size), rungs[0])
    return Plan(tuple(rungs), eta, smallest, look, search == "halving")


def smallest_pass(batch_size: int) -> int:
    """Fewest problems to decode at a time: enough for the batch to be full most of the time."""
    return max(SMALLEST_PASS, 4 * batch_size)


def passes(low: int, high: int, smallest: int, look: int = 0) -> list[tuple[int, int]]:
    """``[low, high)`` in parts as even as can be, none below `smallest` where it has as many. look:
    the first problems of all in a part of so many, then up to the double of it and so on."""
    stops, stop = [low], look
    while 0 < stop < min(smallest, high):
        # Doubling: look, 2 look, 4 look and so on, until a part would be as large as the others.
        stops += [stop] * (stop > low)
        stop *= 2
    begin = stops[-1]
    parts = max(1, (high - begin) // smallest)
    stops += [begin + (high - begin) * i // parts for i in range(1, parts + 1)]
    return list(pairwise(stops))


def run_search(
    settings: Sequence[Setting],
    measure: Measure,
    plan: Plan,
    goal: Goal,
    *,
    seed: int = 0,
    seconds_left: Callable[[], float] = lambda: math.inf,
    on_rung: Callable[[int, int, int], None] = lambda settings, first, stop: None,
    on_pass: Callable[[Sequence[Setting], int, int], None] = lambda alive, first, stop: None,
) -> Found:
    """Measure settings rung by rung. Every decision follows from what `measure` and `seconds_left`
    give: with the same answers it comes out the same. seed: of the draws that decide who goes on.
    seconds_left: for measuring; what is left is shared evenly by the rungs to come. on_rung: told
    before each rung how many settings decode problems ``[first, stop)``. on_pass: told before each
    pass which settings will be asked for next, with which problems."""
    parts: list[list[Measurements]] = [[] for _ in settings]
    alive, reached = list(range(len(settings))), 0
    cuts: list[Cut] = []

    def found(compared: list[int], problems: int, spent: bool) -> Found:
        return Found([joined(p) if p else None for p in parts], compared, problems, cuts, spent)

    def cut(eta: int, rungs: Sequence[int]) -> list[int]:
        """Who goes on to the first of the rungs to come."""
        measured = [joined(parts[i]) for i in alive]
        order = who_goes_on(goal, measured, eta=eta, seed=seed)
        # What each would take on the next rung, at the speed that it has had so far.
        costs = [measured[i].seconds_per_problem * (rungs[0] - reached) for i in order]
        kept = order[: affordable(costs, seconds_left() / len(rungs))]
        if eta > 1 or len(kept) < len(alive):
            cuts.append(Cut(reached, len(alive), len(kept), len(kept) < len(order)))
        return [alive[i] for i in sorted(kept)]

    stops = [*plan.rungs]
    # Without a bound on the seconds a look decides nothing.
    looks = plan.halving and 0 < plan.look < stops[0] and seconds_left() < math.inf
    if looks:
        stops.insert(0, plan.look)
    for place, rung in enumerate(stops):
        on_rung(len(alive), reached, rung)
        for first, stop in passes(reached, rung, plan.smallest, plan.look):
            on_pass([settings[i] for i in alive], first, stop)
            for i in alive:
                measured = measure(settings[i], first, stop)
                if measured is None:
                    # Stopped within a pass: settings are compared on what all have done before it,
                    # or in the very first pass, on it, among those that it reached.
                    return found([j for j in alive if parts[j]], reached or stop, True)
                # Passes of earlier rungs stay in it: a later rung measures only the problems beyond
                # them.
                parts[i].append(measured)
            reached = stop
        if rung != stops[-1]:
            if seconds_left() <= 0:
                return found(alive, reached, True)
            # After a look only the seconds drop anybody: four problems are mostly noise.
            alive = cut(1 if looks and not place else plan.eta, stops[place + 1 :])
    return found(alive, reached, False)


# What a tuning run does, checked before any work.


@dataclass(frozen=True)
class Tuning:
    """One run of tuning. Raises InputError for a value that is out of range.

    tasks: tasks, or names or files of some, each tuned on its own. decoder: its name. lists: values
    to search by option, over the decoder's default grid. search: ``halving`` or ``grid``. problems:
    of the tuning split, at the last rung. eta: halving keeps 1/eta. budget: seconds of measuring in
    the search, None without limit, shared equally by the tasks; every setting has a first look all
    the same. goal: what is chosen. batch_size: problems decoded together. heldout: problems of the
    final measurement, repetitions of it. seed: of the problems and of halving's draws.
    """

    tasks: Sequence[Task | str] = DEFAULT_TASKS
    decoder: str = "d2f"
    lists: Mapping[str, Sequence[int | float]] = field(default_factory=dict)
    search: str = "halving"
    problems: int = 200
    eta: int = 3
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
        for name in ("problems", "batch_size", "heldout", "repetitions"):
            whole_number(name, getattr(self, name))
        if self.eta < 2:
            raise InputError(f"eta must be at least 2, got {self.eta}")
        if self.seed < 0:
            raise InputError(f"seed must be 0 or more, got {self.seed}")
        if self.budget is not None and not (math.isfinite(self.budget) and self.budget > 0):
            raise InputError(f"budget must be more than 0 seconds, got {self.budget}")
        # Built to be checked: a bad value of an option is found here.
        self.space()

    def space(self) -> Space:
        """The settings to search, for any model."""
        return make_space(self.decoder, self.lists, self.chosen)

    @property
    def budget_per_task(self) -> float:
        """Seconds of measuring that the search of each task has."""
        return math.inf if self.budget is None else self.budget / len(self.chosen)


def describe(
    model: DiffusionModel, tuning: Tuning, space: Space, weights: str, workers: int = 1
) -> dict[str, Any]:
    """What decides a run's measurements. The goal, the budget and the final measurement's size
    are not in it: they may change over one ledger."""

    # What changes speeds is in it: measurements of two machines are not to be mixed.
    around = environment(model)
    return {
        "version": __version__,
        "weights": weights,
        "family": model.family,
        **{key: around[key] for key in ("device", "threads", "dtype", "compiled", "torch")},
        "decoder": space.decoder,
        "grid": {name: list(values) for name, values in space.grid.items()},
        "tasks": [task.identity for task in tuning.chosen],
        "search": tuning.search,
        "problems": tuning.problems,
        "eta": tuning.eta,
        "batch_size": tuning.batch_size,
        "seed": tuning.seed,
        # Those beside it take memory bandwidth: each number has speeds of its own.
        **({"workers": workers} if workers > 1 else {}),
    }


# Measuring: one job's problems decoded and judged, unless the ledger has it already.

Problems = dict[tuple[str, str], list[Problem]]
"""By task and split."""
Asked = tuple[Task, Decoder, list[Problem]]
"""What a job decodes, and how."""
_WARM: WeakKeyDictionary[DiffusionModel, set[tuple[object, ...]]] = WeakKeyDictionary()


class Bench:
    """Does jobs with a crew, each once: what is in the ledger is not measured again.

    on_done: told of each job done, measured or found.
    """

    def __init__(
        self,
        crew: Crew,
        space: Space,
        problems: Problems,
        ledger: TuningLedger,
        *,
        tasks: Sequence[Task],
        batch_size: int,
        on_done: Callable[[JobDone], None],
    ):
        self.crew, self.space, self.problems, self.ledger = crew, space, problems, ledger
        self.tasks = {task.name: task for task in tasks}
        self.batch_size = batch_size
        self.on_done = on_done

    def measure(self, job: TuningJob) -> Measurements:
        """What the job gives. Raises NonFiniteLogitsError."""
        self._add([job])
        self.on_done(self.ledger.done[job])
        return self.ledger.done[job].measured

    def measure_ahead(self, jobs: Iterable[TuningJob]) -> None:
        """Let several workers do jobs at a time that `measure` will ask for; one does each when it
        is asked for."""
        if self.crew.count > 1:
            self._add(jobs)

    def _add(self, jobs: Iterable[TuningJob]) -> None:
        new = [(job, self._asked(job)) for job in jobs if job not in self.ledger.done]
        work = partial(measure_jobs, batch_size=self.batch_size)
        for _, done in self.crew.spread(work, new, 1):
            self.ledger.add_done(done)

    def _asked(self, job: TuningJob) -> Asked:
        task = self.tasks[job.task]
        problems = self.problems[job.task, job.split][job.first : job.stop]
        return task, self.space.build(dict(job.setting), task), problems


def measure_jobs(
    model: DiffusionModel, jobs: Iterable[tuple[TuningJob, Asked]], *, batch_size: int
) -> Iterator[tuple[TuningJob, JobDone]]:
    """Each job, measured. A setting decodes one problem of a task untimed before its first job on
    this model in this process."""
    warm = _WARM.setdefault(model, set())
    for job, (task, decoder, problems) in jobs:
        began = time.perf_counter()
        # The warm-up counts in `wall`, by which the budget is spent, and in no measured second.
        if (job.task, job.setting) not in warm:
            decode_and_judge(model, decoder, task, problems[:1], batch_size=batch_size)
            warm.add((job.task, job.setting))
        judged = decode_and_judge(model, decoder, task, problems, batch_size=batch_size)
        yield job, JobDone(job, judged.measurements(), time.perf_counter() - began)


def make_all_problems(tuning: Tuning) -> Problems:
    """The first problems of each task, so many of each split. Raises InputError for more than a
    split has."""
    problems: Problems = {}
    for task in tuning.chosen:
        for split, count in (("tuning", tuning.problems), ("heldout", tuning.heldout)):
            try:
                problems[task.name, split] = task.problems(split, count, tuning.seed)
            except InputError:
                raise  # of the data, or of the split
            except ValueError as error:
                raise InputError(f"{task.name}, split {split}: {error}") from error
    return problems


def check_prompts(model: DiffusionModel, tuning: Tuning, space: Space, problems: Problems) -> None:
    """Raise InputError unless the model can take every problem with the task's response length."""
    for task in tuning.chosen:
        decoder = space.build(space.settings[0], task)
        for split in ("tuning", "heldout"):
            some = problems[task.name, split]
            encode_problems(model, some, decoder, f" of the {split} split")


# What came out for a task: the search, the choice, and the final measurement.

ROLES = ("chosen", "most accurate in the search", "defaults")


@dataclass(frozen=True)
class Final:
    """One setting on the held-out problems. roles: some of `ROLES`. repetitions: the same problems
    again; accuracy is that of the first, speed is over all."""

    roles: list[str]
    setting: Setting
    repetitions: list[Measurements]

    @property
    def measured(self) -> Measurements:
        return self.repetitions[0]

    @property
    def speeds(self) -> list[float]:
        """Visible tokens per second of each repetition."""
        return [e.tokens_per_second for e in self.repetitions]


@dataclass(frozen=True)
class Outcome:
    """A task's result. settings: all that were searched. finals: chosen, most accurate, defaults,
    each once."""

    task: str
    goal: Goal
    settings: Sequence[Setting]
    found: Found
    choice: Choice
    finals: list[Final]

    @property
    def chosen(self) -> Setting:
        return self.settings[self.found.compared[self.choice.chosen]]

    @property
    def front(self) -> list[int]:
        """The places in `settings` of those that no other compared one dominates."""
        # All on the same problems: of settings that were dropped earlier there are too few.
        points = [(e.tokens_per_second, e.accuracy) for e in self.found.comparable()]
        return [self.found.compared[i] for i in frontier(points)]

    def final(self, role: str) -> Final:
        """The final measurement of the setting with that role."""
        return next(final for final in self.finals if role in final.roles)

    @property
    def verdict(self) -> Verdict:
        """Whether the chosen setting reaches the goal on the held-out problems."""
        chosen, reference = self.final(ROLES[0]).measured, self.final(ROLES[1]).measured
        return verdict(self.goal, chosen, reference)

    @property
    def verdict_text(self) -> str:
        """The same as a sentence."""
        v = self.verdict
        held = "holds up" if v.holds else "does not hold up"
        sure = "" if v.certain else "; these problems do not settle it at 95 %"
        return (
            f"On held-out problems the choice {held}: its accuracy is {100 * abs(v.margin):.1f} "
            f"points {'above' if v.margin >= 0 else 'below'} the bound (95 % "
            f"{100 * v.low:+.1f} to {100 * v.high:+.1f}){sure}."
        )

    @property
    def against_defaults(self) -> str:
        """The chosen setting against the decoder's defaults, on the held-out problems."""
        chosen, defaults = self.final(ROLES[0]), self.final(ROLES[2])
        if chosen is defaults:
            return "These are the decoder's defaults."
        low, high = paired_interval(chosen.measured, defaults.measured)
        more = chosen.measured.accuracy - defaults.measured.accuracy
        # Accuracy is of the first repetition alone: the others decode the same tokens again.
        speed = median(chosen.speeds) / median(defaults.speeds)
        return (
            f"Against the decoder's defaults it is {speed:.2f} times as fast, its accuracy "
            f"differs by {100 * more:+.1f} points (95 % "
            f"{100 * low:+.1f} to {100 * high:+.1f})."
        )

    @property
    def search_text(self) -> list[str]:
        """How the search went, as sentences."""
        found = self.found
        lines = [
            f"{cut.settings} settings decoded {cut.problems} problems, {cut.kept} went on"
            + (", as many as the budget had room for." if cut.fitted else ".")
            for cut in found.cuts
        ]
        lines.append(
            f"The choice is among {len(found.compared)} settings on the first {found.problems} "
            "tuning problems."
        )
        if found.spent:
            # A budget may end before a setting's first problem; that is told, not hidden.
            missing = sum(measured is None for measured in found.measured)
            more = f"; {missing} settings were not measured at all" if missing else ""
            lines.append(f"The budget ended the search before its last rung was done{more}.")
        if found.problems < SMALLEST_PASS:
            lines.append(
                "So few problems tell settings apart only roughly: go by the held-out measurement."
            )
        if not self.choice.reached:
            lines.append(
                f"No setting reached the bound of {self.choice.bound:.1%}: the most accurate one "
                "was chosen."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Everything that was measured, in sums, and what was made of it."""
        common = dict(zip(self.found.compared, self.found.comparable(), strict=True))
        front = set(self.front)
        candidates = [
            {
                "setting": dict(setting),
                "compared": i in common,
                "frontier": i in front,
                # Compared settings with their common problems, dropped ones with what they have.
                **(numbers(common.get(i, measured)) if measured is not None else {}),
            }
            for i, (setting, measured) in enumerate(
                zip(self.settings, self.found.measured, strict=True)
            )
        ]
        v = self.verdict
        return {
            "task": self.task,
            "goal": self.goal.text,
            "bound": self.choice.bound,
            "bound_reached": self.choice.reached,
            "chosen": dict(self.chosen),
            "search": {
                "cuts": [vars(cut) for cut in self.found.cuts],
                "compared_problems": self.found.problems,
                "budget_spent": self.found.spent,
                "text": self.search_text,
            },
            "settings": candidates,
            "heldout": [
                {
                    "roles": final.roles,
                    "setting": dict(final.setting),
                    **numbers(final.measured),
                    "tokens_per_second": median(final.speeds),
                    "tokens_per_second_of_repetitions": final.speeds,
                }
                for final in self.finals
            ],
            "verdict": {
                "holds": v.holds,
                "certain": v.certain,
                "margin": v.margin,
                "margin_low": v.low,
                "margin_high": v.high,
                "text": self.verdict_text,
            },
            "against_defaults": self.against_defaults,
        }


def numbers(measured: Measurements) -> dict[str, Any]:
    """Sums and rates of what was measured."""
    return measured.numbers() | {
        "tokens_per_second": measured.tokens_per_second,
        "seconds_per_problem": measured.seconds_per_problem,
    }


def final_cells(final: Final) -> list[str]:
    """A held-out measurement for a table with `FINAL_COLUMNS`."""
    measured, speeds = final.measured, final.speeds
    low, high = measured.interval
    return [
        ", ".join(final.roles),
        described(final.setting) or "defaults",
        f"{measured.count_right} of {measured.problems}",
        f"{measured.accuracy:.1%} ({low:.1%} to {high:.1%})",
        f"{median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})",
        f"{measured.tokens_per_forward:.2f}",
        f"{measured.forwards_per_problem:.1f}",
    ]


FINAL_COLUMNS = (
    "held-out",
    "setting",
    "right",
    "accuracy (95 %)",
    "tokens/s, median (range)",
    "tokens a forward",
    "forwards a problem",
)


# The files of a tuning run beside its ledger: a YAML a task, report.json, report.md, figures.


@dataclass(frozen=True)
class TuningReport:
    """What came out of a run. model, adapter: as they were named. run: what the ledger's header
    says. environment: what it was measured on. tasks: those that were tuned."""

    model: str
    adapter: str | None
    space: Space
    run: dict[str, Any]
    environment: dict[str, Any]
    outcomes: Sequence[Outcome]
    folder: Path
    repetitions: int
    tasks: Sequence[Task]

    def config(self, task: str) -> Path:
        """The YAML of a task's choice."""
        return self.folder / f"{Path(self.model).resolve().name}-{task}.yaml"

    def use(self, task: str) -> str:
        """The command that decodes with a task's choice."""
        words = ["python", "-m", "decode.pipeline"]
        if self.model != DEFAULT_MODEL:
            words += ["--model", self.model]
        if self.adapter is not None:
            words += ["--adapter", self.adapter]
        named = next(one.words for one in self.tasks if one.name == task)
        return shlex.join([*words, "--config", str(self.config(task)), *named])

    @property
    def counted(self) -> str:
        """What the numbers are."""
        e = self.environment
        compiled = ", compiled" if e["compiled"] else ""
        return (
            "Tokens are visible ones, before the first end token. Seconds are wall time of "
            f"decoding in batches of {self.run['batch_size']}, prompts included, after one untimed "
            "problem of the setting. A forward is a call of the model that a request was in. "
            "Intervals are Wilson's, those of differences are paired (Tango). "
            f"{self.model}, {e['dtype']}{compiled}, {e['device']}, {e['threads']} threads, torch "
            f"{e['torch']}, transformers {e['transformers']}, Python {e['python']}, {e['date']}."
        )

    def write(self, *, figures: bool) -> None:
        """Write all files but the figures, each whole or not at all. figures: there will be."""
        for outcome in self.outcomes:
            write_beside(self.config(outcome.task), self.yaml(outcome))
        content = {
            "model": self.model,
            "adapter": self.adapter,
            "run": self.run,
            "environment": self.environment,
            "counted": self.counted,
            "tasks": [
                outcome.to_json() | {"config": self.config(outcome.task).name}
                for outcome in self.outcomes
            ],
        }
        write_beside(self.folder / "report.json", json.dumps(content, indent=2) + "\n")
        write_beside(self.folder / "report.md", self.markdown(figures=figures))

    def yaml(self, outcome: Outcome) -> str:
        """Decoder options for `decode.pipeline --config`, with their provenance above them."""
        run, final = self.run, outcome.final("chosen")
        found = dict(zip(outcome.found.compared, outcome.found.comparable(), strict=True))
        # `choice.chosen` counts the compared settings; `compared` has their places among all.
        tuned = found[outcome.found.compared[outcome.choice.chosen]]
        compiled = ", compiled" if self.environment["compiled"] else ""
        lines = [
            "Written by python -m decode.tune.",
            f"model {self.model}" + (f", adapter {self.adapter}" if self.adapter else ""),
            f"weights {run['weights'][:16]}, task {outcome.task}, seed {run['seed']}, batch "
            f"{run['batch_size']}",
            f"chosen: {outcome.goal.text}",
            _measured("tuning", tuned.tokens_per_second, tuned),
            _measured("held-out", median(final.speeds), final.measured),
            outcome.verdict_text,
            outcome.against_defaults,
            f"{self.environment['device']}, {self.environment['threads']} threads, "
            f"{self.environment['dtype']}{compiled}, {self.environment['date']}",
        ]
        options = {"decoder": self.space.decoder, **outcome.chosen}
        # In the file itself, so that settings that are passed on say where they come from.
        comments = "".join(f"# {line}\n" for line in lines)
        return comments + dump(options)

    def markdown(self, *, figures: bool) -> str:
        """The report for reading."""
        lines = [f"# Settings of {self.space.decoder} for {self.model}", ""]
        if figures:
            lines += ["![accuracy against speed](frontier.png)", ""]
        for outcome in self.outcomes:
            lines += self._section(outcome)
        return "\n".join([*lines, "## What was counted", "", self.counted, ""])

    def _section(self, outcome: Outcome) -> list[str]:
        return [
            f"## {outcome.task}",
            "",
            f"Chosen: {described(outcome.chosen)}: {outcome.goal.text}, which was a bound of "
            f"{outcome.choice.bound:.1%}.",
            outcome.verdict_text,
            outcome.against_defaults,
            "",
            "```",
            self.use(outcome.task),
            "```",
            "",
            *markdown_table(FINAL_COLUMNS, map(final_cells, outcome.finals)),
            "",
            f"Speed is over {self.repetitions} repetitions of the same problems, the settings in "
            "turn.",
            "",
            "### The search, on the tuning split",
            "",
            *outcome.search_text,
            "",
            *markdown_table(SEARCH_COLUMNS, search_entries(outcome)),
            "",
        ]


SEARCH_COLUMNS = ("setting", "", "right", "accuracy (95 %)", "tokens/s", "tokens a forward")


def search_entries(outcome: Outcome) -> list[list[str]]:
    """The measured settings for a table: the compared ones, fastest first, then the others."""
    front, common = set(outcome.front), outcome.found.comparable()
    entries: list[tuple[tuple[float, ...], list[str]]] = []
    for i, whole in enumerate(outcome.found.measured):
        if whole is None:
            continue
        compared = i in outcome.found.compared
        # A compared setting by the problems that all of these decoded, a dropped one by its own.
        measured = common[outcome.found.compared.index(i)] if compared else whole
        marks = ["chosen"] * (outcome.settings[i] == outcome.chosen)
        marks += ["frontier"] * (i in front) + ["dropped"] * (not compared)
        low, high = measured.interval
        entry = [
            described(outcome.settings[i]),
            ", ".join(marks),
            f"{measured.count_right} of {measured.problems}",
            f"{measured.accuracy:.1%} ({low:.1%} to {high:.1%})",
            f"{measured.tokens_per_second:.1f}",
            f"{measured.tokens_per_forward:.2f}",
        ]
        # Sorted by this: compared ones first, then by problems, then by speed.
        entries.append(((not compared, -measured.problems, -measured.tokens_per_second), entry))
    return [entry for _, entry in sorted(entries)]


def _measured(split: str, speed: float, measured: Any) -> str:
    low, high = measured.interval
    return (
        f"{split}: {measured.count_right} of {measured.problems} right ({measured.accuracy:.1%}, "
        f"95 % {low:.1%} to {high:.1%}), {speed:.1f} tokens/s, "
        f"{measured.tokens_per_forward:.2f} tokens a forward"
    )


# The end of the command: a table a task, and how to use what was chosen.

PLAIN_WIDTH = 160  # columns, where the output is not a terminal


def show(report: TuningReport, console: Console) -> None:
    """Print what was chosen, whether it holds up, and the command that uses it."""
    for outcome in report.outcomes:
        _print(
            console,
            [
                f"{outcome.task}: {outcome.goal.text}",
                *outcome.search_text,
                outcome.verdict_text,
                outcome.against_defaults,
                *(
                    f"{', '.join(f.roles)}: {described(f.setting) or 'as it is'}"
                    for f in outcome.finals
                ),
            ],
        )
        table = Table(box=SIMPLE, pad_edge=False)
        columns = [(i, name) for i, name in enumerate(FINAL_COLUMNS) if name != "setting"]
        for i, name in columns:
            table.add_column(name, justify="right" if i else "left")
        for final in outcome.finals:
            cells = final_cells(final)
            table.add_row(*(cells[i] for i, _ in columns))
        console.print(table)
    _print(console, [report.counted, "", f"written: {report.folder}"])
    _print(console, ["use it:", *(f"  {report.use(o.task)}" for o in report.outcomes)])


def _print(console: Console, lines: list[str]) -> None:
    """Lines as they are, not wrapped: a command must stay in one."""
    for line in lines:
        print(line, file=console.file)


# One task: the search on its tuning problems, the choice, the final measurement.


def tune_task(
    bench: Bench, tuning: Tuning, task: str, contract: Contract, display: ShownProgress
) -> Outcome:
    """One task: the search on its tuning problems, the choice, the final measurement. contract: of
    the model."""
    settings = bench.space.settings
    used: list[float] = []  # seconds of this search, what the ledger had of it included

    def seconds_left() -> float:
        return tuning.budget_per_task - sum(used)

    def measure(setting: Setting, first: int, stop: int) -> Measurements | None:
        wanted = job(task, "tuning", setting, first, stop)
        spent = bench.ledger.spent(task) >= tuning.budget_per_task
        # What the ledger has costs nothing, and every setting gets its look whatever the budget.
        if spent and wanted not in bench.ledger.done and stop > plan.look:
            return None
        measured = bench.measure(wanted)
        used.append(bench.ledger.done[wanted].wall)
        return measured

    def on_pass(alive: Sequence[Setting], first: int, stop: int) -> None:
        # Several workers look at the budget before a pass, one before each setting of it.
        if stop <= plan.look or bench.ledger.spent(task) < tuning.budget_per_task:
            bench.measure_ahead(job(task, "tuning", setting, first, stop) for setting in alive)

    def on_rung(alive: int, first: int, stop: int) -> None:
        what = f"{task}, {alive} settings on tuning problems {first + 1} to {stop}"
        _begin(display, what, alive * (stop - first))

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
        on_pass=on_pass,
    )
    choice = choose(goal, found.comparable())
    chosen, reference = (
        settings[found.compared[i]] for i in (choice.chosen, choice.reference)
    )  # fmt: skip
    finals = measure_heldout(bench, tuning, task, chosen, reference, contract, display)
    return Outcome(task, goal, settings, found, choice, finals)


def measure_heldout(
    bench: Bench,
    tuning: Tuning,
    task: str,
    chosen: Setting,
    reference: Setting,
    contract: Contract,
    display: ShownProgress,
) -> list[Final]:
    """The chosen, the most accurate and the default setting on the held-out problems, in turn."""
    defaults = bench.space.defaults(contract)
    wanted = finals_of(chosen, reference, defaults)
    parts = passes(0, tuning.heldout, smallest_pass(tuning.batch_size))
    total = len(wanted) * tuning.repetitions * tuning.heldout
    _begin(display, f"{task}, {len(wanted)} settings on held-out problems", total)
    parts_of: dict[tuple[int, int], list[Measurements]] = {}
    for repetition in range(tuning.repetitions):
        bench.measure_ahead(
            job(task, "heldout", setting, first, stop, repetition)
            for first, stop in parts
            for _, setting in wanted
        )
        # In turn, as in the search: a machine that gets slower does so for all of them.
        for first, stop in parts:
            for i, (_, setting) in enumerate(wanted):
                measured = bench.measure(job(task, "heldout", setting, first, stop, repetition))
                parts_of.setdefault((i, repetition), []).append(measured)
    return [
        Final(roles, setting, [joined(parts_of[i, r]) for r in range(tuning.repetitions)])
        for i, (roles, setting) in enumerate(wanted)
    ]


def _begin(display: ShownProgress, what: str, problems: int) -> None:
    display.say(f"{what}: {problems} problems to decode")
    display.begin(problems, what)


def finals_of(
    chosen: Setting, reference: Setting, defaults: Setting
) -> list[tuple[list[str], Setting]]:
    """The settings to measure on held-out problems, each once, with their roles."""
    found: list[tuple[list[str], Setting]] = []
    for role, setting in zip(ROLES, (chosen, reference, defaults), strict=True):
        same = [roles for roles, other in found if other == setting]
        if same:
            # The defaults may be the choice too: measured once, with both roles.
            same[0].append(role)
        else:
            found.append(([role], setting))
    return found


# The figure of a tuning run: a row a task, the search's frontier and the final measurement.

SHORT = {"block_size": "block", "tau_add": "add", "tau_act": "act", "tau_conf": "conf"}


def draw(report: TuningReport) -> None:
    """Write frontier.png and frontier.svg."""
    run, environment = report.run, report.environment
    names = ", ".join(f"{SHORT[n]}: {n}" for n in report.space.varying if n in SHORT)
    caption = (
        f"{report.model}, decoder {run['decoder']}, batch {run['batch_size']}, "
        f"{environment['dtype']}, {environment['device']}, {environment['threads']} threads, "
        f"{environment['date']}. Bars: 95 % Wilson intervals."
    )
    if names:
        caption += f"\nLabels: {names}."
    panels = [
        panel
        for outcome in report.outcomes
        for panel in (search_panel(outcome, report.space.varying), final_panel(outcome))
    ]
    save(frontier_tuning_figure(panels, caption, columns=2), report.folder / "frontier")


def search_panel(outcome: Outcome, varying: list[str]) -> Panel:
    """The frontier of a task on its tuning problems, and the settings below it."""
    found = outcome.found
    common = dict(zip(found.compared, found.comparable(), strict=True))
    chosen = found.compared[outcome.choice.chosen]
    front = outcome.front
    on_front = [
        point(common[i], label=short(outcome.settings[i], varying), chosen=i == chosen)
        for i in front
    ]
    below = [point(e, chosen=i == chosen) for i, e in common.items() if i not in front]
    dropped = [point(e) for i, e in enumerate(found.measured) if e is not None and i not in common]
    return Panel(
        title=f"{outcome.task}: the search, {found.problems} tuning problems",
        series=[
            Series("frontier", on_front, line=True),
            Series("other settings, the same problems", below, light=True),
            Series("dropped on fewer problems (no bars)", dropped, faint=True),
        ],
        bound=(outcome.choice.bound, "accuracy to reach"),
    )


def final_panel(outcome: Outcome) -> Panel:
    """The final measurement. It has axes of its own: its speeds were measured at another time."""
    problems = outcome.finals[0].measured.problems
    # On held-out problems the bound follows from the reference's accuracy there.
    bound = outcome.goal.bound(outcome.final(ROLES[1]).measured.accuracy)
    return Panel(
        title=f"{outcome.task}: {problems} held-out problems",
        series=[
            Series(
                f"median of {len(outcome.finals[0].repetitions)} repetitions, and their range",
                [final_point(final) for final in outcome.finals],
            )
        ],
        bound=(bound, "accuracy to reach"),
    )


def point(measured: Measurements, label: str = "", chosen: bool = False) -> Point:
    """Measured problems as a point."""
    low, high = measured.interval
    return Point(
        measured.tokens_per_second, measured.accuracy, low, high, label=label, chosen=chosen
    )


def final_point(final: Final) -> Point:
    """A final measurement, with the range of its repetitions."""
    low, high = final.measured.interval
    return Point(
        median(final.speeds),
        final.measured.accuracy,
        low,
        high,
        label=", ".join(final.roles),
        chosen=ROLES[0] in final.roles,
        slowest=min(final.speeds),
        fastest=max(final.speeds),
    )


def short(setting: Setting, varying: list[str]) -> str:
    """The values by which a setting is told apart."""
    return ", ".join(f"{SHORT.get(name, name)} {setting[name]:g}" for name in varying)


if __name__ == "__main__":
    sys.exit(main())
