"""Grid search and successive halving, over any function that measures.

A rung is a number of problems; rungs are nested, so what a setting has done on a small one counts
on the next. Within a rung all settings decode a few problems in turn, then the next few: a machine
that gets slower meanwhile does so for all of them, and where the budget ends the search, all have
done the same problems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from decode.tuning.choose import Goal
from decode.tuning.evidence import Evidence, joined
from decode.tuning.keep import keep
from decode.tuning.space import Setting

SMALLEST_PASS = 20  # problems
SEARCHES = ("halving", "grid")

Measure = Callable[[Setting, int, int], Evidence | None]
"""(setting, first, stop): problems ``[first, stop)``, or None once the budget is spent."""


@dataclass(frozen=True)
class Plan:
    """rungs: numbers of problems, rising. eta: after each rung but the last 1/eta of the settings
    go on. smallest: fewest problems that a setting decodes at a time, where a rung has as many."""

    rungs: tuple[int, ...]
    eta: int
    smallest: int = SMALLEST_PASS


@dataclass(frozen=True)
class Cut:
    """A rung's end: of `settings` settings `kept` go on."""

    problems: int
    settings: int
    kept: int


@dataclass(frozen=True)
class Found:
    """What a search measured.

    evidence: of each setting, None where the budget ended before its first problem. compared: the
    places of the settings that the choice is among, `problems`: on how many problems, the first
    ones, which all of them decoded. spent: whether the budget ended the search.
    """

    evidence: list[Evidence | None]
    compared: list[int]
    problems: int
    cuts: list[Cut]
    spent: bool

    def comparable(self) -> list[Evidence]:
        """The evidence of the compared settings on the common problems."""
        found = [self.evidence[i] for i in self.compared]
        return [e.first(self.problems) for e in found if e is not None]


def make_plan(search: str, settings: int, problems: int, *, eta: int, batch_size: int) -> Plan:
    """The rungs of a search over so many settings whose last rung has `problems`.

    Halving has as many rungs as it takes to come from all settings to one, but none below
    `Plan.smallest` problems. A grid has one.
    """
    smallest = smallest_pass(batch_size)
    rungs = [problems]
    if search == "halving":
        while settings > 1 and -(-rungs[0] // eta) >= smallest:
            rungs.insert(0, -(-rungs[0] // eta))
            settings = -(-settings // eta)
    return Plan(tuple(rungs), eta, smallest)


def smallest_pass(batch_size: int) -> int:
    """Fewest problems to decode at a time: enough for the batch to be full most of the time."""
    return max(SMALLEST_PASS, 4 * batch_size)


def passes(low: int, high: int, smallest: int) -> list[tuple[int, int]]:
    """``[low, high)`` in parts as even as can be, none below `smallest` where it has as many."""
    parts = max(1, (high - low) // smallest)
    stops = [low + (high - low) * i // parts for i in range(parts + 1)]
    return list(pairwise(stops))


def run_search(
    settings: Sequence[Setting],
    measure: Measure,
    plan: Plan,
    goal: Goal,
    *,
    seed: int = 0,
    on_rung: Callable[[int, int, int], None] = lambda settings, first, stop: None,
) -> Found:
    """Measure settings rung by rung. Every decision follows from what `measure` gives: with the
    same answers it comes out the same. seed: of the draws that decide who goes on. on_rung: told
    before each rung how many settings decode problems ``[first, stop)``."""
    parts: list[list[Evidence]] = [[] for _ in settings]
    alive, reached = list(range(len(settings))), 0
    cuts: list[Cut] = []

    def found(compared: list[int], problems: int, spent: bool) -> Found:
        return Found([joined(p) if p else None for p in parts], compared, problems, cuts, spent)

    for rung in plan.rungs:
        on_rung(len(alive), reached, rung)
        for first, stop in passes(reached, rung, plan.smallest):
            for i in alive:
                evidence = measure(settings[i], first, stop)
                if evidence is None:
                    return found([j for j in alive if parts[j]], reached or stop, True)
                parts[i].append(evidence)
            reached = stop
        if rung != plan.rungs[-1]:
            kept = keep(goal, [joined(parts[i]) for i in alive], eta=plan.eta, seed=seed)
            cuts.append(Cut(rung, len(alive), len(kept)))
            alive = [alive[i] for i in kept]
    return found(alive, reached, False)
