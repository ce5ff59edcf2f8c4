"""95 % intervals of what several seeds gave on the same problems: they cover the choice of the
problems and that of the seeds.

Every seed decodes the same problems, so 3 x 500 answers are fewer than 1,500 problems and more than
500. How many they count for follows from an analysis of variance with problems and seeds crossed
and both random (Dorfman, Berbaum and Metz, Investigative Radiology 27, 1992, have readers for
seeds; the degrees of freedom are Hillis's, Statistics in Medicine 26, 2007)::

    variance of the mean
        = (MS_ps + max(0, MS_p - MS_ps) + max(0, MS_s - MS_ps)) / (problems x seeds)

with the mean squares of problems, seeds and what is left. The effective number is that of problems
of one seed with the same variance (Kish's design effect), at most problems x seeds; where seeds
differ it is lowered once more by (z / t)^2, as so few seeds say little of their spread (Korn and
Graubard, Survey Methodology 24, 1998). With it Wilson's interval of a share and Tango's of a paired
difference are taken: neither has a width of 0 where no answer differs. Of one seed the effective
number is that of the problems, and the interval covers their choice alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decode.report import Z95, paired, wilson

Values = NDArray[np.float64]


def effective_number(values: Values) -> float:
    """How many problems of one seed the values ``[seeds, problems]`` count for. Needs scipy (the
    extra `ablation`)."""
    from scipy.stats import t

    seeds, problems = values.shape
    if seeds == 1 or problems == 1:
        return float(problems)
    by_problem, by_seed, mean = values.mean(0), values.mean(1), values.mean()
    rest = values - by_problem - by_seed[:, None] + mean
    ms_rest = float((rest**2).sum()) / ((seeds - 1) * (problems - 1))
    of_problems = max(0.0, seeds * float(by_problem.var(ddof=1)) - ms_rest)
    ms_seeds = problems * float(by_seed.var(ddof=1))
    of_seeds = max(0.0, ms_seeds - ms_rest)
    total = ms_rest + of_problems + of_seeds
    if total == 0:  # all are the same: nothing says that seeds add anything to the problems
        return float(problems)
    count = min(1.0, float(values.var()) / total) * seeds * problems
    if of_seeds:
        freedom = total**2 / (ms_seeds**2 / (seeds - 1))
        count *= (Z95 / float(t.ppf(0.975, freedom))) ** 2
    return count


def share_interval(right: Values) -> tuple[float, float]:
    """Of the share that is right: 1 or 0, ``[seeds, problems]``."""
    count = effective_number(right)
    return wilson(float(right.mean()) * count, count)


def difference_interval(right: Values, base: Values) -> tuple[float, float]:
    """Of the difference of two shares on the same problems at the same seeds, ``[seeds, problems]``
    each, or ``[1, problems]`` for what has no seed."""
    difference = right - base
    count = effective_number(difference)
    gained, lost = float((difference > 0).mean()), float((difference < 0).mean())
    return paired(gained * count, lost * count, count)
