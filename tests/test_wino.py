"""WINO: as the official code, as the plain reference, and its invariants."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shadows import (
    CONTRACT,
    END,
    MASK,
    MASKS,
    SHIFTED,
    check_step,
    model_with,
    models,
    prompts,
    random_answer,
    sampling,
    shallow_model,
    spans_as_mask,
    told,
)
from tiny import random_model

import decode
from d2f.attention import SpanPlan
from d2f.errors import InputError
from tests.references.wino import decode_wino

GOLDEN = Path(__file__).parent / "golden"
thresholds = st.sampled_from([(0.05, 0.3), (0.1, 0.9), (0.1, 0.3), (0.0, 1.0), (0.2, 0.0)])
winos = st.builds(
    lambda taus, chosen, **options: decode.Wino(tau1=taus[0], tau2=taus[1], **options, **chosen),
    thresholds,
    sampling,
    block_size=st.one_of(st.sampled_from([None, 1, 4, 8, 16]), st.integers(1, 64)),
    max_new_tokens=st.integers(1, 26),
    caps=st.booleans(),
    early_exit=st.booleans(),
    seed=st.integers(0, 9),
)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_wino_gives_the_official_tokens_and_forwards(llada, batch_size):
    traces = json.loads((GOLDEN / "llada-tiny" / "wino.json").read_text())["cases"]
    assert len(traces) == 24
    decoders = [
        decode.Wino(
            tau1=case["tau1"],
            tau2=case["tau2"],
            block_size=case["block_length"],
            max_new_tokens=case["gen_length"],
            early_exit=False,
        )
        for case in traces
    ]
    results = decode.generate(llada, [c["prompt"] for c in traces], decoders, batch_size=batch_size)
    for case, result in zip(traces, results, strict=True):
        assert result.raw_tokens == case["output"]
        assert result.forwards == case["forwards"]
    assert sum(result.counts["revoked"] for result in results) > 100


@settings(max_examples=40)
@given(models, st.lists(st.tuples(prompts, winos), min_size=1, max_size=4), st.integers(1, 4))
def test_the_engine_equals_the_reference(model, requests, batch_size):
    results = decode.generate(
        model, [p for p, _ in requests], [d for _, d in requests], batch_size=batch_size
    )
    for (prompt, decoder), result in zip(requests, results, strict=True):
        raw, forwards = decode_wino(model, prompt, decoder)
        assert result.raw_tokens == [token for token in raw if token is not None]
        assert result.forwards == forwards
        assert result.counts["drafted"] - result.counts["revoked"] == len(result.raw_tokens)
        assert result.counts["revoked_changed"] <= result.counts["revoked"]


@settings(max_examples=60)
@given(winos, st.sampled_from([CONTRACT, SHIFTED]), st.sampled_from(MASKS), st.integers(0, 99))
def test_a_block_takes_at_most_its_length_in_forwards_whatever_the_model_says(
    decoder, contract, mask, seed
):
    """Shown text never changes, and every step keeps shadows apart, under random predictions."""
    session = decoder.begin([5, 6, 7], replace(contract, **mask))
    answer = random_answer(np.random.default_rng(seed))
    forwards: Counter[int] = Counter()
    shown: list[int] = []
    while (step := session.step()) is not None:
        check_step(session, step)
        forwards[session.block] += 1
        assert forwards[session.block] <= session.end - session.start
        session.accept(answer(step))
        assert session.settled[: len(shown)] == shown
        shown = session.settled
    if not any(token in (END,) for token in shown):
        assert len(shown) == decoder.max_new_tokens


@settings(max_examples=20)
@given(models, prompts, winos)
def test_early_exit_never_changes_the_visible_tokens(model, prompt, decoder):
    early, late = (
        decode.generate(model, [prompt], replace(decoder, early_exit=exit_))[0]
        for exit_ in (True, False)
    )
    assert early.tokens == late.tokens
    assert early.forwards <= late.forwards


def test_early_exit_waits_until_an_end_can_no_longer_be_taken_back():
    options = {"tau1": 0.5, "tau2": 0.9, "block_size": 4, "max_new_tokens": 8}
    session = decode.Wino(**options).begin([5], CONTRACT)
    session.accept(told(session.step(), [0.8, 0.8, 0.1, 0.1], token=END))
    assert session.settled == []
    step = session.step()
    assert step is not None and step.queried_tokens[2:].tolist() == [END, END]
    session.accept(told(step, [0.8, 0.8], [0.1, 1.0]))
    session.accept(told(session.step(), [0.8]))
    assert session.step() is None and session.settled == [9, END, 9, 9]
    session = decode.Wino(**options | {"tau2": 0.0}).begin([5], CONTRACT)
    session.accept(told(session.step(), [0.8, 0.8, 0.1, 0.1], token=END))
    assert session.step() is None and session.settled == [END, END]


def test_a_forward_takes_back_fewer_than_the_one_before_decided():
    """The bounds of the official code: the least likely first, none where one token is drafted."""
    session = decode.Wino(tau1=0.5, tau2=0.9, block_size=8).begin([5], CONTRACT)
    session.accept(told(session.step(), [0.9] * 3 + [0.1] * 5))
    session.accept(told(session.step(), [0.9, 0.9] + [0.1] * 3, [0.3, 0.1, 0.2], token=8))
    assert session.blocks()[0].tokens == (9, None, None, 8, 8, None, None, None)
    step = session.step()  # positions 1, 2, 5, 6, 7 masked
    session.accept(told(step, [0.1] * 4 + [0.9], [0.1, 0.1, 0.1], token=7))
    assert session.blocks()[0].tokens == (9, None, None, 8, 8, None, None, 7)
    step = session.step()  # the forward before decided one token: none can be taken back
    assert len(step.tokens) == len(session.x) and step.queried_tokens is None
    session.accept(told(step, [0.9, 0.2, 0.2, 0.2], token=9))
    assert session.counts == {"drafted": 7, "revoked": 2, "revoked_changed": 0}


def test_a_revocation_counts_as_changed_by_what_stands_there_now():
    session = decode.Wino(tau1=0.5, tau2=0.9, block_size=4, max_new_tokens=4).begin([5], CONTRACT)
    session.accept(told(session.step(), [0.9, 0.9, 0.1, 0.1]))
    session.accept(told(session.step(), [0.9, 0.9], [0.1, 1.0]))
    assert session.counts["revoked_changed"] == 0
    session.accept(told(session.step(), [0.9], token=8))
    assert session.counts == {"drafted": 5, "revoked": 1, "revoked_changed": 1}


def test_a_forward_drafts_at_most_seven_tenths_within_5_and_20():
    for block, most in ((4, 4), (10, 7), (64, 20)):
        options = {"tau1": 0.5, "block_size": block, "max_new_tokens": 64}
        session = decode.Wino(**options).begin([5], CONTRACT)
        session.accept(told(session.step(), np.linspace(0.6, 0.9, block).tolist()))
        decided = np.flatnonzero(~session.masked[1 : block + 1])
        assert decided.tolist() == list(range(block - most, block))
        session = decode.Wino(**options, caps=False).begin([5], CONTRACT)
        session.accept(told(session.step(), [0.6] * block))
        assert not session.masked[1 : block + 1].any()


def test_the_paper_rule_takes_back_all_but_one_a_forward():
    options = {"tau1": 0.5, "tau2": 0.9, "block_size": 8, "caps": False}
    session = decode.Wino(**options).begin([5], CONTRACT)
    session.accept(told(session.step(), [0.9] * 4 + [0.1] * 4))
    session.accept(told(session.step(), [0.1] * 4, [0.4, 0.1, 0.2, 0.3]))  # 5 decided, 2 stay
    assert session.blocks()[0].tokens == (9, None, None, None, 9, None, None, None)


@pytest.mark.parametrize("taus", [(0.3, 0.9), (0.0, 0.5)])
@given(seed=st.integers(0, 30))
@settings(max_examples=10)
def test_a_shadow_that_always_agrees_is_draft_only_and_tau2_0_feeds_none(taus, seed):
    sure, free = (
        decode.Wino(tau1=taus[0], tau2=tau2, block_size=6, max_new_tokens=14, early_exit=False)
        for tau2 in (taus[1], 0.0)
    )
    sessions = [decoder.begin([5, 6], CONTRACT) for decoder in (sure, free)]
    rng = np.random.default_rng(seed)
    while (steps := [s.step() for s in sessions])[0] is not None:
        assert steps[1].queried_tokens is None and len(steps[1].tokens) == 16
        confidence = rng.random(len(sessions[1].wanted)).tolist()
        for session, step in zip(sessions, steps, strict=True):
            session.accept(told(step, confidence, [1.0] * (len(step.read) - len(confidence))))
        assert np.array_equal(sessions[0].x, sessions[1].x)
    assert steps[1] is None


def test_without_verification_and_with_tau1_1_one_token_is_decided_a_forward(llada):
    prompt, options = [5, 9, 12], {"block_size": 8, "max_new_tokens": 16, "early_exit": False}
    wino, static = decode.Wino(tau1=1.0, tau2=0.0, **options), decode.Static(**options)
    found, truth = (decode.generate(llada, [prompt], d)[0] for d in (wino, static))
    assert found.raw_tokens == truth.raw_tokens
    assert found.forwards == truth.forwards == 16


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_cache_policy_is_exact_where_rows_do_not_look_on(family, mask):
    """With one layer a row's keys depend on its own token, so stale rows are right; under an
    aligned block-causal mask nothing is stale."""
    block_size = 8 if "prompt_rule" in mask else 6
    model = model_with(shallow_model(family), **mask)
    if mask:
        model = model_with(random_model(family), **mask)
    requests = [[7, 30, 31, 40], [8, 9, 41, 42], [99, 98, 97, 3]]  # whole blocks, if absolute
    decoder = decode.Wino(
        tau1=0.1,
        tau2=0.9,
        block_size=block_size,
        max_new_tokens=20,
        caps=False,
        early_exit=False,
    )
    found = [
        decode.generate(model, requests, replace(decoder, cache=cache))
        for cache in ("none", "prefix", "dual")
    ]
    assert sum(result.counts["revoked"] for result in found[0]) > 5
    for exact, prefix, dual in zip(*found, strict=True):
        assert exact.raw_tokens == prefix.raw_tokens == dual.raw_tokens
        assert exact.forwards == prefix.forwards == dual.forwards


@pytest.mark.parametrize("contract", [CONTRACT, SHIFTED])
@pytest.mark.parametrize("mask", MASKS)
def test_what_is_settled_is_fed_no_longer_exactly_where_nothing_undecided_is_seen(contract, mask):
    decoder = decode.Wino(tau1=0.5, tau2=0.9, block_size=4, max_new_tokens=12)
    session = decoder.begin([5, 6, 7, 8], replace(contract, **mask))
    cached = []
    while (step := session.step()) is not None:
        cached.append(step.cached)
        session.accept(told(step, [0.9] * len(session.wanted)))
    assert cached[0] == 0
    assert (cached[-1] == 0) == (not mask)


def test_the_shadow_is_that_of_the_paper():
    """A row of the sequence sees the sequence; one of the shadow all but its counterpart, the
    shadow included. The one scratch slot of the frame, 11, is seen by none."""
    session = decode.Wino(tau1=0.5, tau2=0.9, block_size=4, max_new_tokens=9).begin(
        [5, 6], CONTRACT
    )
    session.accept(told(session.step(), [0.9, 0.9, 0.1, 0.1]))
    step = session.step()
    found = spans_as_mask(step.spans, session.slots)
    truth = np.ones((15, 16), dtype=bool)
    truth[:11, 11:] = False
    truth[:, 11] = False
    truth[[11, 12, 13, 14], [2, 3, 4, 5]] = False
    assert np.array_equal(found, truth)
    assert step.positions.tolist() == [*range(11), 2, 3, 4, 5]
    assert step.read.tolist() == [4, 5, 11, 12] and step.queried_tokens[2:].tolist() == [9, 9]


def test_a_shifted_family_reads_copies_of_the_rows_before():
    decoder = decode.Wino(tau1=0.5, tau2=0.9, block_size=4, max_new_tokens=6)
    session = decoder.begin([5, 6], SHIFTED)
    session.accept(told(session.step(), [0.9, 0.9, 0.1, 0.1]))
    step = session.step()  # positions 2 and 3 are decided; scratch slots from 9 on
    assert step.tokens[8:].tolist() == [6, MASK, 9, MASK]
    assert step.positions[8:].tolist() == [1, 2, 2, 3]
    assert step.slots[8:].tolist() == [9, 10, 11, 12]
    assert step.read.tolist() == [3, 4, 8, 10]
    seen = [np.flatnonzero(row).tolist() for row in spans_as_mask(step.spans, session.slots)[8:]]
    assert seen[0] == seen[1] == [0, 3, 4, 5, 6, 7, 9, 10]
    assert seen[2] == seen[3] == [0, 1, 4, 5, 6, 7, 11, 12]


def test_a_shifted_family_needs_no_mask_where_the_row_before_does_not_see_the_position():
    student = replace(SHIFTED, objective="d2f", block_size=4)
    decoder = decode.Wino(tau1=0.5, tau2=0.9, block_size=4, max_new_tokens=6)
    session = decoder.begin([5, 6], student)
    session.accept(told(session.step(), [0.9, 0.9, 0.1, 0.1]))
    step = session.step()
    assert step.tokens[-3:].tolist() == [6, 9, MASK]
    seen = [np.flatnonzero(row).tolist() for row in spans_as_mask(step.spans, session.slots)[-3:]]
    assert seen == [[0, 9], [0, 1, 4, 5, 11, 12], [0, 1, 4, 5, 11, 12]]


@pytest.mark.parametrize("contract", [CONTRACT, SHIFTED])
def test_with_leakage_a_shadow_sees_the_token_that_it_verifies_and_nothing_else_more(contract):
    seen = []
    for leakage in (False, True):
        decoder = decode.Wino(tau1=0.5, tau2=0.9, block_size=4, max_new_tokens=9, leakage=leakage)
        session = decoder.begin([5, 6], contract)
        session.accept(told(session.step(), [0.9, 0.9, 0.1, 0.1]))
        step = session.step()
        read = step.read[2:]  # the shadows of positions 2 and 3
        seen.append(spans_as_mask(step.spans, session.slots)[read])
    blind, leaking = seen
    more = leaking & ~blind
    assert not (blind & ~leaking).any()
    assert [np.flatnonzero(row).tolist() for row in more] == [[2], [3]]


def logits(model, session, step):
    """Logits of all rows of a first step (nothing cached), ``[T, V]``."""
    cache = model.new_cache(session.slots)
    cache.slots = torch.from_numpy(step.slots)
    plan = SpanPlan(torch.from_numpy(step.spans).to(torch.int32))
    fed = torch.from_numpy(step.tokens), torch.from_numpy(step.positions)
    with torch.inference_mode():
        return model.decode_rows(*fed, plan, cache, torch.arange(len(step.tokens)))


def verifying(model, tokens):
    """A session of one block whose first four positions hold `tokens`, and its verifying step."""
    decoder = decode.Wino(tau1=0.5, tau2=0.9, block_size=6, max_new_tokens=8)
    session = decoder.begin([20, 21, 22], model.contract)
    session.accept(told(session.step(), [0.9] * 4 + [0.1] * 2))
    session.x[3:7] = tokens
    return session, session.step()


@settings(max_examples=15)
@given(models, st.lists(st.integers(2, 299), min_size=4, max_size=4))
@example(random_model("llada"), [5, 6, 7, 8])
def test_a_shadow_changes_no_other_row(model, tokens):
    """Up to rounding: a forward of more rows may add in another order."""
    session, step = verifying(model, tokens)
    own = int((step.slots < len(session.x)).sum())
    plain = replace(
        step,
        tokens=step.tokens[:own],
        positions=step.positions[:own],
        slots=step.slots[:own],
        spans=step.spans[:own],
    )
    both = logits(model, session, step)[:own], logits(model, session, plain)
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("mask", MASKS)
def test_with_one_layer_the_shadow_does_not_know_the_token_that_it_predicts(family, mask):
    """Exactly; with two layers it learns of it from the rows between."""
    shallow, deep = (
        model_with(model, **mask) for model in (shallow_model(family), random_model(family))
    )
    for model in (shallow, deep):
        leaks = []
        for place in range(4):
            tokens, others = [30, 31, 32, 33], [30, 31, 32, 33]
            others[place] = 77
            rows = []
            for given_ in (tokens, others):
                session, step = verifying(model, given_)
                row = step.read[len(session.wanted) + place]
                rows.append(logits(model, session, step)[row])
            leaks.append(not torch.equal(*rows))
        assert not any(leaks) if model is shallow else any(leaks)


BAD = [
    ({"tau1": 0.9, "tau2": 0.9}, "tau1 must be below tau2 .* got tau1 0.9 and tau2 0.9"),
    ({"tau1": 0.9, "tau2": 0.6}, "tau1 must be below tau2"),
    ({"tau1": 1.5}, r"tau1 must lie in \[0, 1\], got 1.5"),
    ({"tau1": -0.1}, "tau1"),
    ({"tau1": "low"}, "tau1"),
    ({"tau2": float("nan")}, "tau2"),
    ({"tau2": 1.1}, "tau2"),
    ({"caps": 1}, "caps must be true or false, got 1"),
    ({"block_size": 0}, "block_size"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"cache": "some"}, "cache"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_a_bad_option_is_named_with_what_came(options, message):
    with pytest.raises(InputError, match=message):
        decode.Wino(**options)


def test_a_causal_model_is_refused():
    causal = replace(CONTRACT, family="wedlm", prompt_rule="causal")
    with pytest.raises(InputError, match="wino needs a bidirectional or block-causal model"):
        decode.Wino().check(causal)
    with pytest.raises(InputError, match="wino needs a model with a mask id"):
        decode.Wino().check(replace(causal, mask_id=None))
