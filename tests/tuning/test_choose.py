"""The frontier, the choice, and whether it holds up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import counted, measured

from d2f.errors import InputError
from decode.tune import Goal, choose, frontier, paired_interval, verdict

PROBLEMS = 40
points = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12)
settings = st.lists(
    st.builds(counted, st.integers(0, PROBLEMS), st.just(PROBLEMS), st.integers(1, 8)),
    min_size=1,
    max_size=10,
)
goals = st.one_of(
    st.builds(Goal, within=st.sampled_from([0, 1, 2.5, 10, 100])),
    st.builds(Goal, min_accuracy=st.floats(0, 1)),
)


def dominates(a, b):
    return a[0] >= b[0] and a[1] >= b[1] and a != b


@given(points)
def test_the_frontier_has_no_dominated_point_and_misses_none(points):
    front = [points[i] for i in frontier(points)]
    assert not any(dominates(a, b) for a in points for b in front)
    assert len(set(front)) == len(front)
    assert front == sorted(front, reverse=True)
    for point in points:
        assert point in front or any(dominates(other, point) for other in front)


@given(settings, goals)
def test_the_choice_is_the_fastest_that_is_accurate_enough(found, goal):
    choice = choose(goal, found)
    chosen, best = found[choice.chosen], max(e.count_right for e in found)
    assert found[choice.reference].count_right == best
    enough = [e for e in found if e.accuracy >= choice.bound - 1e-9]
    assert choice.reached == bool(enough)
    assert chosen in enough or not enough
    for other in enough or [e for e in found if e.count_right == best]:
        speeds = other.tokens_per_second, chosen.tokens_per_second
        assert speeds[0] < speeds[1] or speeds[0] == speeds[1]
    assert choice.chosen in frontier([(e.tokens_per_second, e.accuracy) for e in found]) or any(
        e.tokens_per_second == chosen.tokens_per_second and e.accuracy == chosen.accuracy
        for e in found
    )


def test_the_bound():
    found = [counted(30, 40, 9), counted(38, 40, 5), counted(39, 40, 4), counted(39, 40, 3)]
    assert choose(Goal(within=2), found).chosen == 2
    assert choose(Goal(within=2.5), found).chosen == 1  # 38 is exactly 2.5 points below 39
    assert choose(Goal(within=2), found).reference == 3  # the slowest of the most accurate
    assert choose(Goal(min_accuracy=0.75), found).chosen == 0
    none = choose(Goal(min_accuracy=1), found)
    assert not none.reached and none.chosen == 2


@pytest.mark.parametrize(
    "values",
    [{"within": -1}, {"within": 101}, {"within": float("nan")}, {"min_accuracy": 1.5}],
)
def test_a_bad_goal(values):
    name, value = next(iter(values.items()))
    with pytest.raises(InputError, match=rf"{name} must lie in .* got {value}"):
        Goal(**values)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_the_paired_interval(pairs):
    a, b = (measured([pair[i] for pair in pairs], 1) for i in (0, 1))
    low, high = paired_interval(a, b)
    assert -1 <= low < high <= 1
    difference = (a.count_right - b.count_right) / a.problems
    assert low - 1e-12 <= difference <= high + 1e-12
    assert paired_interval(b, a) == pytest.approx((-high, -low))


def test_the_paired_interval_is_narrow_where_two_agree():
    """Agresti's example has cells 794, 150, 86, 570 (approval of a prime minister, 1600
    asked): the share falls by 4.0 points, 95 % 2.1 to 5.9."""
    first = np.repeat([True, True, False, False], [794, 150, 86, 570])
    second = np.repeat([True, False, True, False], [794, 150, 86, 570])
    low, high = paired_interval(measured(first, 1), measured(second, 1))
    assert (low, high) == pytest.approx((0.021, 0.059), abs=0.0005)


def test_the_verdict():
    best = measured([True] * 95 + [False] * 5, 1)
    same = verdict(Goal(within=1), best, best)
    assert same.holds and same.margin == pytest.approx(0.01) and not same.certain
    wide = verdict(Goal(within=10), best, best)
    assert wide.holds and wide.certain
    worse = verdict(Goal(within=1), counted(60, 100, 2), best)
    assert not worse.holds and worse.certain
    least = verdict(Goal(min_accuracy=0.9), best, best)
    assert least.holds and not least.certain
    low, high = best.interval
    assert (least.low, least.high) == pytest.approx((low - 0.9, high - 0.9))
