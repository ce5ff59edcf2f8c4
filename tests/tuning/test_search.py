"""Grid search and successive halving on made-up measurements."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import Model, counted, measured

from decode.tune import Goal, Plan, chances, choose, make_plan, passes, run_search, who_goes_on

PERIOD = 8  # of the problems' difficulties: every rung below has whole periods
RUNGS = (24, 72, 216)
HALVING = Plan(RUNGS, eta=3, smallest=8)
goals = st.sampled_from([Goal(0), Goal(12.5), Goal(25), Goal(min_accuracy=0.5)])


def noise_free(skills, speeds, **options):
    """A setting of skill k is right on the k easiest of every `PERIOD` problems."""
    difficulty = np.arange(RUNGS[-1]) * 3 % PERIOD
    return Model([difficulty < skill for skill in skills], speeds, **options)


def chosen(model, plan, goal):
    found = run_search(model.settings, model, plan, goal)
    return found, found.compared[choose(goal, found.comparable()).chosen]


# What is found


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9)), min_size=1, max_size=30), goals)
def test_without_noise_halving_finds_what_the_grid_finds(candidates, goal):
    skills, speeds = zip(*candidates, strict=True)
    model = noise_free(skills, speeds)
    found, halved = chosen(model, HALVING, goal)
    _, whole = chosen(noise_free(skills, speeds), Plan(RUNGS[-1:], 3), goal)
    assert (skills[halved], speeds[halved]) == (skills[whole], speeds[whole])
    assert not found.spent and found.problems == RUNGS[-1]


def test_noise_on_a_small_rung_rarely_loses_what_matters():
    """Twenty settings along a frontier, neighbours 1.5 points apart, 200 problems: halving does
    less than half of the grid's work and mostly chooses what the grid does from the same answers.
    Where it does not, its choice is as accurate as was asked for, measured against the grid."""
    rng = np.random.default_rng(0)
    skill, speeds = np.linspace(0.65, 0.93, 20), np.linspace(200, 100, 20)
    plan, goal = make_plan("halving", 20, 200, eta=3, batch_size=1), Goal(2)
    same, work = 0, []
    for _ in range(20):
        right = (rng.random(200) + rng.normal(0, 0.05, (20, 200))) < skill[:, None]
        model, grid = Model(right, speeds), Model(right, speeds)
        _, halved = chosen(model, plan, goal)
        _, whole = chosen(grid, Plan((200,), 3), goal)
        same += halved == whole
        work.append(sum(stop - first for _, first, stop in model.calls) / 4000)
        assert right[halved].mean() >= right.mean(1).max() - 0.02 - 1e-9
    assert same >= 15
    assert np.mean(work) < 0.5


def test_chances():
    sure = [counted(99, 100, 9), counted(50, 100, 10), counted(100, 100, 5)]
    choice, best = chances(Goal(20), sure, 0)
    assert choice.sum() == pytest.approx(1) and best.sum() == pytest.approx(1)
    assert choice[0] > 0.99 and best[1] == 0 < best[0] < best[2]
    few = [counted(10, 10, 9), counted(10, 10, 5)]  # ten of ten are not a hundred of a hundred
    assert 0.5 < chances(Goal(1), few, 0)[0][0] < 0.9
    assert (chances(Goal(1), few, 0)[0] == chances(Goal(1), few, 0)[0]).all()


def test_settings_that_were_right_on_the_same_problems_are_compared_by_pairs():
    """Two settings that agree on all but one problem differ less than accuracies alone say."""
    half = np.arange(100) % 2 == 0
    nearly = half.copy()
    nearly[0] = False
    alike, _ = chances(Goal(5), [measured(nearly, 2), measured(half, 1)], 0)
    unlike, _ = chances(Goal(5), [measured(np.roll(nearly, 1), 2), measured(half, 1)], 0)
    assert alike[0] > 0.9 > unlike[0]


def test_who_goes_on(monkeypatch):
    goal = Goal(1)
    hopeless = [counted(2, 20, 100 + i) for i in range(8)]
    front = [counted(19, 20, 10), counted(20, 20, 9), counted(20, 20, 8)]
    everyone = who_goes_on(goal, [*hopeless, *front], eta=1, seed=0)
    assert sorted(everyone) == list(range(11)) and set(everyone[:3]) == {8, 9, 10}
    kept = who_goes_on(goal, [*hopeless, *front], eta=3, seed=0)
    assert {8, 9, 10} <= set(kept) and len(kept) == 4  # a third of eleven
    level = [counted(20, 20, 10 + i / 10) for i in range(6)]
    assert len(who_goes_on(goal, level, eta=6, seed=0)) > 1  # noise could make several the choice
    assert 0 in who_goes_on(goal, level, eta=6, seed=0)  # the slowest of the most accurate

    fast = [counted(90, 100, 50 + i) for i in range(6)]
    careful = [counted(98, 100, 2), counted(99, 100, 1)]  # either may be the most accurate in truth
    assert {5, 6, 7} <= set(who_goes_on(Goal(30), [*fast, *careful], eta=8, seed=0))
    kept = who_goes_on(Goal(min_accuracy=0.5), [*fast, *careful], eta=8, seed=0)
    assert 6 not in kept  # no bound hangs on it

    lost = np.array([1.0, 0, 0]), np.array([1.0, 0, 0])  # what draws may say, now counts as well
    monkeypatch.setattr("decode.tune.chances", lambda *arguments: lost)
    now = [counted(5, 20, 9), counted(19, 20, 8), counted(20, 20, 7)]
    assert who_goes_on(Goal(5), now, eta=3, seed=0) == [1, 2, 0]  # choice and reference first


# What is measured


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 80),
    st.booleans(),
)
def test_the_budget_is_respected_and_nothing_is_measured_twice(candidates, most, halving):
    skills, speeds = zip(*candidates, strict=True)
    model = noise_free(skills, speeds, most=most)
    plan = HALVING if halving else Plan(RUNGS[-1:], 3, smallest=8)
    found = run_search(model.settings, model, plan, Goal(0))
    assert len(model.calls) <= most
    assert len(set(model.calls)) == len(model.calls)
    for i in range(len(skills)):
        own = [(first, stop) for j, first, stop in model.calls if j == i]
        assert all(a[1] == b[0] for a, b in pairwise(own)) and (not own or own[0][0] == 0)
        measured = found.measured[i]
        assert (measured.problems if measured else 0) == (own[-1][1] if own else 0)
    assert found.compared and all(e.problems == found.problems for e in found.comparable())
    finished = found.problems == RUNGS[-1] and len(model.calls) <= most
    assert found.spent or finished


def test_a_budget_that_ends_within_a_pass_leaves_the_problems_that_all_have_done():
    model = noise_free([8, 6, 4], [1, 2, 3], most=5)
    found = run_search(model.settings, model, Plan((24,), 3, smallest=8), Goal(0))
    assert found.spent and found.problems == 8 and found.compared == [0, 1, 2]
    assert found.measured[0].problems == 16
    model = noise_free([8, 6, 4], [1, 2, 3], most=2)
    found = run_search(model.settings, model, Plan((24,), 3, smallest=8), Goal(0))
    assert found.spent and found.compared == [0, 1] and found.measured[2] is None


def test_all_settings_take_turns_on_a_few_problems():
    model = noise_free([8, 6], [1, 2])
    run_search(model.settings, model, Plan((24,), 3, smallest=8), Goal(0))
    assert model.calls == [(i, n, n + 8) for n in (0, 8, 16) for i in (0, 1)]


# A budget of seconds


class Clock(Model):
    """Stops where its seconds are spent, after a first look at every setting, as the command does.
    spent: seconds so far, by the speeds."""

    def __init__(self, right, speeds, seconds, look):
        super().__init__(right, speeds)
        self.seconds, self.look, self.spent = seconds, look, 0.0

    def left(self):
        return self.seconds - self.spent

    def __call__(self, setting, first, stop):
        if stop > self.look and self.left() <= 0:
            return None
        found = super().__call__(setting, first, stop)
        self.spent += float(found.seconds.sum())
        return found


def budgeted(skills, speeds, seconds, plan, goal=Goal(12.5)):  # noqa: B008 (frozen)
    right = noise_free(skills, speeds).right
    clock = Clock(right, speeds, seconds, plan.look)
    return clock, run_search(clock.settings, clock, plan, goal, seconds_left=clock.left)


def test_a_budget_buys_a_look_at_every_setting_then_more_of_the_promising_ones():
    """Twenty settings of a second a problem; the look takes 80 s, and 150 s are there."""
    skills, speeds = [8, 8, 7, *[2] * 17], [10.0] * 20
    plan = make_plan("halving", 20, 200, eta=3, batch_size=1)
    clock, found = budgeted(skills, speeds, 150, plan)
    assert all(e is not None and e.problems >= 4 for e in found.measured)
    first = found.cuts[0]
    assert (first.problems, first.settings, first.fitted) == (4, 20, True)
    assert 2 <= first.kept < 20 and set(found.compared) <= set(range(3))
    assert found.problems > 4 and found.spent
    assert clock.spent <= 150 + plan.smallest  # of which the last pass is the only excess


def test_a_budget_that_a_look_takes_up_chooses_among_all():
    plan = make_plan("halving", 20, 200, eta=3, batch_size=1)
    _, found = budgeted([8] * 20, [10.0] * 20, 5, plan)
    assert found.spent and found.problems == 4 and found.compared == list(range(20))
    assert not found.cuts


def test_more_seconds_than_are_needed_change_nothing():
    plan = make_plan("halving", 12, 200, eta=3, batch_size=1)
    skills, speeds = [8, 7, 6] * 4, [float(1 + i) for i in range(12)]
    _, much = budgeted(skills, speeds, 1e9, plan)
    plain = noise_free(skills, speeds)
    free = run_search(plain.settings, plain, plan, Goal(12.5))
    assert (much.compared, much.cuts) == (free.compared, free.cuts)
    assert much.problems == free.problems == 200 and not much.spent


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9)), min_size=1, max_size=25),
    st.floats(0.1, 3000),
    st.booleans(),
)
def test_any_budget(candidates, seconds, halving):
    skills, speeds = zip(*candidates, strict=True)
    search = "halving" if halving else "grid"
    plan = make_plan(search, len(skills), 200, eta=3, batch_size=1)
    clock, found = budgeted(skills, speeds, seconds, plan)
    assert all(e is not None and e.problems >= plan.look for e in found.measured)
    assert all(e.problems == found.problems >= plan.look for e in found.comparable())
    assert found.compared
    slowest = max(e.seconds_per_problem for e in found.measured)
    look = sum(e.first(plan.look).seconds.sum() for e in found.measured)
    assert clock.spent <= max(look, seconds + slowest * 2 * plan.smallest) + 1e-6
    if not halving:
        assert found.compared == list(range(len(skills))) and not found.cuts
    assert len(set(clock.calls)) == len(clock.calls)


def test_a_larger_budget_measures_nothing_twice():
    """Passes are the same whatever the budget, so what a ledger has serves again."""
    plan = make_plan("halving", 20, 200, eta=3, batch_size=1)
    skills, speeds = [8, 8, 7, *[2] * 17], [10.0] * 20
    small, _ = budgeted(skills, speeds, 150, plan)
    for clock, _ in (budgeted(skills, speeds, s, plan) for s in (400, 1e9)):
        places = {}
        for i, first, stop in {*small.calls, *clock.calls}:
            assert places.setdefault((i, first), stop) == stop
    free = noise_free(skills, speeds)
    run_search(free.settings, free, plan, Goal(12.5))
    assert {c for c in free.calls if c[1] < 23} == {(i, a, b) for i in range(20)
            for a, b in ((0, 4), (4, 8), (8, 16), (16, 23))}  # fmt: skip


# Plans


def test_plans():
    assert make_plan("grid", 20, 200, eta=3, batch_size=1).rungs == (200,)
    assert make_plan("halving", 20, 200, eta=3, batch_size=1).rungs == (23, 67, 200)
    assert make_plan("halving", 3, 200, eta=3, batch_size=1).rungs == (67, 200)
    assert make_plan("halving", 1, 200, eta=3, batch_size=1).rungs == (200,)
    assert make_plan("halving", 20, 30, eta=3, batch_size=1).rungs == (30,)
    assert make_plan("halving", 20, 200, eta=3, batch_size=16) == Plan((67, 200), 3, 64, 16)
    assert make_plan("halving", 20, 200, eta=3, batch_size=1).look == 4
    assert make_plan("halving", 20, 3, eta=3, batch_size=1).look == 3
    assert make_plan("grid", 20, 200, eta=3, batch_size=1) == Plan((200,), 3, 20, 4, halving=False)


@given(st.integers(0, 50), st.integers(1, 300), st.integers(1, 60))
def test_passes_cover_everything_once(low, length, smallest):
    found = passes(low, low + length, smallest)
    assert found[0][0] == low and found[-1][1] == low + length
    assert all(a[1] == b[0] for a, b in pairwise(found))
    assert all(stop - first >= min(smallest, length) for first, stop in found)
    begun = passes(low, low + length, smallest, 4)
    assert begun[0][0] == low and begun[-1][1] == low + length
    assert all(a[1] == b[0] and b[1] > b[0] for a, b in pairwise(begun))
    if not low and min(smallest, length) > 4:
        assert begun[0] == (0, 4)
