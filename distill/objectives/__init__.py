"""The training objectives, a file each: what a step feeds, which rows it reads, and its loss.

`OBJECTIVES` finds their classes by name. One that is not of this package is added by its `Kind`:
``KINDS["mine"] = MineKind()``, whose `home` is ``my_module:Mine``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from distill.objectives.kinds import KINDS

if TYPE_CHECKING:
    from distill.objectives.base import Objective


class _Objectives(Mapping[str, "type[Objective]"]):
    """Classes by name, imported (and torch with them) when they are asked for."""

    def __getitem__(self, name: str) -> type[Objective]:
        module, _, attribute = KINDS[name].home.partition(":")
        found: type[Objective] = getattr(import_module(module), attribute)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)


OBJECTIVES = _Objectives()
