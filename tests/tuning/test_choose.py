"""The frontier, the choice, and how far it is from its bound."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f.errors import InputError
from decode.report import Measurements
from decode.tune import SearchOptions as Goal
from decode.tune import choose, difference, frontier, margin_of

PROBLEMS, TOKENS = 40, 10


def measured(right, speed=1.0):
    """Problems right or not, each of `TOKENS` tokens, at so many tokens per second."""
    count = len(right)
    seconds = np.full(count, TOKENS / speed)
    return Measurements(
        np.array(right, dtype=bool), np.full(count, TOKENS), np.full(count, 2), seconds
    )


def counted(right, problems, speed):
    """The first `right` of the problems right."""
    return measured(np.arange(problems) < right, speed)


settings = st.lists(
    st.builds(counted, st.integers(0, PROBLEMS), st.just(PROBLEMS), st.integers(1, 8)),
    min_size=1,
    max_size=10,
)
goals = st.one_of(
    st.builds(Goal, within=st.sampled_from([0, 1, 2.5, 10, 100])),
    st.builds(Goal, min_accuracy=st.floats(0, 1)),
)


def point(one):
    return round(one.tokens_per_second), one.count_right


@given(settings)
def test_the_frontier_has_no_dominated_point_and_misses_none(found):
    def dominates(a, b):
        return a[0] >= b[0] and a[1] >= b[1] and a != b

    points = list(map(point, found))
    front = [points[i] for i in frontier(found)]
    assert not any(dominates(a, b) for a in points for b in front)
    assert len(set(front)) == len(front) and front == sorted(front, reverse=True)
    assert all(p in front or any(dominates(q, p) for q in points) for p in points)


@given(settings, goals)
def test_the_choice_is_the_fastest_that_is_accurate_enough(found, goal):
    chosen, reference, bound = choose(goal, found)
    best = max(one.count_right for one in found)
    assert found[reference].count_right == best
    enough = [one for one in found if one.accuracy >= bound - 1e-9]
    enough = enough or [one for one in found if one.count_right == best]
    assert point(found[chosen])[0] == max(point(one)[0] for one in enough)
    assert found[chosen] in enough


def test_the_bound():
    found = [counted(30, 40, 9), counted(38, 40, 5), counted(39, 40, 4), counted(39, 40, 3)]
    assert choose(Goal(within=2), found)[0] == 2
    assert choose(Goal(within=2.5), found)[0] == 1  # 38 is exactly 2.5 points below 39
    assert choose(Goal(within=2), found)[1] == 3  # the slowest of the most accurate
    assert choose(Goal(min_accuracy=0.75), found)[0] == 0
    assert choose(Goal(min_accuracy=1), found)[0] == 2  # out of reach: the most accurate
    for values in ({"within": 101}, {"within": float("nan")}, {"min_accuracy": 1.5}):
        with pytest.raises(InputError, match=r"must lie in \[0, 1"):
            Goal(**values).check()


def test_the_paired_interval_is_narrow_where_two_agree():
    """Agresti's example has cells 794, 150, 86, 570 (approval of a prime minister, 1600
    asked): the share falls by 4.0 points, 95 % 2.1 to 5.9."""
    first = np.repeat([True, True, False, False], [794, 150, 86, 570])
    second = np.repeat([True, False, True, False], [794, 150, 86, 570])
    share, low, high = difference(measured(first), measured(second))
    assert (share, low, high) == pytest.approx((0.04, 0.021, 0.059), abs=0.0005)
    assert difference(measured(second), measured(first)) == pytest.approx((-share, -high, -low))


def test_the_margin_is_the_distance_to_the_bound_with_its_interval():
    best, worse = counted(95, 100, 1), counted(60, 100, 2)
    share, low, high = margin_of(Goal(within=1), best, best)
    assert share == pytest.approx(0.01) and low < 0 < high
    assert margin_of(Goal(within=10), best, best)[1] > 0
    assert margin_of(Goal(within=1), worse, best)[2] < 0
    low, high = best.interval
    least = margin_of(Goal(min_accuracy=0.9), best, best)
    assert least == pytest.approx((0.05, low - 0.9, high - 0.9))
