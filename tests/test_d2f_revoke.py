"""D2F's pipeline with WINO's check: cached as uncached, within its bounds, and the plain pipeline
where the check finds nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import pipelines as drawn_pipelines
from shadows import (
    CONTRACT,
    END,
    MASK,
    SHIFTED,
    check_step,
    models,
    prompts,
    random_answer,
    sampling,
    spans_as_mask,
    told,
)
from tiny import random_model

import decode
from d2f.errors import InputError
from tests.references.d2f_revoke import decode_d2f_revoking

MODES = ["always", "commit"]
pipelines = drawn_pipelines(
    sampling=sampling,
    tau_conf=st.sampled_from([0.05, 0.1, 0.2, 0.9]),
    early_exit=st.booleans(),
    revoke=st.sampled_from(MODES),
    tau_revoke=st.sampled_from([0.05, 0.2, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 9),
)


def visible(model, raw):
    kept = []
    for token in raw:
        if token is None or token in model.end_ids:
            break
        kept.append(token)
    return kept


@settings(max_examples=40)
@given(models, st.lists(st.tuples(prompts, pipelines), min_size=1, max_size=4), st.integers(1, 4))
def test_the_engine_equals_the_reference(model, requests, batch_size):
    results = decode.generate(
        model, [p for p, _ in requests], [d for _, d in requests], batch_size=batch_size
    )
    for (prompt, decoder), result in zip(requests, results, strict=True):
        raw, forwards = decode_d2f_revoking(model, prompt, decoder)
        assert result.raw_tokens == [token for token in raw if token is not None]
        assert result.tokens == visible(model, raw)
        assert result.forwards == forwards
        assert result.counts["drafted"] - result.counts["revoked"] == len(result.raw_tokens)


def test_the_pipelines_of_these_tests_do_take_tokens_back():
    for mode in MODES:
        decoder = decode.D2F(
            8, tau_add=0.1, tau_conf=0.1, revoke=mode, tau_revoke=0.5, max_new_tokens=40
        )
        for family in ("llada", "dream"):
            found = decode.generate(random_model(family), [[5, 9], [7, 30, 12]], decoder)
            assert all(result.counts["revoked"] > 5 for result in found)
            assert all(result.counts["revoked_changed"] > 0 for result in found)


@settings(max_examples=60)
@given(pipelines, st.sampled_from([CONTRACT, SHIFTED]), st.integers(0, 99))
def test_it_ends_whatever_the_model_says_and_never_changes_what_is_settled(decoder, contract, seed):
    """Random predictions: the bounds hold, cached spans hold no mask and never change, nor does
    shown text, and shadows stay in their scratch slots."""
    session = decoder.begin([5, 6, 7], contract)
    answer = random_answer(np.random.default_rng(seed))
    always, total = decoder.revoke == "always", decoder.max_new_tokens
    forwards, fixed = 0, session.x[:3].copy()
    while (step := session.step()) is not None:
        check_step(session, step)
        forwards += 1
        assert forwards <= (total if always else 3 * total + 1)
        session.accept(answer(step))
        settled = session.x[: session.settled_end]
        assert np.array_equal(settled[: len(fixed)], fixed)
        assert MASK not in settled
        fixed = settled.copy()
    if END not in session.settled:
        assert len(session.settled) == total


@settings(max_examples=30)
@given(models, prompts, pipelines)
def test_early_exit_never_changes_the_visible_tokens(model, prompt, decoder):
    """Sampled too: until the end is final, both do the same forwards."""
    early, late = (
        decode.generate(model, [prompt], replace(decoder, early_exit=exit_))[0]
        for exit_ in (True, False)
    )
    assert early.tokens == late.tokens
    assert early.forwards <= late.forwards


@settings(max_examples=15)
@given(models, prompts, pipelines)
def test_tau_revoke_0_is_the_plain_pipeline(model, prompt, decoder):
    plain, none = (
        decode.generate(model, [prompt], replace(decoder, revoke=mode, tau_revoke=0.0))[0]
        for mode in (None, decoder.revoke)
    )
    assert none.raw_tokens == plain.raw_tokens
    assert none.calls == plain.calls


@settings(max_examples=25)
@given(pipelines, st.integers(0, 99))
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


def start(mode, **options):
    options = {"block_size": 4, "tau_add": 1.0, "tau_conf": 0.5, "max_new_tokens": 8} | options
    return decode.D2F(revoke=mode, **options).begin([5, 6], CONTRACT)


def test_always_takes_back_less_than_the_last_deciding_forward_decided():
    session = start("always")
    session.accept(told(session.step(), [0.9, 0.9, 0.9, 0.1]))
    step = session.step()  # the prompt is cached: the block's four rows, then its shadow's
    assert step.read.tolist() == [3, 4, 5, 6]  # the mask, and the shadow of the three decided
    session.accept(told(step, [0.1], [0.3, 0.1, 0.2]))  # the block is whole, then loses two
    assert session.blocks()[0].tokens == (9, None, None, 9)
    assert session.settled == []
    step = session.step()
    assert step.queried_tokens is None  # one was decided: nothing to spare
    session.accept(told(step, [0.9, 0.9], token=8))
    assert session.settled == [9, 8, 8, 9]
    counts = {"drafted": 6, "revoked": 2, "revoked_changed": 2}
    assert session.counts == counts | {"active_blocks": 3}


def test_a_block_that_waits_for_the_one_before_is_still_verified():
    session = start("always", tau_add=0.0, max_new_tokens=8)
    session.accept(told(session.step(), [0.9, 0.1, 0.1, 0.1]))
    session.accept(told(session.step(), [0.1] * 3 + [0.9] * 4))
    assert [b.state for b in session.blocks()] == ["fully active", "semi-active"]
    step = session.step()
    assert step.queried_tokens[2:].tolist() == [9] * 4
    session.accept(told(step, [0.1] * 2, [0.1, 1.0, 1.0, 1.0]))
    assert session.blocks()[1].tokens == (None, 9, 9, 9)


def test_commit_verifies_a_block_once_more_and_caches_nothing_after_one_refused():
    session = start("commit", tau_add=0.0)
    session.accept(told(session.step(), [0.9, 0.9, 0.9, 0.1]))
    session.accept(told(session.step(), [0.9] + [0.9] * 4))
    assert [b.state for b in session.blocks()] == ["to cache", "to cache"]
    step = session.step()
    assert len(step.queried_tokens) == 8
    session.accept(told(step, [], [1.0, 0.1, 1.0, 1.0] + [0.1] * 4))
    assert [b.state for b in session.blocks()] == ["fully active", "fully active"]
    assert session.blocks()[0].tokens == (9, None, 9, 9)
    assert session.blocks()[1].tokens == (9,) * 4  # verified when its turn comes
    session.accept(told(session.step(), [0.9], token=8))
    step = session.step()
    assert len(step.queried_tokens) == 3 + 4 and step.cached == 2  # what was taken back once stays
    session.accept(told(step, [], [1.0] * 7))
    assert session.step() is None
    assert session.settled == [9, 8, 9, 9, 9, 9, 9, 9]


@pytest.mark.parametrize("mode", MODES)
def test_an_end_that_is_taken_back_ends_nothing(mode):
    """While it stands no block is appended; when it is gone the next one is."""
    session = start(mode, max_new_tokens=8)
    session.accept(told(session.step(), [0.9, 0.9, 0.9, 0.1], token=END))
    step = session.step()
    if mode == "always":
        session.accept(told(step, [0.9], [1.0, 0.1, 0.2]))
    else:
        session.accept(told(step, [0.9]))
        session.accept(told(session.step(), [], [0.1, 0.1, 0.1, 1.0]))
    while None in session.blocks()[0].tokens:
        step = session.step()
        assert len(session.blocks()) == 1
        named = [0.0] * (len(step.read) - len(session.wanted))
        session.accept(told(step, [0.9] * len(session.wanted), named))
    if mode == "always":  # the first of the ends was held by the bound
        assert session.settled[0] == END and session.step() is None
    else:
        step = session.step()
        assert session.settled == [] or END not in session.settled
        assert len(session.blocks()) == 2 and step is not None


def test_early_exit_waits_until_the_end_is_final():
    session = start("commit")
    session.accept(told(session.step(), [0.9] * 4, token=END))
    step = session.step()
    assert step is not None  # decided, but not verified
    assert step.queried_tokens.tolist() == [END] * 4
    session.accept(told(step, [], [1.0] * 4))
    assert session.step() is None and session.settled == [END] * 4


@pytest.mark.parametrize("blocks", [[0], [0, 1]])
def test_the_shadows_are_those_of_the_masks_as_spans(blocks):
    session = start("always", tau_add=0.0, max_new_tokens=7)
    session.accept(told(session.step(), [0.9, 0.9, 0.1, 0.1]))
    if blocks == [0]:
        step = session.step()
    else:
        step = session.step()
        session.accept(told(step, [0.9, 0.1, 0.9, 0.9, 0.1], [1.0, 1.0]))
        session.pipeline[1].full = session.pipeline[2].full = True
        session.spare.update({2: 5, 6: 5})
        step = session.step()
    found = spans_as_mask(step.spans, session.slots)
    ends = [2, 2, 6, 6, 6, 6, 9, 9, 9]  # prompt of 2, blocks of 4 and 3
    counterparts = [p for p in range(9) for block in blocks if ends[p] == (6, 9)[block]]
    truth = np.zeros((9 + len(counterparts), 9 + 4 + 3), dtype=bool)
    for row, position in enumerate([*range(9), *counterparts]):
        truth[row, : ends[position]] = True
        if row >= 9:  # a shadow: not its counterpart, but its own shadow block
            truth[row, position] = False
            truth[row, slice(9, 13) if ends[position] == 6 else slice(13, 16)] = True
    assert np.array_equal(found, truth[step.positions[0] :])


BAD = [
    ({"revoke": "never"}, "revoke must be one of always, commit, got 'never'"),
    ({"revoke": True}, "revoke must be one of always, commit, got True"),
    ({"revoke": "always", "tau_revoke": 1.5}, r"tau_revoke must lie in \[0, 1\], got 1.5"),
    ({"revoke": "commit", "tau_revoke": -0.1}, "tau_revoke"),
    ({"revoke": "commit", "tau_revoke": float("nan")}, "tau_revoke"),
    ({"tau_revoke": "high"}, "tau_revoke"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_a_bad_option_is_named_with_what_came(options, message):
    with pytest.raises(InputError, match=message):
        decode.D2F(**options)
