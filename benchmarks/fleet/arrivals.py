"""When requests come: a Poisson process, or one whose rate goes up and down."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Bursts:
    """A Poisson process whose rate has two states in turn: requests come `times` as often in a
    burst, which lasts for `seconds` at the end of each period and is a `share` of it, as in the
    calm before it. times = 1 is a plain Poisson process. At a mean rate of 16 with times 4::

        second   0        4    5        9    10
        rate     10       40   10       40

    All users burst together: with any number of replicas it is the whole traffic that rises, which
    is the worst case; bursts of users who know nothing of each other would even out. The states'
    lengths are not drawn, so that whole periods have the mean rate, and few of them suffice.
    """

    times: float = 1.0
    share: float = 0.2
    seconds: float = 1.0

    @property
    def period(self) -> float:
        """Seconds from one burst to the next."""
        return self.seconds / self.share

    @property
    def calm(self) -> float:
        """The rate in the calm over the mean rate."""
        return 1 / (1 - self.share + self.share * self.times)


POISSON = Bursts()
BURSTY = Bursts(times=4.0)


def arrivals(rate: float, seconds: float, bursts: Bursts, seed: int) -> NDArray[np.float64]:
    """Arrival times within `seconds`, at `rate` requests a second in the mean of a period.

    A process of rate 1 in a time of its own is stretched: that time runs at the state's rate.
    """
    starts = np.arange(math.ceil(seconds / bursts.period) + 1) * bursts.period
    begins = np.stack([starts, starts + bursts.period - bursts.seconds], axis=1).ravel()
    speeds = np.tile([bursts.calm, bursts.calm * bursts.times], len(starts))
    # How much of the process's own time has passed when each state begins.
    passed = np.concatenate([[0.0], np.cumsum(np.diff(begins) * speeds[:-1] * rate)])
    whole = float(np.interp(seconds, begins, passed))
    draw = np.random.default_rng([seed, 1])
    count = int(whole + 10 * math.sqrt(whole) + 20)  # enough: ten deviations more than the mean
    times = np.cumsum(draw.exponential(size=count))
    return np.interp(times[times < whole], passed, begins)
