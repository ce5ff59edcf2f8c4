"""Mask noise: the ratios the papers state, and draws that depend on the seed and sample only."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f import noise

lengths = st.integers(1, 100)
sizes = st.integers(1, 40)
seeds = st.integers(0, 2**32)
bounds = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)


def by_block(ratios, size):
    """One ratio a block; fails where a block has several."""
    blocks = [ratios[i : i + size] for i in range(0, len(ratios), size)]
    assert all((block == block[0]).all() for block in blocks)
    return np.array([block[0] for block in blocks])


@given(lengths, sizes, bounds, seeds)
def test_monotone_ratios_never_decrease_and_keep_their_bounds(length, size, bounds, seed):
    low, high = bounds
    ratios = noise.monotone_ratios(length, size, low, high, noise.sample_rng(seed, 0))
    blocks = by_block(ratios, size)
    assert len(ratios) == length
    assert (np.diff(blocks) >= 0).all()
    assert blocks[0] >= low
    assert blocks[-1] <= high


@given(lengths, sizes, seeds)
def test_monotone_ratios_are_the_official_recursion(length, size, seed):
    """p_1 = 0.2 + 0.5 u; p_b = p_(b-1) + u_b (0.7 - p_1) / (N - 1)."""
    ratios = noise.monotone_ratios(length, size, 0.2, 0.7, np.random.default_rng(seed))
    blocks = by_block(ratios, size)
    u = np.random.default_rng(seed)
    want = [0.2 + 0.5 * u.random()]
    for _ in blocks[1:]:
        want.append(want[-1] + u.random() * (0.7 - want[0]) / (len(blocks) - 1))
    assert blocks == pytest.approx(want, rel=1e-12)


@given(lengths, st.integers(0, 20), sizes, st.floats(0, 1))
def test_decoding_ratios_are_a_state_of_blockwise_decoding(length, start, size, ratio):
    ratios = noise.decoding_ratios(length, start, start + size, ratio).tolist()
    assert ratios == ([0.0] * start + [ratio] * size + [1.0] * length)[:length]


@given(lengths, sizes, bounds, seeds)
def test_pipeline_ratios_are_revealed_then_active_then_fresh_blocks(length, size, bounds, seed):
    low, high = bounds
    ratios = noise.pipeline_ratios(length, size, low, high, noise.sample_rng(seed, 0))
    blocks = by_block(ratios, size)
    assert (np.diff(blocks) >= 0).all()
    assert all(p in (0.0, 1.0) or low <= p <= high for p in blocks)
    assert blocks.min() < 1.0 or high == 1.0, "at least one block is active"


@given(lengths, sizes, seeds, st.integers(1, 4))
def test_a_pipeline_has_no_more_active_blocks_than_allowed(length, size, seed, most):
    rng = noise.sample_rng(seed, 0)
    blocks = by_block(noise.pipeline_ratios(length, size, 0.3, 0.7, rng, most), size)
    assert 1 <= ((blocks > 0) & (blocks < 1)).sum() <= most


def test_the_pipelined_schedule_reaches_every_block():
    """No block is left out of the pipelined schedule."""
    draws = [noise.sample_rng(0, i) for i in range(200)]
    pipelines = [noise.pipeline_ratios(20, 5, 0.3, 0.7, rng) for rng in draws]
    assert {int((p == 0).sum()) for p in pipelines} == {0, 5, 10, 15}
    assert {int((p == 1).sum()) for p in pipelines} == {0, 5, 10, 15}


@given(lengths, seeds)
def test_mask_never_takes_ratio_zero_and_always_takes_ratio_one(length, seed):
    rng = noise.sample_rng(seed, 0)
    assert not noise.draw_mask(np.zeros(length), rng).any()
    assert noise.draw_mask(np.ones(length), rng).all()


def test_mask_rate_is_the_ratio():
    """100,000 draws a ratio: within five standard deviations."""
    n = 100_000
    for i, ratio in enumerate((0.05, 0.2, 0.5, 0.7, 0.95)):
        rate = noise.draw_mask(np.full(n, ratio), noise.sample_rng(1, i)).mean()
        assert abs(rate - ratio) < 5 * (ratio * (1 - ratio) / n) ** 0.5


@given(seeds, st.integers(0, 10**6))
def test_a_draw_depends_on_seed_and_sample_alone(seed, index):
    """What makes a loss curve independent of process count and of a resume."""
    first = noise.sample_rng(seed, index).random(4)
    assert (noise.sample_rng(seed, index).random(4) == first).all()
    assert (noise.sample_rng(seed, index + 1).random(4) != first).any()
    assert (noise.sample_rng(seed + 1, index).random(4) != first).any()
    assert noise.even_draw(seed, index) == noise.even_draw(seed, index)


@given(seeds, st.integers(0, 10**6), st.integers(2, 300))
def test_even_draws_leave_no_wide_gap(seed, first, count):
    """Any run of consecutive samples covers [0, 1): no gap of two mean spacings."""
    points = np.sort([noise.even_draw(seed, first + i) for i in range(count)])
    gaps = np.diff([*points, points[0] + 1])
    assert points[0] >= 0
    assert points[-1] < 1
    assert gaps.max() < 2 / count


@given(st.lists(st.booleans(), max_size=80), st.integers(0, 60), st.floats(0.01, 1))
def test_context_weights_are_dreams_matrix(masked, prompt, p):
    """As Dream's code computes them: a matrix of all places by all places, over the revealed."""
    length = prompt + len(masked)
    hidden = np.array([False] * prompt + masked, dtype=bool)
    distance = np.abs(np.subtract.outer(np.arange(length), np.arange(length)))
    matrix = 0.5 * p * (1 - p) ** np.maximum(distance - 1, 0) * (distance > 0)
    wanted = np.where(hidden, matrix @ ~hidden, 0.0)[prompt:]
    found = noise.context_weights(np.array(masked, dtype=bool), prompt, p)
    assert found == pytest.approx(wanted, abs=1e-12)
