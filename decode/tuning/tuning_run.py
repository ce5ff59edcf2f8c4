"""What a tuning run does, checked before any work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from d2f import __version__
from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.tasks import DEFAULT_TASKS, Task, find_tasks
from decode.decoders.checks import whole_number
from decode.reporting.environment import environment
from decode.tuning.choose import Goal
from decode.tuning.search import SEARCHES
from decode.tuning.space import Space, make_space


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
