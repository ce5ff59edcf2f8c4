"""The configuration of an ablation, from YAML."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from d2f.configuration import Section, Switch, check, override, put, read_mapping
from d2f.errors import InputError
from d2f.quantities import Problems, Seed, Text
from d2f.shipped import ABLATIONS, TRAINING, find_config
from d2f.tasks import Task, find_tasks
from decode.commands.decoder_settings import DecoderSettings
from decode.decoders import find_decoder
from distill.config import TrainConfig, parse_config

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]*$")]


class Decoding(Section):
    """A way to decode."""

    name: Name
    """As in the report."""
    decoder: Text
    """Its name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """By the names of the command line's flags with underscores."""


class Variant(Section):
    """A training."""

    name: Name
    """As in the report, and of its folder."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of its configuration (dots lead into sections), over those of all."""
    decode: tuple[Decoding, ...] = ()
    """Ways to decode it beside those of all."""


class Untrained(Section):
    """A model that is measured beside the variants, as it is."""

    name: Name
    """As in the report."""
    model: Text
    """Folder, hub name or bundled name."""
    decode: Annotated[tuple[Decoding, ...], Field(min_length=1)]
    """Ways to decode it."""


class Ablation(Section):
    """Variants of a training, each with every seed, and how all of them are measured."""

    train: Text
    """The training configuration that they vary, by path or name."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of it that are set for all variants."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    """Each variant is trained with each."""
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]
    """The trainings."""
    untrained: tuple[Untrained, ...] = ()
    """Models that are measured beside them."""
    decode: Annotated[tuple[Decoding, ...], Field(min_length=1)]
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
        names = [variant.name for variant in (*self.variants, *self.untrained)]
        _distinct("names of variants and untrained", names)
        _distinct("seeds", self.seeds)
        for variant in self.variants:
            named = (*self.decode, *variant.decode)
            _distinct(f"names of the decodings of {variant.name}", [d.name for d in named])
        if self.against not in [variant.name for variant in self.variants]:
            raise ValueError(f"against must name a variant, got {self.against!r}")
        decodings: dict[str, Decoding] = {}
        theirs = [d for entry in (*self.variants, *self.untrained) for d in entry.decode]
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
        for values in (self.set, *(variant.set for variant in self.variants)):
            own = sorted({"seed", "output", "tracker"} & set(values))
            if own:
                raise ValueError(f"set: {', '.join(own)} is not for a variant to set")
        folders = [_folder(variant, seed) for variant in self.variants for seed in self.seeds]
        _distinct("folders of the runs", [*folders, *(entry.name for entry in self.untrained)])
        return self

    @cached_property
    def chosen(self) -> tuple[Task, ...]:
        """The tasks themselves."""
        return find_tasks(self.tasks, allow_code_execution=self.allow_code_execution)

    def trainings(self, runs: Path) -> list[tuple[Variant, TrainConfig]]:
        """Every variant with the configuration of its run, in a folder of `runs` of its own: all
        variants with one seed before the next, so that what a stop leaves can be compared. Raises
        InputError."""
        return [
            (variant, self._training(variant, seed, runs / _folder(variant, seed)))
            for seed in self.seeds
            for variant in self.variants
        ]

    def _training(self, variant: Variant, seed: int, output: Path) -> TrainConfig:
        values = read_mapping(find_config(self.train, *TRAINING))
        for key, value in {**self.set, **variant.set}.items():
            put(values, key, deepcopy(value))  # later keys may lead into it
        values |= {"seed": seed, "output": str(output), "tracker": "none"}
        return parse_config(values, f"{self.train}, variant {variant.name}")

    def decodings(self, variant: Variant) -> tuple[Decoding, ...]:
        """How the runs of a variant are measured."""
        return (*self.decode, *variant.decode)


def read_ablation(path: str | Path, overrides: Sequence[str] = ()) -> Ablation:
    """The configuration in a YAML file, or of that name among those that ship with the package,
    with overrides ``--key value``. Raises InputError, also for a variant whose training
    configuration is not one."""
    values = read_mapping(find_config(path, *ABLATIONS))
    override(values, overrides)
    found = check(Ablation, values, str(path))
    found.trainings(Path("-"))
    return found


def _folder(variant: Variant, seed: int) -> str:
    return f"{variant.name}-{seed}"


def _distinct(what: str, values: Sequence[object]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(f"{what} must be distinct, got {list(values)}")
