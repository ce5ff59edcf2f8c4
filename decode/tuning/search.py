"""Grid search and successive halving, over any function that measures.

A rung is a number of problems; rungs are nested, so what a setting has done on a small one counts
on the next. Within a rung all settings decode a few problems in turn, then the next few: a machine
that gets slower meanwhile does so for all of them, and where the budget ends the search, all have
done the same problems. The first few are a look at every setting. Where the seconds are bounded,
halving lets no more settings go on from there, and from each rung, than they have room for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from decode.reporting.measurements import Measurements, joined
from decode.tuning.choose import Goal
from decode.tuning.racing import affordable, who_goes_on
from decode.tuning.space import Setting

LOOK = 4  # problems that every setting decodes first
SMALLEST_PASS = 20  # problems
SEARCHES = ("halving", "grid")

Measure = Callable[[Setting, int, int], Measurements | None]
"""(setting, first, stop): problems ``[first, stop)``, or None once the budget is spent."""


@dataclass(frozen=True)
class Plan:
    """How a search goes about it.

    rungs: numbers of problems, rising. eta: after each rung but the last, 1/eta of the settings go
    on. smallest: the fewest problems that a setting decodes at a time after the first ones, where a
    rung has as many. look: how many problems the first pass has, 0 where it is like the others.
    halving: whether settings may be dropped; a grid drops none.
    """

    rungs: tuple[int, ...]
    eta: int
    smallest: int = SMALLEST_PASS
    look: int = 0
    halving: bool = True


@dataclass(frozen=True)
class Cut:
    """What happened at the end of a look or a rung, after `problems` problems: of `settings`
    settings `kept` went on. fitted: whether more would have, had there been seconds for them."""

    problems: int
    settings: int
    kept: int
    fitted: bool = False


@dataclass(frozen=True)
class Found:
    """What a search measured.

    measured: of each setting, None where the budget ended before its first problem. compared: the
    places of the settings that the choice is among, `problems`: on how many problems, the first
    ones, which all of them decoded. spent: whether the budget ended the search.
    """

    measured: list[Measurements | None]
    compared: list[int]
    problems: int
    cuts: list[Cut]
    spent: bool

    def comparable(self) -> list[Measurements]:
        """The measured of the compared settings on the common problems."""
        found = [self.measured[i] for i in self.compared]
        return [e.first(self.problems) for e in found if e is not None]


def make_plan(search: str, settings: int, problems: int, *, eta: int, batch_size: int) -> Plan:
    """The rungs of a search over so many settings whose last rung has `problems`.

    Halving has as many rungs as it takes to come from all settings to one, but none below
    `Plan.smallest` problems. A grid has one. The look is `LOOK` problems, a batch where that is
    more, or all there are.
    """
    smallest = smallest_pass(batch_size)
    rungs = [problems]
    if search == "halving":
        # From the last rung backwards: each one before has 1/eta of its problems, rounded up.
        while settings > 1 and -(-rungs[0] // eta) >= smallest:
            rungs.insert(0, -(-rungs[0] // eta))
            settings = -(-settings // eta)
    look = min(max(LOOK, batch_size), rungs[0])
    return Plan(tuple(rungs), eta, smallest, look, search == "halving")


def smallest_pass(batch_size: int) -> int:
    """Fewest problems to decode at a time: enough for the batch to be full most of the time."""
    return max(SMALLEST_PASS, 4 * batch_size)


def passes(low: int, high: int, smallest: int, look: int = 0) -> list[tuple[int, int]]:
    """``[low, high)`` in parts as even as can be, none below `smallest` where it has as many. look:
    the first problems of all in a part of so many, then up to the double of it and so on."""
    stops, stop = [low], look
    while 0 < stop < min(smallest, high):
        # Doubling: look, 2 look, 4 look and so on, until a part would be as large as the others.
        stops += [stop] * (stop > low)
        stop *= 2
    begin = stops[-1]
    parts = max(1, (high - begin) // smallest)
    stops += [begin + (high - begin) * i // parts for i in range(1, parts + 1)]
    return list(pairwise(stops))


def run_search(
    settings: Sequence[Setting],
    measure: Measure,
    plan: Plan,
    goal: Goal,
    *,
    seed: int = 0,
    seconds_left: Callable[[], float] = lambda: math.inf,
    on_rung: Callable[[int, int, int], None] = lambda settings, first, stop: None,
    on_pass: Callable[[Sequence[Setting], int, int], None] = lambda alive, first, stop: None,
) -> Found:
    """Measure settings rung by rung. Every decision follows from what `measure` and `seconds_left`
    give: with the same answers it comes out the same. seed: of the draws that decide who goes on.
    seconds_left: for measuring; what is left is shared evenly by the rungs to come. on_rung: told
    before each rung how many settings decode problems ``[first, stop)``. on_pass: told before each
    pass which settings will be asked for next, with which problems."""
    parts: list[list[Measurements]] = [[] for _ in settings]
    alive, reached = list(range(len(settings))), 0
    cuts: list[Cut] = []

    def found(compared: list[int], problems: int, spent: bool) -> Found:
        return Found([joined(p) if p else None for p in parts], compared, problems, cuts, spent)

    def cut(eta: int, rungs: Sequence[int]) -> list[int]:
        """Who goes on to the first of the rungs to come."""
        measured = [joined(parts[i]) for i in alive]
        order = who_goes_on(goal, measured, eta=eta, seed=seed)
        # What each would take on the next rung, at the speed that it has had so far.
        costs = [measured[i].seconds_per_problem * (rungs[0] - reached) for i in order]
        kept = order[: affordable(costs, seconds_left() / len(rungs))]
        if eta > 1 or len(kept) < len(alive):
            cuts.append(Cut(reached, len(alive), len(kept), len(kept) < len(order)))
        return [alive[i] for i in sorted(kept)]

    stops = [*plan.rungs]
    # Without a bound on the seconds a look decides nothing.
    looks = plan.halving and 0 < plan.look < stops[0] and seconds_left() < math.inf
    if looks:
        stops.insert(0, plan.look)
    for place, rung in enumerate(stops):
        on_rung(len(alive), reached, rung)
        for first, stop in passes(reached, rung, plan.smallest, plan.look):
            on_pass([settings[i] for i in alive], first, stop)
            for i in alive:
                measured = measure(settings[i], first, stop)
                if measured is None:
                    # Stopped within a pass: settings are compared on what all have done before it,
                    # or in the very first pass, on it, among those that it reached.
                    return found([j for j in alive if parts[j]], reached or stop, True)
                # Passes of earlier rungs stay in it: a later rung measures only the problems beyond
                # them.
                parts[i].append(measured)
            reached = stop
        if rung != stops[-1]:
            if seconds_left() <= 0:
                return found(alive, reached, True)
            # After a look only the seconds drop anybody: four problems are mostly noise.
            alive = cut(1 if looks and not place else plan.eta, stops[place + 1 :])
    return found(alive, reached, False)
