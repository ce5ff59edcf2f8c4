"""Decoders that take tokens back, WINO and D2F with its check: within their bounds, settled text
never changes, and the shadow is that of the paper."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shadows import (
    CONTRACT,
    END,
    MASK,
    MASKS,
    SHIFTED,
    check_step,
    model_with,
    random_answer,
    shallow_model,
    spans_as_mask,
    told,
)
from test_decode_reference import revoking, winos
from tiny import random_model

import decode
from decode.decoders.d2f import D2FSession


@settings(max_examples=60)
@given(
    winos | revoking,
    st.sampled_from([CONTRACT, SHIFTED]),
    st.sampled_from(MASKS),
    st.integers(0, 99),
)
def test_it_ends_whatever_the_model_says_and_never_changes_what_is_settled(
    decoder, contract, mask, seed
):
    """Random predictions: the bounds hold, cached spans hold no mask and never change, nor does
    shown text, and shadows stay in their scratch slots."""
    wino, total = decoder.name == "wino", decoder.max_new_tokens
    session = decoder.begin([5, 6, 7], replace(contract, **(mask if wino else {})))
    answer = random_answer(np.random.default_rng(seed))
    forwards: Counter[int] = Counter()
    shown: list[int] = []
    while (step := session.step()) is not None:
        check_step(session, step)
        forwards[session.block if wino else 0] += 1
        if wino:  # a block takes at most its length in forwards
            assert forwards[session.block] <= session.end - session.start
        else:
            assert forwards[0] <= (total if decoder.revoke == "always" else 3 * total + 1)
        session.accept(answer(step))
        assert session.settled[: len(shown)] == shown
        shown = session.settled
        assert MASK not in shown
    if END not in shown:
        assert len(shown) == total


@settings(max_examples=25)
@given(revoking, st.integers(0, 99))
def test_a_shadow_that_agrees_leaves_the_pipeline_as_it_is(decoder, seed):
    """Every forward decides what the plain pipeline decides; `commit` adds at most one that
    verifies the last block. The predictions never end the response."""
    rng = np.random.default_rng(seed)
    decoder = replace(decoder, early_exit=False)
    checked = decoder.begin([5, 6], CONTRACT)
    plain = replace(decoder, revoke=None).begin([5, 6], CONTRACT)
    while (step := plain.step()) is not None:
        other = checked.step()
        assert other.cached == step.cached or decoder.revoke == "commit"
        confidence = rng.random(len(plain.wanted)).tolist()
        plain.accept(told(step, confidence))
        checked.accept(told(other, confidence, [1.0] * (len(other.read) - len(confidence))))
        assert np.array_equal(checked.x, plain.x)
    last = checked.step()
    if last is not None:
        assert decoder.revoke == "commit"
        checked.accept(told(last, [], [1.0] * len(last.read)))
    assert checked.step() is None


@pytest.mark.parametrize("tau1", [0.3, 0.0])
@given(seed=st.integers(0, 30))
@settings(max_examples=10)
def test_winos_shadow_that_agrees_is_draft_only_and_tau2_0_feeds_none(tau1, seed):
    decoder = decode.Wino(6, 14, tau1=tau1, tau2=0.9, early_exit=False)
    sessions = [one.begin([5, 6], CONTRACT) for one in (decoder, replace(decoder, tau2=0.0))]
    rng = np.random.default_rng(seed)
    while (steps := [s.step() for s in sessions])[0] is not None:
        assert steps[1].queried_tokens is None and len(steps[1].tokens) == 16
        confidence = rng.random(len(sessions[1].wanted)).tolist()
        for session, step in zip(sessions, steps, strict=True):
            session.accept(told(step, confidence, [1.0] * (len(step.read) - len(confidence))))
        assert np.array_equal(sessions[0].x, sessions[1].x)
    assert steps[1] is None


def test_the_pipelines_of_these_tests_do_take_tokens_back():
    """With tau_revoke 0 none does: it is the plain pipeline, without shadows."""
    for mode in ("always", "commit"):
        plain = decode.D2F(revoke=mode, tau_revoke=0.0).begin([5], CONTRACT)
        assert type(plain) is D2FSession
        decoder = decode.D2F(8, 0.1, 0.95, 0.1, 40, revoke=mode, tau_revoke=0.5)
        for family in ("llada", "dream"):
            found = decode.generate(random_model(family), [[5, 9], [7, 30, 12]], decoder)
            assert all(result.counts["revoked"] > 5 for result in found)
            assert all(result.counts["revoked_changed"] > 0 for result in found)


def start(mode, **options):
    options = {"block_size": 4, "tau_add": 1.0, "tau_conf": 0.5, "max_new_tokens": 8} | options
    return decode.D2F(revoke=mode, **options).begin([5, 6], CONTRACT)


def test_a_block_that_waits_for_the_one_before_is_still_verified():
    session = start("always", tau_add=0.0, max_new_tokens=8)
    session.accept(told(session.step(), [0.9, 0.1, 0.1, 0.1]))
    session.accept(told(session.step(), [0.1] * 3 + [0.9] * 4))
    assert [b.state for b in session.blocks()] == ["fully active", "semi-active"]
    step = session.step()
    assert step.queried_tokens[2:].tolist() == [9] * 4
    session.accept(told(step, [0.1] * 2, [0.1, 1.0, 1.0, 1.0]))
    assert session.blocks()[1].tokens == (None, 9, 9, 9)


def test_an_end_that_is_taken_back_ends_nothing():
    """While it stands no block is appended; when it is gone the next one is."""
    session = start("commit")
    session.accept(told(session.step(), [0.9, 0.9, 0.9, 0.1], token=END))
    session.accept(told(session.step(), [0.9]))
    step = session.step()
    assert step is not None and len(session.blocks()) == 1  # decided, but not verified
    session.accept(told(step, [], [0.1, 0.1, 0.1, 1.0]))
    while None in session.blocks()[0].tokens:
        step = session.step()
        assert len(session.blocks()) == 1
        count = len(session.wanted)
        session.accept(told(step, [0.9] * count, [0.0] * (len(step.read) - count)))
    assert session.step() is not None and len(session.blocks()) == 2
    assert END not in session.settled


def wino(size, contract=CONTRACT, **options):
    options = {"tau1": 0.5, "tau2": 0.9, "max_new_tokens": 9} | options
    return decode.Wino(size, **options).begin([5, 6], contract)


def test_winos_early_exit_waits_until_an_end_can_no_longer_be_taken_back():
    session = wino(4, max_new_tokens=8)
    session.accept(told(session.step(), [0.8, 0.8, 0.1, 0.1], token=END))
    assert session.settled == []
    step = session.step()
    assert step is not None and step.queried_tokens[2:].tolist() == [END, END]
    session.accept(told(step, [0.8, 0.8], [0.1, 1.0]))
    assert session.counts["revoked_changed"] == 0
    session.accept(told(session.step(), [0.8], token=8))
    assert session.step() is None and session.settled == [8, END, 9, 9]
    assert session.counts == {"drafted": 5, "revoked": 1, "revoked_changed": 1}
    session = wino(4, max_new_tokens=8, tau2=0.0)
    session.accept(told(session.step(), [0.8, 0.8, 0.1, 0.1], token=END))
    assert session.step() is None and session.settled == [END, END]


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_cache_policy_is_exact_where_rows_do_not_look_on(family, mask):
    """With one layer a row's keys depend on its own token, so stale rows are right; under an
    aligned block-causal mask nothing is stale."""
    model = model_with(random_model(family) if mask else shallow_model(family), **mask)
    requests = [[7, 30, 31, 40], [8, 9, 41, 42], [99, 98, 97, 3]]  # whole blocks, if absolute
    size = 8 if "prompt_rule" in mask else 6
    decoder = decode.Wino(size, 20, tau1=0.1, tau2=0.9, caps=False, early_exit=False)
    found = [
        decode.generate(model, requests, replace(decoder, cache=cache))
        for cache in ("none", "prefix", "dual")
    ]
    assert sum(result.counts["revoked"] for result in found[0]) > 5
    for exact, prefix, dual in zip(*found, strict=True):
        assert exact.raw_tokens == prefix.raw_tokens == dual.raw_tokens
        assert exact.forwards == prefix.forwards == dual.forwards


@pytest.mark.parametrize("contract", [CONTRACT, SHIFTED])
def test_with_leakage_a_shadow_sees_the_token_that_it_verifies_and_nothing_else_more(contract):
    seen = []
    for leakage in (False, True):
        session = wino(4, contract, leakage=leakage)
        session.accept(told(session.step(), [0.9, 0.9, 0.1, 0.1]))
        step = session.step()
        seen.append(spans_as_mask(step.spans, session.slots)[step.read[2:]])
    blind, leaking = seen
    more = leaking & ~blind
    assert not (blind & ~leaking).any()
    assert [np.flatnonzero(row).tolist() for row in more] == [[2], [3]]
