"""What a forward is expected to cost, from forwards whose times scatter."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from decode.engine.cost_curve import CostCurve, non_negative


def of_a_machine(rows, reads, requests):
    """Flat to 32 rows, then rising, with something for each request and each row that is read."""
    beyond = np.maximum(rows - 32.0, 0.0)
    return 0.003 + 0.00008 * requests + 0.00003 * beyond + 0.00004 * reads


def curve_of_a_machine(forwards, load):
    """What was learned of it from random forwards that scatter, some far off, under `load`, what
    they take times at each forward."""
    curve, draws = CostCurve(), np.random.default_rng(3)
    for i in range(forwards):
        requests = int(draws.choice([1, 2, 4, 8, 16, 32, 64]))
        reads = requests * int(draws.integers(1, 13))
        rows = reads + int(draws.choice([0, 0, 0, 20, 100, 300]))  # prompts, of requests that begin
        far_off = 4.0 if draws.random() < 0.03 else 1.0
        times = load(i) * float(draws.lognormal(sigma=0.15)) * far_off
        curve.note(rows, reads, requests, float(of_a_machine(rows, reads, requests)) * times)
    return curve


def all_read(*rows):
    """`rows` of which each is read."""
    return np.array([rows, rows], dtype=np.float64)


@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_a_curve_is_found_through_noise_and_other_work(slow):
    """Other work that makes all forwards slower for a third of the time changes the present load,
    and not what one forward costs beside another."""
    curve = curve_of_a_machine(3000, lambda i: slow if i // 100 % 3 == 0 else 1.0)
    for requests in (1, 8, 64):
        rows = requests * all_read(1, 2, 4, 8, 12)
        found = curve.seconds(rows, requests)
        expected = of_a_machine(*rows, requests)
        np.testing.assert_allclose(found / found[0], expected / expected[0], rtol=0.12)


def test_rows_that_are_not_read_are_found_to_cost_less():
    """As a prompt's, but for its last: what a width costs is told apart from what prompts cost."""
    curve = curve_of_a_machine(3000, lambda i: 1.0)
    few, all_, prompt = curve.seconds(np.array([[80.0, 280.0, 280.0], [80.0, 280.0, 80.0]]), 16)
    expected = of_a_machine(np.array([80.0, 280.0, 280.0]), np.array([80.0, 280.0, 80.0]), 16)
    assert (all_ - few) / (prompt - few) == pytest.approx(7 / 3, rel=0.25)
    np.testing.assert_allclose([all_ / few, prompt / few], expected[1:] / expected[0], rtol=0.12)


def test_a_curve_has_the_load_of_the_moment():
    quiet = curve_of_a_machine(1000, lambda i: 1.0)
    loaded = curve_of_a_machine(1000, lambda i: 1.0 if i < 900 else 2.0)
    rows = all_read(16, 128)
    np.testing.assert_allclose(loaded.seconds(rows, 4) / quiet.seconds(rows, 4), 2.0, rtol=0.15)


def test_times_that_are_often_a_little_longer_do_not_make_the_load_drift():
    """What was seen first, and not again for long, is still held against the rest."""
    curve, draws = CostCurve(), np.random.default_rng(5)
    for i in range(4000):
        rows = 16 if i < 50 else 256
        scatter = 1.0 + float(draws.exponential(0.3))
        curve.note(rows, rows, 1, float(of_a_machine(rows, rows, 1)) * scatter)
    found, expected = curve.seconds(all_read(16, 256), 1), of_a_machine(256, 256, 1) * 1.2
    assert found[1] == pytest.approx(expected, rel=0.15)
    assert found[0] / found[1] == pytest.approx(
        float(of_a_machine(16, 16, 1) / of_a_machine(256, 256, 1)), rel=0.3
    )


def test_what_nothing_is_known_of_is_supposed_to_cost_as_its_rows_and_32():
    curve = CostCurve()
    rows = all_read(1, 32, 128)
    assert curve.seconds(rows, 1).tolist() == pytest.approx([33 / 32, 2.0, 5.0])
    for _ in range(3):
        curve.note(32, 32, 1, 0.002)
    assert curve.seconds(rows, 1).tolist() == pytest.approx([0.00103, 0.002, 0.005], rel=0.02)


@example({(1, 0.0, 1): 1.0, (513, 0.0, 1): 0.03125, (519, 1.0, 2): 1.0}, 1, 1.0)
@given(
    st.dictionaries(
        st.tuples(st.integers(1, 4000), st.floats(0, 1), st.integers(1, 64)),
        st.floats(1e-4, 1),
        max_size=12,
    ),
    st.integers(1, 64),
    st.floats(0, 1),
)
def test_more_rows_never_seem_cheaper_nor_cheaper_than_those_before(times, requests, share):
    curve = CostCurve()
    for (rows, read, of), seconds in times.items():
        curve.note(rows, int(read * rows), of, seconds)
    rows = np.arange(1.0, 5000.0, 7)
    found = curve.seconds(np.stack([rows, share * rows]), requests)
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
