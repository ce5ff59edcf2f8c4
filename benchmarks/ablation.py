"""python -m benchmarks.ablation --config d2f --output benchmarks/results/ablation-d2f

Train every variant of a configuration with every seed by `d2f train`, decode the same held-out
problems with each by `d2f evaluate`, and write summary.json and report.md: right answers and tokens
a forward by seed, and the difference to the variant that `against` names. Trained models and
answers are kept in --runs; both commands go on where they stopped, so this one does, too. `--only`
does a part, such as "* 300 of 8-11"; `--report-only` reports what is there.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from benchmarks import parser
from d2f.config import Section, check, override, read_mapping
from d2f.errors import InputError
from d2f.files import make_folder, write_beside
from d2f.shipped import ABLATIONS, find_config
from decode.report import markdown_table

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]*$")]


class First(Section):
    """A file or folder to make before the runs that read it."""

    makes: str
    """The file or folder, as the runs' configurations name it."""
    run: str
    """A module and its arguments, as after `python -m`."""


class Decoding(Section):
    """A way to decode."""

    name: Name
    decoder: str
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the decoder, with underscores."""
    line: Name | None = None
    """The line of the figures that it is a point of."""


class Variant(Section):
    """A training."""

    name: Name
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of the training configuration, over those of all."""
    decode: tuple[Decoding, ...] = ()
    """Ways to decode it beside those of all."""
    trained: bool = True
    """false: the model that the training starts from, measured once."""


class Setting(Section):
    """Keys that all variants are trained with once more; variants are compared within it."""

    name: Name
    set: dict[str, Any] = Field(default_factory=dict)
    decode: tuple[Decoding, ...] = ()


class Untrained(Section):
    """A model that is measured beside the variants, as it is."""

    name: Name
    model: str
    decode: Annotated[tuple[Decoding, ...], Field(min_length=1)]
    against: dict[Name, Name] = Field(default_factory=dict)


class Ablation(Section):
    """Variants of a training, each with every seed in every setting, and how they are measured."""

    train: str
    """The training configuration that they vary, by path or name."""
    first: tuple[First, ...] = ()
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of it that are set for all variants."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]
    settings: tuple[Setting, ...] = ()
    untrained: tuple[Untrained, ...] = ()
    decode: tuple[Decoding, ...] = ()
    """Ways to decode all variants."""
    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    allow_code_execution: bool = False
    problems: int = 500
    split: Literal["tuning", "heldout"] = "heldout"
    batch_size: int = 32
    against: str
    """The variant that the others are compared with."""

    @model_validator(mode="after")
    def _against_is_a_variant(self) -> Ablation:
        names = [variant.name for variant in self.variants]
        if self.against not in names:
            raise ValueError(f"against: expected one of {', '.join(names)}, got {self.against!r}")
        return self

    def plan(self, runs: Path) -> Iterator[Run]:
        """Every run: all variants with one seed before the next, so that a stop leaves what can be
        compared."""
        for entry in self.untrained:
            yield Run(runs / entry.name, entry.name, "", None, entry.decode, model=entry.model)
        for seed in self.seeds:
            for setting in self.settings or (None,):
                for variant in self.variants:
                    named = variant.name if setting is None else f"{variant.name} {setting.name}"
                    folder = runs / (f"{named}-{seed}" if variant.trained else named)
                    own, decodings = ({}, ()) if setting is None else (setting.set, setting.decode)
                    yield Run(
                        folder,
                        variant.name,
                        "" if setting is None else setting.name,
                        seed,
                        (*self.decode, *decodings, *variant.decode),
                        # No update, at a rate of 0: the start, with the contract of the result.
                        set={**self.set, **own, **variant.set}
                        | ({} if variant.trained else {"steps": 1, "optimizer.lr": 1e-12}),
                    )

    def flags(self, decoding: Decoding) -> list[str]:
        """Make the command line of `d2f evaluate`, without model and output."""
        given = ["--decoder", decoding.decoder, "--tasks", ",".join(self.tasks)]
        given += ["--problems", str(self.problems), "--split", self.split]
        given += ["--batch-size", str(self.batch_size)]
        given += ["--allow-code-execution"] * self.allow_code_execution
        for name, value in decoding.options.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                given.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                given += [f"--{flag}", str(value)]
        return given


@dataclass(frozen=True)
class Run:
    """A folder of the ablation: a training and its measurements, or a model measured as it is."""

    folder: Path
    variant: str
    setting: str
    seed: int | None
    decode: tuple[Decoding, ...]
    set: dict[str, Any] | None = None
    model: str | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield what is measured so far: a row for each way to decode and task."""
        for decoding in self.decode:
            path = self.folder / decoding.name / "report.json"
            if path.exists():
                for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
                    about = {"variant": self.variant, "setting": self.setting, "seed": self.seed}
                    kept = ("task", "problems", "right", "tokens_per_forward")
                    yield {**about, "decoding": decoding.name} | {k: row[k] for k in kept}


def carry_out(ablation: Ablation, run: Run) -> None:
    """Train and measure what is left of a run."""
    model = run.model
    if model is None:
        trained = run.folder / "model"
        if not trained.is_dir():
            flags = {**(run.set or {}), "seed": run.seed, "output": run.folder, "tracker": "none"}
            given = [part for key, value in flags.items() for part in (f"--{key}", _yaml(value))]
            call("distill.train", "--config", ablation.train, *given)
        model = str(trained)
    for decoding in run.decode:
        output = run.folder / decoding.name
        if not (output / "report.json").exists():
            flags = ablation.flags(decoding)
            call("decode.evaluate", "--model", model, *flags, "--output", str(output))


def call(*words: str) -> None:
    """Run a module of ours. Raises CalledProcessError; the module has said why."""
    print(shlex.join(words), flush=True)
    subprocess.run([sys.executable, "-m", *words], check=True)


def _yaml(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def render(ablation: Ablation, title: str, rows: Sequence[dict[str, Any]]) -> str:
    """Show right answers by seed, their mean beside `against`'s, and tokens a forward."""
    lines = [f"# {title}", "", f"Right of {ablation.problems} problems a task, by seed."]
    groups: dict[tuple[str, str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        key = (row["setting"], row["decoding"], row["task"])
        groups.setdefault(key, {}).setdefault(row["variant"], []).append(row)
    for (setting, decoding, task), variants in groups.items():
        base = variants.get(ablation.against)
        table = []
        for name, own in variants.items():
            middle = mean(row["right"] for row in own)
            against = "" if base is None else f"{middle - mean(r['right'] for r in base):+.1f}"
            table.append(
                (
                    name,
                    " ".join(str(row["right"]) for row in own),
                    f"{middle:.1f}",
                    against,
                    f"{mean(row['tokens_per_forward'] for row in own):.2f}",
                )
            )
        head = ("variant", "right", "mean", f"against {ablation.against}", "tokens a forward")
        place = ", ".join(filter(None, (setting, decoding, task)))
        lines += ["", f"## {place}", "", *markdown_table(head, table)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ablation that the command line names."""
    given = parser(__doc__)
    given.add_argument("--config", required=True, help="YAML, or a name that `d2f configs` lists")
    given.add_argument("--output", required=True, type=Path, help="folder of the report")
    given.add_argument("--runs", type=Path, help="folder of models and answers")
    given.add_argument("--only", default="*", metavar="PATTERN", help="runs by folder, as *-11")
    given.add_argument("--report-only", action="store_true", help="train and decode nothing")
    options, overrides = given.parse_known_args(arguments)
    try:
        values = read_mapping(find_config(options.config, *ABLATIONS))
        override(values, overrides, Ablation)
        ablation = check(Ablation, values, options.config)
        plan = list(ablation.plan(options.runs or Path("runs") / options.output.name))
        chosen = [run for run in plan if fnmatchcase(run.folder.name, options.only)]
        if not chosen:
            names = ", ".join(run.folder.name for run in plan)
            raise InputError(f"--only {options.only}: expected a pattern of some of {names}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    make_folder(options.output)
    for run in [] if options.report_only else chosen:
        for step in ablation.first:
            if not Path(step.makes).exists() and step.makes in json.dumps([run.set, run.model]):
                call(*shlex.split(step.run))
        carry_out(ablation, run)
        rows = [row for one in plan for row in one.rows()]
        summary = {"config": ablation.model_dump(mode="json"), "rows": rows}
        write_beside(options.output / "summary.json", json.dumps(summary, indent=1) + "\n")
        write_beside(options.output / "report.md", render(ablation, options.output.name, rows))
    rows = [row for one in plan for row in one.rows()]
    print(render(ablation, options.output.name, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
