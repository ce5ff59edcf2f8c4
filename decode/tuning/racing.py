"""Who goes on to the next rung of successive halving.

On a small rung accuracies are noise for the most part, so a setting is not judged by its measured
accuracy but by how probably it still matters. What was measured is drawn again `DRAWS` times
(Bayesian bootstrap, Rubin 1981: each problem gets a random weight, the same for all settings, since
they decoded the same problems). To each setting half a right and half a wrong problem are added
with weights of their own, which makes the spread of its accuracy that of Jeffreys' interval, also
where all or none were right. In each draw the choice is made as at the end. A setting matters if it
is the choice, or the most accurate one, which the bound depends on: without it a later rung would
take too low a bound for reached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from decode.reporting.measurements import Measurements
from decode.tuning.choose import Goal, choose

DRAWS = 2000
LEAST_CHANCE = 0.02  # a setting with this chance goes on whatever its rank

Chances = npt.NDArray[np.float64]


def chances(goal: Goal, measured: Sequence[Measurements], seed: int) -> tuple[Chances, Chances]:
    """Of each setting, the share of draws in which it is the choice, and in which it is the most
    accurate, [settings] each. measured: of the same problems."""
    rng = np.random.default_rng(seed)
    settings, problems = len(measured), measured[0].problems
    # Gamma(1) weights, divided by their sum, are uniform over all ways to weigh the problems.
    weights = rng.standard_gamma(1.0, (DRAWS, problems))
    # Gamma(1/2) twice is Jeffreys' prior, Beta(1/2, 1/2), on the same scale.
    also_right, also_wrong = rng.standard_gamma(0.5, (2, DRAWS, settings))
    right = weights @ np.stack([e.right for e in measured], 1) + also_right  # [draws, settings]
    accuracy = right / (weights.sum(1, keepdims=True) + also_right + also_wrong)
    tokens = weights @ np.stack([e.tokens for e in measured], 1)
    speed = tokens / (weights @ np.stack([e.seconds for e in measured], 1))
    best = accuracy.max(1, keepdims=True)
    bound = best - goal.within / 100 if goal.min_accuracy is None else goal.min_accuracy
    # As in `choose`: where nothing reaches a fixed bound, the most accurate is taken.
    allowed = (accuracy >= bound) | (accuracy == best)
    chosen = np.where(allowed, speed, -1.0).argmax(1)
    return (
        np.bincount(chosen, minlength=settings) / DRAWS,
        np.bincount(accuracy.argmax(1), minlength=settings) / DRAWS,
    )


def who_goes_on(goal: Goal, measured: Sequence[Measurements], *, eta: int, seed: int) -> list[int]:
    """The places of the settings that go on, the most promising first.

    Those are what would be chosen now, the most accurate now, each that is the choice or, where
    the bound depends on it, the most accurate in at least `LEAST_CHANCE` of the draws, and the top
    1/eta; eta 1 is all. The order: what would be chosen and the most accurate, then by the sum of
    the two chances; of equal chance first what reaches the bound, then by speed.
    """
    now = choose(goal, measured)
    sure = list(dict.fromkeys((now.chosen, now.reference)))
    is_choice, is_best = chances(goal, measured, seed)
    if goal.min_accuracy is not None:
        # A fixed bound does not depend on the most accurate setting.
        is_best = np.zeros_like(is_best)

    def rank(i: int) -> tuple[float, ...]:
        return (
            -is_choice[i] - is_best[i],
            measured[i].accuracy < now.bound,
            -measured[i].tokens_per_second,
        )

    # The two sure ones go first below, so a cut by seconds never drops them.
    order = sorted(range(len(measured)), key=rank)
    quota = -(-len(measured) // eta)
    matters = np.maximum(is_choice, is_best) >= LEAST_CHANCE
    kept = {*order[:quota], *np.flatnonzero(matters).tolist()}
    return [*sure, *(i for i in order if i in kept and i not in sure)]


def affordable(costs: Sequence[float], seconds: float) -> int:
    """How many settings, from the first on, so many seconds have room for together. costs: the
    seconds of each. It is at least two, where there are two, so that something is left to
    compare."""
    fits = int(np.searchsorted(np.cumsum(costs), seconds, side="right"))
    return min(len(costs), max(2, fits))
