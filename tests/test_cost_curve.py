"""What a forward is expected to cost, from forwards whose times scatter."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from decode.engine.cost_curve import CostCurve, non_negative


def of_a_machine(rows, requests):
    """Flat to 32 rows, then rising, with something for each request."""
    return 0.003 + 0.00008 * requests + 0.00005 * np.maximum(rows - 32.0, 0.0)


def curve_of_a_machine(forwards, load):
    """What was learned of it from random forwards that scatter, some far off, under `load`, what
    they take times at each forward."""
    curve, draws = CostCurve(), np.random.default_rng(3)
    for i in range(forwards):
        requests = int(draws.choice([1, 2, 4, 8, 16, 32, 64]))
        rows = requests * int(draws.integers(1, 13))
        far_off = 4.0 if draws.random() < 0.03 else 1.0
        times = load(i) * float(draws.lognormal(sigma=0.15)) * far_off
        curve.note(rows, requests, float(of_a_machine(rows, requests)) * times)
    return curve


@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_a_curve_is_found_through_noise_and_other_work(slow):
    """Other work that makes all forwards slower for a third of the time changes the present load,
    and not what one forward costs beside another."""
    curve = curve_of_a_machine(3000, lambda i: slow if i // 100 % 3 == 0 else 1.0)
    for requests in (1, 8, 64):
        rows = requests * np.array([1.0, 2.0, 4.0, 8.0, 12.0])
        found = curve.seconds(rows, requests)
        expected = of_a_machine(rows, requests)
        np.testing.assert_allclose(found / found[0], expected / expected[0], rtol=0.12)


def test_a_curve_has_the_load_of_the_moment():
    quiet = curve_of_a_machine(1000, lambda i: 1.0)
    loaded = curve_of_a_machine(1000, lambda i: 1.0 if i < 900 else 2.0)
    rows = np.array([16.0, 128.0])
    np.testing.assert_allclose(loaded.seconds(rows, 4) / quiet.seconds(rows, 4), 2.0, rtol=0.15)


def test_times_that_are_often_a_little_longer_do_not_make_the_load_drift():
    """What was seen first, and not again for long, is still held against the rest."""
    curve, draws = CostCurve(), np.random.default_rng(5)
    for i in range(4000):
        rows = 16 if i < 50 else 256
        scatter = 1.0 + float(draws.exponential(0.3))
        curve.note(rows, 1, float(of_a_machine(rows, 1)) * scatter)
    found, expected = curve.seconds(np.array([16.0, 256.0]), 1), of_a_machine(256.0, 1) * 1.2
    assert found[1] == pytest.approx(expected, rel=0.15)
    assert found[0] / found[1] == pytest.approx(
        float(of_a_machine(16, 1) / of_a_machine(256, 1)), rel=0.3
    )


def test_what_nothing_is_known_of_is_supposed_to_cost_as_its_rows_and_32():
    curve = CostCurve()
    rows = np.array([1.0, 32.0, 128.0])
    assert curve.seconds(rows, 1).tolist() == pytest.approx([33 / 32, 2.0, 5.0])
    for _ in range(3):
        curve.note(32, 1, 0.002)
    assert curve.seconds(rows, 1).tolist() == pytest.approx([0.00103, 0.002, 0.005], rel=0.02)


@example({(1, 1): 1.0, (513, 1): 0.03125, (519, 2): 1.0}, 1)
@given(
    st.dictionaries(
        st.tuples(st.integers(1, 4000), st.integers(1, 64)), st.floats(1e-4, 1), max_size=12
    ),
    st.integers(1, 64),
)
def test_more_rows_never_seem_cheaper_nor_cheaper_than_those_before(times, requests):
    curve = CostCurve()
    for (rows, of), seconds in times.items():
        curve.note(rows, of, seconds)
    found = curve.seconds(np.arange(1.0, 5000.0, 7), requests)
    assert (found > 0).all()
    assert (np.diff(found) >= -1e-12).all()
    assert (np.diff(found, 2) >= -1e-12).all()


@given(st.integers(0, 9999), st.integers(1, 5))
def test_non_negative_comes_near_to_what_scipy_finds(seed, terms):
    optimize = pytest.importorskip("scipy.optimize")
    draws = np.random.default_rng(seed)
    lines, wanted = draws.random((12, terms)) + np.eye(12, terms), draws.normal(size=12)
    found = non_negative(lines.T @ lines, lines.T @ wanted, np.ones(terms))
    assert (found >= 0).all()
    _, best = optimize.nnls(lines, wanted)
    assert np.linalg.norm(lines @ found - wanted) <= 1.01 * best + 1e-9
