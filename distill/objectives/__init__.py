"""The training objectives, one file each: its options, what a step feeds, and its loss.

An objective is found by itself: a module here defines a subclass of `Objective` whose `section` is
the class of its options, and its name is that of the file. One of your own is given as
``module:Class``.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from d2f.errors import InputError, did_you_mean

Kind = Any  # a subclass of `distill.objectives.base.Objective`, which imports torch


class _Objectives(Mapping[str, Kind]):
    """Classes by name, imported (and torch with them) when they are asked for."""

    def __init__(self) -> None:
        self.names = [m.name for m in pkgutil.iter_modules(__path__) if m.name != "base"]

    def __getitem__(self, name: str) -> Kind:
        if name in self.names:
            module = import_module(f"{__name__}.{name}")
            return next(kind for kind in vars(module).values() if _is_objective(kind, module))
        place, colon, attribute = name.partition(":")
        if not colon:
            raise KeyError(name)
        if "" not in sys.path:
            sys.path.append("")  # the working folder, after all that is installed
        found: Kind = getattr(import_module(place), attribute)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def find(self, name: object) -> Kind:
        """Return the objective of that name, or at ``module:Class``. Raises InputError."""
        known = isinstance(name, str) and (name in self.names or name.count(":") == 1)
        if not known:
            raise InputError(
                f"expected one of {', '.join(self.names)}, or your own as module:Class, "
                f"got {name!r}{did_you_mean(str(name), self.names)}"
            )
        try:
            return self[str(name)]
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(f"{name}: cannot be imported: {error}") from error


def _is_objective(kind: object, module: object) -> bool:
    own = isinstance(kind, type) and kind.__module__ == getattr(module, "__name__", None)
    return own and "section" in vars(kind)


OBJECTIVES = _Objectives()
