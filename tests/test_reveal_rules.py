"""The rules that say which tokens a step reveals, on made-up predictions without a model; and the
options of the decoders that have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import decode
from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.unmask import bounded, sure, sure_together
from decode.step import Predictions

CONTRACT = Contract(
    family="llada",
    mask_id=1,
    end_ids=(0,),
    logit_shift=0,
    rope_fp32=True,
    prompt_rule="bidirectional",
)
RULED = (decode.Threshold, decode.Factor, decode.EntropyBounded)
BLOCKWISE = (decode.Static, *RULED)

# Sixty-fourths, with many ties: every sum below is exact.
parts = st.integers(0, 64).map(lambda n: n / 64)
confidences = st.lists(parts, min_size=1, max_size=12).map(lambda v: np.array(v, np.float32))
entropies = st.lists(st.integers(0, 256).map(lambda n: n / 64), min_size=1, max_size=12)
bounds = st.integers(0, 512).map(lambda n: n / 64)


def first_best(values: np.ndarray) -> int:
    return max(range(len(values)), key=lambda i: (values[i], -i))


@given(confidences, parts)
def test_the_threshold_takes_the_surest_and_all_that_reach_tau(confidence, tau):
    expected = {i for i, c in enumerate(confidence) if c >= tau} | {first_best(confidence)}
    assert set(sure(confidence, tau)) == expected


@given(confidences, st.floats(1.0, 2.0, exclude_min=True))
def test_a_threshold_above_1_takes_the_surest_alone_even_where_all_are_certain(confidence, tau):
    assert sure(confidence, tau).tolist() == [first_best(confidence)]


@given(confidences, parts, parts)
def test_a_smaller_tau_takes_no_less(confidence, tau, other):
    assert set(sure(confidence, max(tau, other))) <= set(sure(confidence, min(tau, other)))


@given(confidences, bounds)
def test_the_factor_takes_the_longest_prefix_of_the_ranking_that_passes(confidence, factor):
    ranked = sorted(range(len(confidence)), key=lambda i: -confidence[i])
    count = 1
    while count < len(ranked) and confidence[ranked[count]] >= 1 - factor / (count + 2):
        count += 1
    assert sure_together(confidence, factor).tolist() == ranked[:count]


@given(confidences, bounds, bounds)
def test_a_larger_factor_takes_no_less(confidence, factor, other):
    few, many = (sure_together(confidence, f).tolist() for f in sorted((factor, other)))
    assert many[: len(few)] == few


@given(confidences)
def test_factor_0_takes_one_token_but_for_certain_ones(confidence):
    certain = np.flatnonzero(confidence == 1).tolist()
    assert sure_together(confidence, 0.0).tolist() == (certain or [first_best(confidence)])


def test_the_last_rank_must_pass_like_any_other():
    """The official code reveals it too where only it fails."""
    assert sure_together(np.array([0.99, 0.01, 0.99], np.float32), 1.0).tolist() == [0, 2]


@given(entropies, bounds, st.data())
def test_the_bound_takes_the_longest_prefix_of_any_order(entropy, gamma, data):
    """Brute force over all prefixes; the longest is found by counting since the bounded sum never
    falls."""
    h = np.array(entropy, np.float32)
    order = data.draw(st.permutations(range(len(h))))
    error = np.empty(len(h), np.float32)
    error[order] = np.arange(len(h))
    sums = [sum(h[order[:n]]) - max(h[order[:n]]) for n in range(1, len(h) + 1)]
    assert sums == sorted(sums)
    count = max(n for n, value in enumerate(sums, 1) if value <= gamma)
    assert bounded(h, error, gamma).tolist() == order[:count]


@given(entropies, bounds, bounds)
def test_a_larger_gamma_takes_no_less(entropy, gamma, other):
    h = np.array(entropy, np.float32)
    few, many = (bounded(h, h, g).tolist() for g in sorted((gamma, other)))
    assert many[: len(few)] == few


@given(entropies)
def test_gamma_0_takes_one_token_and_those_without_entropy(entropy):
    h = np.array(entropy, np.float32)
    zeros = int((h == 0).sum())
    assert len(bounded(h, h, 0.0)) == min(zeros + 1, len(h))


def test_of_equal_errors_the_first_comes_first():
    h = np.array([1.0, 0.5, 0.5], np.float32)
    assert bounded(h, h, 0.0).tolist() == [1]
    assert sure_together(h, 0.0).tolist() == [0]
    assert sure(np.array([0.5, 0.5], np.float32), 0.9).tolist() == [0]


def test_an_entropy_just_below_0_is_0():
    """Rounding in fp32 must not make room for another token."""
    h = np.array([-1e-6, -1e-6, 0.25, 0.25], np.float32)
    assert bounded(h, h, 0.0).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("proxy", "first"), [("entropy", [0]), ("confidence", [1]), ("margin", [2])]
)
def test_the_proxy_says_what_the_entropy_bound_sorts_by(proxy, first):
    session = decode.EntropyBounded(gamma=0.0, proxy=proxy, max_new_tokens=3).begin([5], CONTRACT)
    step = session.step()
    assert step.uncertainty
    values = ([0.1, 0.9, 0.2], [1.0, 2.0, 3.0], [0.1, 0.2, 0.9])
    confidence, entropy, margin = (np.array(v, np.float32) for v in values)
    session.accept(Predictions(np.array([7, 8, 9]), confidence, entropy=entropy, margin=margin))
    assert [revealed.position for revealed in session.revealed] == first


def test_only_the_current_block_is_revealed_and_only_masked_positions_are_read():
    session = decode.Threshold(tau=0.5, block_size=4, max_new_tokens=8).begin([5, 6], CONTRACT)
    step = session.step()
    assert (step.read.tolist(), step.uncertainty) == ([2, 3, 4, 5], False)
    confidence = np.array([0.1, 0.5, 0.4, 0.9], np.float32)
    session.accept(Predictions(np.array([7, 8, 9, 10]), confidence))
    assert [block.tokens for block in session.blocks()] == [(None, 8, None, 10), (None,) * 4]
    assert session.step().read.tolist() == [2, 4]
    assert [block.state for block in session.blocks()] == ["fully active", "waiting"]
    session.accept(Predictions(np.array([7, 9]), np.array([0.9, 0.9], np.float32)))
    session.step()
    assert [block.state for block in session.blocks()] == ["decoded", "fully active"]


def test_blocks_are_those_of_the_paper_by_default():
    for kind in RULED:
        assert kind().block_size == 32
        assert kind(block_size=None, max_new_tokens=70).size == 70
    assert (decode.Threshold().tau, decode.Factor().factor) == (0.9, 1.0)
    assert (decode.EntropyBounded().gamma, decode.EntropyBounded().proxy) == (0.1, "entropy")


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "high", True, None])
@pytest.mark.parametrize(
    ("kind", "name"),
    [(decode.Threshold, "tau"), (decode.Factor, "factor"), (decode.EntropyBounded, "gamma")],
)
def test_a_number_out_of_range_is_named_with_what_came(kind, name, value):
    with pytest.raises(InputError, match=f"{name} must be a finite number of at least 0, got"):
        kind(**{name: value})


@pytest.mark.parametrize("kind", BLOCKWISE)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "both"}, "cache must be one of none, prefix, dual, got 'both'"),
        ({"cache": None}, "cache must be one of none, prefix, dual, got None"),
        ({"block_size": 0}, "block_size must be a whole number of at least 1, got 0"),
        ({"block_size": float("nan")}, "block_size must be a whole number of at least 1, got nan"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number of at least 1, got 2.5"),
        ({"early_exit": 1}, "early_exit must be true or false, got 1"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, got nan"),
    ],
)
def test_a_bad_option_of_all_blockwise_decoders_is_named(kind, options, message):
    with pytest.raises(InputError, match=message):
        kind(**options)


def test_an_unknown_proxy_is_named():
    with pytest.raises(InputError, match="proxy must be one of entropy, confidence, margin, got"):
        decode.EntropyBounded(proxy="neg_entropy")


@pytest.mark.parametrize("kind", BLOCKWISE)
def test_a_causal_family_is_refused_with_the_decoder_to_take(kind):
    wedlm = replace(CONTRACT, family="wedlm", prompt_rule="causal")
    with pytest.raises(InputError, match=f"{kind.name} .* wedlm is causal: take wedlm"):
        kind().check(wedlm)
    causal = replace(wedlm, family="causal", mask_id=None)
    with pytest.raises(InputError, match=f"{kind.name} .* causal has none: take autoregressive"):
        kind().check(causal)
    kind().check(CONTRACT)
