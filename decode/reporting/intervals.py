"""95 % intervals: of shares and of their differences, of which none has a width of zero, and of a
mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959964


def wilson(right: float, count: float) -> tuple[float, float]:
    """95 % interval of a share (Wilson's score interval). right: whole or not; of the sum of values
    in [0, 1] it is wider than needed, as their variance is at most that of a share."""
    share = right / count
    middle = (share + Z95 * Z95 / (2 * count)) / (1 + Z95 * Z95 / count)
    half = (
        Z95
        / (1 + Z95 * Z95 / count)
        * math.sqrt(share * (1 - share) / count + Z95 * Z95 / (4 * count * count))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def paired(gained: float, lost: float, count: float) -> tuple[float, float]:
    """95 % interval of the difference of two shares on the same `count` problems: the differences
    that a score test does not reject (Tango, Statistics in Medicine 17, 1998; recommended for few
    pairs by Fagerland, Lydersen and Laake, Statistics in Medicine 33, 2014). Where no pair differs
    it is z^2 / (count + z^2) on either side, about 3.8 problems.

    gained, lost: problems that only the first, or only the second, is right on; whole or not, as
    `count` is, where they stand for an effective number of problems.
    """
    if not count:
        return -1.0, 1.0
    return -_highest(lost, gained, count), _highest(gained, lost, count)


def _highest(gained: float, lost: float, count: float) -> float:
    """The highest difference that the score test does not reject, found by bisection: it rejects
    all above and none between it and the estimate."""
    low, high = (gained - lost) / count, 1.0  # the estimate is never rejected
    # Until no float lies between the two.
    while low < (middle := (low + high) / 2) < high:
        # The likeliest share of `lost` where the difference is `middle`: A q^2 + B q + C = 0.
        a = 2 * count
        b = (2 * count - gained + lost) * middle - gained - lost
        c = -lost * middle * (1 - middle)
        q = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        # The variance under the tested difference, not that of the observed shares, which is 0
        # where no pair differs.
        variance = count * (2 * q + middle * (1 - middle))
        if (gained - lost - count * middle) ** 2 <= Z95 * Z95 * variance:
            low = middle
        else:
            high = middle
    return low


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval of the mean (Student's t over the values); nan without two values.
    Needs scipy (the extra `ablation`)."""
    from scipy.stats import t

    mean, count = sum(values) / len(values), len(values)
    if count < 2:
        return mean, math.nan, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (count - 1))
    half = float(t.ppf(0.975, count - 1)) * deviation / math.sqrt(count)
    return mean, mean - half, mean + half
