"""The settings that are searched: a grid over a decoder's options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from d2f.contract import Contract
from d2f.errors import InputError
from d2f.tasks import Task
from decode.decoders import Decoder, find_decoder
from decode.decoders.base import searchable
from decode.decoders.options import default_grid

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
        decoder = kind(**kind.completed({}, contract))
        values = {name: getattr(decoder, name) for name in searchable(kind) if name in self.grid}
        return {name: value for name, value in values.items() if value is not None}

    def fitted(self, contract: Contract) -> Space:
        """The same with what follows from how the model was trained (its block size) where that
        is not searched. Raises InputError for a model that the decoder cannot decode."""
        kind = find_decoder(self.decoder)
        kind().check(contract)
        own = {name: (value,) for name, value in kind.completed({}, contract).items()}
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
