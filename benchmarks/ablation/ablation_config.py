"""The configuration of an ablation, from YAML."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from d2f.config import Problems, Section, Seed, Switch, Text, check, override, put, read_mapping
from d2f.errors import InputError
from d2f.shipped import ABLATIONS, TRAINING, find_config
from d2f.tasks import Task, find_tasks
from decode.decoders import find_decoder
from distill.config import TrainConfig, parse_config, renamed, with_section

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]*$")]


class First(Section):
    """What is made before the runs that read it."""

    makes: Text
    """The file or folder, as the runs' configurations name it."""
    run: Text
    """A module and its arguments, as after `python -m`. Called whenever a run is asked for that
    reads what it makes: the same call again must go on where it was, or find itself done."""

    @model_validator(mode="after")
    def _is_a_module(self) -> First:
        words = shlex.split(self.run)
        if not words or not _is_there(words[0]):
            raise ValueError(f"run: expected a module and its arguments, got {self.run!r}")
        return self


class Decoding(Section):
    """A way to decode."""

    name: Name
    """As in the report."""
    decoder: Text
    """Its name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """By the names of the command line's flags with underscores."""
    line: Name | None = None
    """What it is a point of in the figures, with the others of this name; default itself."""


class Variant(Section):
    """A training."""

    name: Name
    """As in the report, and of its folder."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of its configuration (dots lead into sections), over those of all."""
    decode: tuple[Decoding, ...] = ()
    """Ways to decode it beside those of all."""
    trained: Switch = True
    """false: the model that the training starts from, read as the training's result is (a D2F
    student's mask and block size). Measured once, whatever the seeds."""


class Setting(Section):
    """What all variants are trained with once more: each variant is compared within it."""

    name: Name
    """As in the report, and of the runs' folders."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of the training configuration, over those of all and under a variant's."""
    decode: tuple[Decoding, ...] = ()
    """Ways to decode its runs beside those of all."""


class Untrained(Section):
    """A model that is measured beside the variants, as it is."""

    name: Name
    """As in the report."""
    model: Text
    """Folder, hub name or bundled name."""
    decode: Annotated[tuple[Decoding, ...], Field(min_length=1)]
    """Ways to decode it."""
    against: dict[Name, Name] = Field(default_factory=dict)
    """Ways to decode it, each with the one that it is compared with."""


@dataclass(frozen=True)
class Run:
    """What a folder of the ablation is for: a training, or a model as it is, measured.

    setting: empty where the configuration has none. seed: None for what is not trained. config:
    the training, None for the entries of `untrained`, which have a model instead.
    """

    folder: Path
    variant: str
    setting: str
    seed: int | None
    decode: tuple[Decoding, ...]
    config: TrainConfig | None = None
    model: str | None = None

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.name


class Ablation(Section):
    """Variants of a training, each with every seed in every setting, and how they are measured."""

    train: Text
    """The training configuration that they vary, by path or name."""
    first: tuple[First, ...] = ()
    """What has to be made before, in this order; of it what the runs that are asked for read."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of it that are set for all variants."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    """Each variant is trained with each."""
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]
    """The trainings."""
    settings: tuple[Setting, ...] = ()
    """Each variant is trained in each; none is one that sets nothing."""
    untrained: tuple[Untrained, ...] = ()
    """Models that are measured beside them."""
    decode: tuple[Decoding, ...] = ()
    """Ways to decode all variants."""
    tasks: Annotated[tuple[Text, ...], Field(min_length=1)]
    """What is measured: generated tasks, or task files."""
    allow_code_execution: Switch = False
    """Let the judge python run what the models write, on this machine."""
    problems: Problems = 500
    """Problems of each task."""
    split: Literal["tuning", "heldout"] = "heldout"
    """Which problems."""
    batch_size: Annotated[int, Field(ge=1, le=10**5)] = 32
    """Most requests in a forward."""
    against: Text
    """The variant that the others are compared with."""

    @model_validator(mode="after")
    def _consistent(self) -> Ablation:
        from decode.cli import DecoderSettings  # loads torch

        names = [variant.name for variant in (*self.variants, *self.untrained)]
        _distinct("names of variants and untrained", names)
        _distinct("seeds", self.seeds)
        _distinct("names of settings", [setting.name for setting in self.settings])
        for setting in self._settings:
            for variant in self.variants:
                named = self._decodings(variant, setting)
                what = f"the decodings of {_joined(variant.name, setting.name)}"
                if not named:
                    raise ValueError(f"{what}: expected at least one, got none")
                _distinct(f"names of {what}", [d.name for d in named])
        for entry in self.untrained:
            unknown = {*entry.against, *entry.against.values()} - {d.name for d in entry.decode}
            if unknown:
                raise ValueError(
                    f"untrained {entry.name}: against must name its decodings, "
                    f"got {', '.join(sorted(unknown))}"
                )
        if self.against not in [variant.name for variant in self.variants]:
            raise ValueError(f"against must name a variant, got {self.against!r}")
        decodings: dict[str, Decoding] = {}
        every = (*self.settings, *self.variants, *self.untrained)
        theirs = [d for entry in every for d in entry.decode]
        for one in (*self.decode, *theirs):
            try:
                find_decoder(one.decoder)
            except InputError as error:
                raise ValueError(f"decode {one.name}: {error}") from error
            own = sorted({"decoder", "max_new_tokens"} & set(one.options))
            if own:
                raise ValueError(f"decode {one.name}: {', '.join(own)} is no option here")
            lengths = [task.response_length for task in self.chosen]
            DecoderSettings(one.decoder, one.options).check(lengths)
            if decodings.setdefault(one.name, one) != one:
                raise ValueError(f"decode {one.name}: one name for two ways to decode")
        for values in (self.set, *(one.set for one in (*self.settings, *self.variants))):
            own = sorted({"seed", "output", "tracker"} & set(values))
            if own:
                raise ValueError(f"set: {', '.join(own)} is not for a variant to set")
        folders = [name for name, *_ in self._trainings()]
        _distinct("folders of the runs", [*folders, *(entry.name for entry in self.untrained)])
        return self

    @cached_property
    def chosen(self) -> tuple[Task, ...]:
        """The tasks themselves."""
        return find_tasks(self.tasks, allow_code_execution=self.allow_code_execution)

    def plan(self, runs: Path) -> list[Run]:
        """Every run, in a folder of `runs` of its own: what is not trained, then all variants with
        one seed before the next, so that what a stop leaves can be compared. Raises InputError."""
        return [
            *(
                Run(runs / e.name, e.name, "", None, e.decode, model=e.model)
                for e in self.untrained
            ),
            *(
                Run(
                    folder=runs / name,
                    variant=variant.name,
                    setting=setting.name,
                    seed=seed if variant.trained else None,
                    decode=self._decodings(variant, setting),
                    config=self._training(variant, setting, seed, runs / name),
                )
                for name, variant, setting, seed in self._trainings()
            ),
        ]

    @property
    def _settings(self) -> tuple[Setting, ...]:
        return self.settings or (Setting.model_construct(name=""),)

    def _trainings(self) -> list[tuple[str, Variant, Setting, int]]:
        """Variant, setting and seed of each folder, by its name."""
        return [
            (f"{where}-{seed}" if variant.trained else where, variant, setting, seed)
            for seed in self.seeds
            for setting in self._settings
            for variant in self.variants
            for where in [_joined(variant.name, setting.name)]
            if variant.trained or seed == self.seeds[0]
        ]

    def _training(self, variant: Variant, setting: Setting, seed: int, output: Path) -> TrainConfig:
        values = with_section(read_mapping(find_config(self.train, *TRAINING)))
        for key, value in {**self.set, **setting.set, **variant.set}.items():
            put(values, renamed(key), deepcopy(value))  # later keys may lead into it
        values |= {"seed": seed, "output": str(output), "tracker": "none"}
        where = _joined(f"{self.train}, variant {variant.name}", setting.name)
        return parse_config(values, where)

    def _decodings(self, variant: Variant, setting: Setting) -> tuple[Decoding, ...]:
        """How the runs of a variant are measured."""
        return (*self.decode, *setting.decode, *variant.decode)


def read_ablation(path: str | Path, overrides: Sequence[str] = ()) -> Ablation:
    """The configuration in a YAML file, or of that name among those that ship with the package,
    with overrides ``--key value``. Raises InputError, also for a variant whose training
    configuration is not one."""
    values = read_mapping(find_config(path, *ABLATIONS))
    override(values, overrides)
    found = check(Ablation, values, str(path))
    found.plan(Path("-"))
    return found


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _joined(name: str, setting: str) -> str:
    return f"{name} {setting}".strip()


def _distinct(what: str, values: Sequence[object]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(f"{what} must be distinct, got {list(values)}")
