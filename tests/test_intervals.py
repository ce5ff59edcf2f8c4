"""Intervals of shares: none is narrower than so few problems allow."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from decode.report import Z95, paired, wilson

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


@st.composite
def tables(draw):
    count = draw(st.integers(1, 800))
    gained = draw(st.integers(0, count))
    return gained, draw(st.integers(0, count - gained)), count


@given(tables())
def test_a_paired_interval_holds_the_difference_and_has_a_width(table):
    gained, lost, count = table
    low, high = paired(*table)
    assert -1 <= low < high <= 1
    assert low - 1e-12 <= (gained - lost) / count <= high + 1e-12
    assert paired(lost, gained, count) == (-high, -low)


@given(tables())
def test_its_limits_are_where_the_score_test_begins_to_reject(table):
    """The statistic with the share of `lost` found as the likelihood's maximum on a fine grid."""
    gained, lost, count = table
    same = count - gained - lost
    for limit in paired(*table):
        if abs(limit) > 0.999:
            continue
        q = np.linspace(max(0, -limit), (1 - limit) / 2, 200_001)[1:-1]
        likelihood = same * np.log(1 - 2 * q - limit)
        likelihood += gained * np.log(q + limit) + lost * np.log(q)
        best = q[likelihood.argmax()]
        spread = math.sqrt(count * (2 * best + limit * (1 - limit)))
        assert abs(gained - lost - count * limit) / spread == pytest.approx(Z95, rel=2e-3)


def test_published_paired_interval():
    """Airway measurements of 21 children before and after a transplantation, in Fagerland, Lydersen
    and Laake (2014), cells 1, 1, 7, 12: -0.517 to -0.026."""
    assert paired(1, 7, 21) == pytest.approx((-0.517, -0.026), abs=5e-4)
    for count in (1, 20, 500):  # where no pair differs
        half = Z95**2 / (count + Z95**2)
        assert paired(0, 0, count) == pytest.approx((-half, half))


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_that_of_scipy(case):
    low, high = wilson(*case)
    expected = binomtest(*case).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-8)
    assert 0 <= low < high <= 1


@pytest.mark.parametrize("report", sorted(RESULTS.glob("*/report.md")), ids=lambda p: p.parent.name)
def test_no_committed_report_claims_to_know_a_difference_exactly(report):
    found = re.findall(r"95 % ([+-][0-9.]+) to ([+-][0-9.]+)", report.read_text())
    assert all(low != high for low, high in found)
