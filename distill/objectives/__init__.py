"""The training objectives, one file each: its options, what a step feeds, and its loss.

An objective is found by itself: a module here defines a subclass of `Objective` whose `section` is
the class of its options, and its name is that of the file. One of your own is given as
``module:Class``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from d2f.config import find_attribute
from d2f.errors import InputError, not_one_of

Kind = Any  # a subclass of `distill.objectives.base.Objective`


class _Objectives(Mapping[str, Kind]):
    """Classes by name, imported when they are asked for."""

    def __init__(self) -> None:
        self.names = [m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"]

    def __getitem__(self, name: object) -> Kind:
        """Return the objective of that name, or at ``module:Class``. Raises InputError."""
        if name in self.names:
            module = import_module(f"{__name__}.{name}")
            kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
            return next(
                kind
                for kind in kinds
                if kind.__module__ == module.__name__ and "section" in vars(kind)
            )
        if isinstance(name, str) and name.count(":") == 1:
            return find_attribute(name, "objective")
        raise InputError(f"{not_one_of(name, self.names)}, or your own as module:Class")

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


OBJECTIVES = _Objectives()
