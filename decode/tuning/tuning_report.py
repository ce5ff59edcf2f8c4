"""The files of a tuning run beside its ledger: a YAML a task, report.json, report.md, figures."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from d2f.files import write_beside
from d2f.tasks import Task
from d2f.yaml_core import dump
from decode.commands.parser import DEFAULT_MODEL
from decode.reporting.tables import markdown_table
from decode.tuning.outcome import FINAL_COLUMNS, Outcome, final_cells
from decode.tuning.space import Space, described


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
