"""What came out of a tuning run: whether the choice holds up, the report and its files."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from d2f.config import dump
from d2f.errors import InputError
from d2f.files import write_beside
from d2f.tasks import Task
from decode.cli import DEFAULT_MODEL
from decode.report import Measurements, markdown_table, paired

ROLES = ("chosen", "most accurate in the search", "defaults")
TOUCH = 1e-9  # accuracies are shares of small counts: what is closer than this is equal

Setting = Mapping[str, int | float]
"""Values of some of a decoder's options that are numbers."""


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
        """Return the accuracy to reach where the best setting has `best`."""
        return best - self.within / 100 if self.min_accuracy is None else self.min_accuracy

    @property
    def text(self) -> str:
        if self.min_accuracy is not None:
            return f"the fastest setting with an accuracy of at least {self.min_accuracy:.1%}"
        points = f"{self.within:g} percentage point{'' if self.within == 1 else 's'}"
        return f"the fastest setting within {points} of the most accurate one"


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
        """Return visible tokens per second of each repetition."""
        return [one.tokens_per_second for one in self.repetitions]


@dataclass(frozen=True)
class Outcome:
    """A task's result.

    searched: the settings that were measured, in that order, each with its measurements. compared:
    the places of those that decoded most problems, among which the choice is. front: the places of
    those that no other compared one dominates. chosen: a place. bound: the accuracy to reach.
    spent: the budget ended the search. finals: the chosen, the most accurate and
    the default setting, each once.
    """

    task: str
    goal: Goal
    searched: list[tuple[Setting, Measurements]]
    compared: list[int]
    front: list[int]
    chosen: int
    bound: float
    spent: bool
    finals: list[Final]

    def final(self, role: str) -> Final:
        """Find the final measurement of the setting with that role."""
        return next(final for final in self.finals if role in final.roles)

    @property
    def margin(self) -> tuple[float, float, float]:
        """Compute how far the chosen setting's held-out accuracy is above the bound (negative:
        below), a share, and its 95 % interval. With a bound below the reference that is of the
        paired difference."""
        chosen, reference = self.final(ROLES[0]).measured, self.final(ROLES[1]).measured
        if self.goal.min_accuracy is not None:
            values = (chosen.accuracy, *chosen.interval)
            return tuple(value - self.goal.min_accuracy for value in values)  # type: ignore
        difference = chosen.accuracy - reference.accuracy
        values = (difference, *paired_interval(chosen, reference))
        return tuple(value + self.goal.within / 100 for value in values)  # type: ignore

    @property
    def sentences(self) -> list[str]:
        """Say what was searched, whether the choice holds up, and what it gains."""
        problems = self.searched[self.chosen][1].problems
        lines = [
            f"{len(self.searched)} settings were measured, {len(self.compared)} of them on "
            f"{problems} tuning problems."
        ]
        if self.spent:
            lines.append("The budget ended the search there.")
        if self.searched[self.chosen][1].accuracy < self.bound - TOUCH:
            lines.append(
                f"No setting reached the bound of {self.bound:.1%}: the most accurate one was "
                "chosen."
            )
        margin, low, high = self.margin
        held = "holds up" if margin >= -TOUCH else "does not hold up"
        sure = "" if low >= 0 or high < 0 else "; these problems do not settle it at 95 %"
        lines.append(
            f"On held-out problems the choice {held}: its accuracy is {100 * abs(margin):.1f} "
            f"points {'above' if margin >= 0 else 'below'} the bound (95 % {100 * low:+.1f} to "
            f"{100 * high:+.1f}){sure}."
        )
        chosen, defaults = self.final(ROLES[0]), self.final(ROLES[2])
        if chosen is defaults:
            return [*lines, "These are the decoder's defaults."]
        low, high = paired_interval(chosen.measured, defaults.measured)
        more = chosen.measured.accuracy - defaults.measured.accuracy
        return [
            *lines,
            "Against the decoder's defaults it is "
            f"{median(chosen.speeds) / median(defaults.speeds):.2f} times as fast, its accuracy "
            f"differs by {100 * more:+.1f} points (95 % {100 * low:+.1f} to {100 * high:+.1f}).",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return everything that was measured, in sums, and what follows from it."""
        margin, low, high = self.margin
        return {
            "task": self.task,
            "goal": self.goal.text,
            "bound": self.bound,
            "chosen": dict(self.searched[self.chosen][0]),
            "settings": [
                {
                    "setting": dict(setting),
                    "compared": place in self.compared,
                    "frontier": place in self.front,
                    **numbers(measured),
                }
                for place, (setting, measured) in enumerate(self.searched)
            ],
            "budget_spent": self.spent,
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
            "margin": {"share": margin, "low": low, "high": high},
            "text": self.sentences,
        }


def numbers(measured: Measurements) -> dict[str, Any]:
    """Return sums and rates."""
    return measured.numbers() | {
        "tokens_per_second": measured.tokens_per_second,
        "seconds_per_problem": measured.seconds_per_problem,
    }


def paired_interval(a: Measurements, b: Measurements) -> tuple[float, float]:
    """Compute the 95 % interval of the accuracy of a minus that of b, on the same problems."""
    return paired(int((a.right & ~b.right).sum()), int((~a.right & b.right).sum()), a.problems)


# The files beside the ledger: a YAML a task, report.json, report.md, a figure.


@dataclass(frozen=True)
class TuningReport:
    """What came out of a run. model, adapter: as they were named. run: what identifies it.
    environment: what it was measured on. tasks: those that were tuned."""

    model: str
    adapter: str | None
    run: dict[str, Any]
    environment: dict[str, Any]
    outcomes: Sequence[Outcome]
    folder: Path
    tasks: Sequence[Task]

    def config(self, task: str) -> Path:
        """Return the path of a task's YAML."""
        return self.folder / f"{Path(self.model).resolve().name}-{task}.yaml"

    def use(self, task: str) -> str:
        """Return the command that decodes with a task's choice."""
        words = ["python", "-m", "decode.pipeline"]
        if self.model != DEFAULT_MODEL:
            words += ["--model", self.model]
        if self.adapter is not None:
            words += ["--adapter", self.adapter]
        named = next(one.words for one in self.tasks if one.name == task)
        return shlex.join([*words, "--config", str(self.config(task)), *named])

    @property
    def counted(self) -> str:
        """Say what was counted, and on what."""
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
        """Write all files, each whole or not at all."""
        for outcome in self.outcomes:
            write_beside(self.config(outcome.task), self.yaml(outcome))
        content = {
            "model": self.model,
            "adapter": self.adapter,
            "run": self.run,
            "environment": self.environment,
            "counted": self.counted,
            "tasks": [o.to_json() | {"config": self.config(o.task).name} for o in self.outcomes],
        }
        write_beside(self.folder / "report.json", json.dumps(content, indent=2) + "\n")
        write_beside(self.folder / "report.md", self.markdown(figures=figures))
        if figures:
            draw(self)

    def yaml(self, outcome: Outcome) -> str:
        """Return decoder options for `decode.pipeline --config` below comments that say where they
        come from."""
        run, final = self.run, outcome.final(ROLES[0])
        setting, tuned = outcome.searched[outcome.chosen]
        around = self.environment
        lines = [
            "Written by python -m decode.tune.",
            f"model {self.model}" + (f", adapter {self.adapter}" if self.adapter else ""),
            f"weights {run['weights'][:16]}, task {outcome.task}, seed {run['seed']}, batch "
            f"{run['batch_size']}",
            f"chosen: {outcome.goal.text}",
            f"tuning: {_measured(tuned, tuned.tokens_per_second)}",
            f"held-out: {_measured(final.measured, median(final.speeds))}",
            *outcome.sentences,
            f"{around['device']}, {around['threads']} threads, {around['dtype']}"
            f"{', compiled' if around['compiled'] else ''}, {around['date']}",
        ]
        comments = "".join(f"# {line}\n" for line in lines)
        return comments + dump({"decoder": run["decoder"], **setting})

    def markdown(self, *, figures: bool) -> str:
        """Write the report for reading."""
        lines = [f"# Settings of {self.run['decoder']} for {self.model}", ""]
        if figures:
            lines += ["![accuracy against speed](frontier.png)", ""]
        for outcome in self.outcomes:
            chosen = described(outcome.searched[outcome.chosen][0])
            lines += [
                f"## {outcome.task}",
                "",
                f"Chosen: {chosen}: {outcome.goal.text}, which was a bound of {outcome.bound:.1%}.",
                *outcome.sentences,
                "",
                "```",
                self.use(outcome.task),
                "```",
                "",
                *markdown_table(FINAL_COLUMNS, map(final_cells, outcome.finals)),
                "",
                f"Speed is over {len(outcome.finals[0].repetitions)} repetitions of the same "
                "problems, the settings in turn.",
                "",
                "### The search, on the tuning split",
                "",
                *markdown_table(SEARCH_COLUMNS, search_rows(outcome)),
                "",
            ]
        return "\n".join([*lines, "## What was counted", "", self.counted, ""])


SEARCH_COLUMNS = ("setting", "", "right", "accuracy (95 %)", "tokens/s", "tokens a forward")
FINAL_COLUMNS = (
    "held-out", "setting", "right", "accuracy (95 %)", "tokens/s, median (range)",
    "tokens a forward", "forwards a problem",
)  # fmt: skip


def search_rows(outcome: Outcome) -> list[list[str]]:
    """Return the rows of the settings: the compared ones, fastest first, then the dropped."""
    rows = []
    for place, (setting, measured) in enumerate(outcome.searched):
        marks = ["chosen"] * (place == outcome.chosen) + ["frontier"] * (place in outcome.front)
        marks += ["dropped"] * (place not in outcome.compared)
        speed = measured.tokens_per_second
        cells = [described(setting), ", ".join(marks), *_right(measured), f"{speed:.1f}"]
        cells.append(f"{measured.tokens_per_forward:.2f}")
        rows.append((-measured.problems, -speed, cells))
    return [cells for *_, cells in sorted(rows)]


def final_cells(final: Final) -> list[str]:
    """Return a held-out measurement as a row of `FINAL_COLUMNS`."""
    measured, speeds = final.measured, final.speeds
    return [
        ", ".join(final.roles),
        described(final.setting) or "defaults",
        *_right(measured),
        f"{median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})",
        f"{measured.tokens_per_forward:.2f}",
        f"{measured.forwards_per_problem:.1f}",
    ]


def _right(measured: Measurements) -> tuple[str, str]:
    low, high = measured.interval
    return (
        f"{measured.count_right} of {measured.problems}",
        f"{measured.accuracy:.1%} ({low:.1%} to {high:.1%})",
    )


def _measured(measured: Measurements, speed: float) -> str:
    low, high = measured.interval
    return (
        f"{measured.count_right} of {measured.problems} right ({measured.accuracy:.1%}, "
        f"95 % {low:.1%} to {high:.1%}), {speed:.1f} tokens/s, "
        f"{measured.tokens_per_forward:.2f} tokens a forward"
    )


def described(setting: Setting) -> str:
    """Format a setting: ``tau_conf 0.9, tau_add 0.1``."""
    return ", ".join(f"{name} {value:g}" for name, value in setting.items())


def draw(report: TuningReport) -> None:
    """Write frontier.png and frontier.svg: a panel a task, with the search and the held-out
    measurement, whose speeds are of another time."""
    from decode.plots import Panel, Point, Series, save
    from decode.plots import frontier as figure_of

    def point(measured: Measurements, label: str, speeds: Sequence[float], chosen: bool) -> Point:
        low, high = measured.interval
        speed, ends = median(speeds), (min(speeds), max(speeds))
        return Point(speed, measured.accuracy, low, high, label, *ends, chosen=chosen)

    panels = []
    for outcome in report.outcomes:
        kinds: dict[str, list[Point]] = {"frontier": [], "below": [], "dropped": []}
        for place, (setting, measured) in enumerate(outcome.searched):
            kind = "frontier" if place in outcome.front else "below"
            label = _short(setting, report.run["grid"]) if kind == "frontier" else ""
            kind = kind if place in outcome.compared else "dropped"
            speeds = [measured.tokens_per_second]
            kinds[kind].append(point(measured, label, speeds, place == outcome.chosen))
        finals = [
            point(f.measured, ", ".join(f.roles), f.speeds, ROLES[0] in f.roles)
            for f in outcome.finals
        ]
        problems = outcome.searched[outcome.chosen][1].problems
        held = f"{outcome.finals[0].measured.problems} held-out problems, range of repetitions"
        panels.append(
            Panel(
                f"{outcome.task}: the search, {problems} tuning problems",
                [
                    Series("frontier", kinds["frontier"], line=True),
                    Series("other settings, the same problems", kinds["below"], light=True),
                    Series("dropped on fewer problems (no bars)", kinds["dropped"], faint=True),
                    Series(held, finals),
                ],
                bound=(outcome.bound, "accuracy to reach"),
            )
        )
    e, run = report.environment, report.run
    caption = (
        f"{report.model}, decoder {run['decoder']}, batch {run['batch_size']}, {e['dtype']}, "
        f"{e['device']}, {e['threads']} threads, {e['date']}. Bars: 95 % Wilson intervals."
    )
    save(figure_of(panels, caption, columns=1), report.folder / "frontier")


def _short(setting: Setting, grid: Mapping[str, Sequence[object]]) -> str:
    """Format the values by which a setting is told apart: ``add 0.1, conf 0.9``."""
    told = [name for name in setting if len(grid[name]) > 1]
    return ", ".join(f"{name.removeprefix('tau_')} {setting[name]:g}" for name in told)


def show(report: TuningReport, console: Console) -> None:
    """Print what was chosen, whether it holds up, and the command that uses it."""
    for outcome in report.outcomes:
        lines = [f"{outcome.task}: {outcome.goal.text}", *outcome.sentences, ""]
        lines += markdown_table(FINAL_COLUMNS, map(final_cells, outcome.finals))
        print("\n".join([*lines, ""]), file=console.file)
    use = [f"  {report.use(outcome.task)}" for outcome in report.outcomes]
    lines = [report.counted, "", f"written: {report.folder}", "use it:", *use]
    print("\n".join(lines), file=console.file)  # not wrapped: a command must stay in one line
