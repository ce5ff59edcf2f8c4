"""D2F(lossless=...) gives the plain pipeline's tokens in no more forwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import pipelines as drawn_pipelines
from tiny import random_model, tokenizer

import d2f
import decode
from d2f.errors import InputError
from decode.decoders.d2f_lossless import LosslessSession
from decode.engine.engine import Engine
from decode.engine.request import Request
from decode.step import Predictions, Step

GOLDEN = Path(__file__).parent / "golden"
MODEL = {family: random_model(family, 0) for family in ("llada", "dream")}

models = st.builds(random_model, st.sampled_from(["llada", "dream"]), st.integers(0, 3))
prompts = st.lists(st.integers(2, len(tokenizer()) - 1), min_size=1, max_size=15)
pipelines = drawn_pipelines(
    tau_conf=st.sampled_from([0.05, 0.15, 0.3, 0.9, 1.0]),
    early_exit=st.booleans(),
    lossless=st.sampled_from([1, 2, 4, 8]),
)


@settings(max_examples=40)
@given(models, st.lists(st.tuples(prompts, pipelines), min_size=1, max_size=4), st.integers(1, 4))
def test_it_equals_the_plain_pipeline_in_no_more_forwards(model, requests, batch_size):
    asked = [prompt for prompt, _ in requests]
    chosen = [decoder for _, decoder in requests]
    plain = decode.generate(model, asked, [replace(d, lossless=None) for d in chosen])
    drafted = decode.generate(model, asked, chosen, batch_size=batch_size)
    for expected, result, decoder in zip(plain, drafted, chosen, strict=True):
        assert result.raw_tokens == expected.raw_tokens
        assert result.tokens == expected.tokens
        assert result.finish_reason == expected.finish_reason
        assert result.forwards == expected.forwards - result.counts["accepted"]
        assert result.counts["accepted"] <= result.counts["drafted"]
        if decoder.lossless == 1:
            assert result.calls == expected.calls


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_it_gives_the_official_tokens_and_saves_forwards(family):
    model = d2f.load(GOLDEN / f"{family}-tiny")
    traces = json.loads((GOLDEN / f"{family}-tiny" / "d2f.json").read_text())["cases"]
    names = ("block_size", "tau_add", "tau_act", "tau_conf", "max_new_tokens")
    results = decode.generate(
        model,
        [case["prompt"] for case in traces],
        [
            decode.D2F(**{name: case[name] for name in names}, early_exit=False, lossless=4)
            for case in traces
        ],
    )
    for case, result in zip(traces, results, strict=True):
        assert result.raw_tokens == case["output"]
        assert result.forwards <= case["forwards"]
    assert sum(r.forwards for r in results) < sum(case["forwards"] for case in traces)


@settings(max_examples=25)
@given(models, prompts, pipelines)
def test_what_is_cached_is_final_and_was_fed_with_its_final_tokens(model, prompt, decoder):
    """Leading slots that a step calls cached hold no mask and were last written from the tokens
    that stand there; a branch writes only scratch slots, and sees each position once."""
    request = Request(0, prompt, decoder, model.contract, None)
    session = request.session
    assert isinstance(session, LosslessSession)
    own = len(session.x)
    engine = Engine(model, batch_size=1, slots=session.slots)
    engine.submit(request)
    position_in, token_in = {}, {}
    while not request.done:
        step = request.next_step
        assert step is not None
        assert step.slots.max() < session.slots
        assert len(step.slots) == len(set(step.slots.tolist()))
        assert not session.masked[: step.cached].any()
        assert all(token_in[slot] == session.x[slot] for slot in range(step.cached))
        for slot, position, token in zip(step.slots, step.positions, step.tokens, strict=True):
            assert slot >= own or slot == position
            position_in[slot], token_in[slot] = position, token
        for ranges in step.spans:
            seen = [slot for pair in ranges for slot in range(*pair)]
            assert sorted(position_in[slot] for slot in seen) == list(range(len(seen)))
        engine.advance()


def scripted(step: Step, shift: int) -> Predictions:
    """Predictions that do not depend on the state and are never sure: later positions have less
    confidence, but also less entropy."""
    positions = step.positions[step.read] + shift
    confidence = (0.5 - positions / 1000).astype(np.float32)
    return Predictions(positions + 5, confidence, entropy=confidence, margin=1 - confidence)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("pick", ["confidence", "entropy", "margin"])
def test_where_every_draft_holds_a_forward_takes_d_steps_of_the_pipeline(family, pick):
    """Blocks of 6, one forced token a step: the first forward has no drafts. The draft that
    completes a block opens the next one in its branch, whose predictions then draft further."""
    decoder = decode.D2F(
        6, tau_add=1.0, tau_act=1.0, max_new_tokens=12, lossless=3, forced_pick=pick
    )
    session = decoder.begin([7, 8], MODEL[family].contract)
    taken = []
    while (step := session.step()) is not None:
        session.accept(scripted(step, session.contract.logit_shift))
        taken.append(len(session.revealed))
    assert taken == [1, 3, 3, 3, 2]
    assert session.tokens == [p + 5 for p in range(2, 14)]
    assert session.counts["drafted"] == session.counts["accepted"] == 7


def test_a_state_that_the_pipeline_does_not_reach_is_not_taken():
    """The draft reveals one token; the pipeline, surer now, reveals two."""
    decoder = decode.D2F(4, tau_conf=0.5, max_new_tokens=4, lossless=2)
    session = decoder.begin([7], MODEL["llada"].contract)
    step = session.step()
    session.accept(Predictions(np.full(4, 9), np.array([0.9, 0.4, 0.3, 0.2], np.float32)))
    step = session.step()
    assert len(step.read) == 3 + 2  # the state with 3 masks, the draft with 2
    found = np.array([0.9, 0.9, 0.2, 0.9, 0.9], np.float32)
    session.accept(Predictions(np.full(5, 9), found))
    assert session.view(1, 5) == (9, 9, 9, None)
    assert (session.counts["drafted"], session.counts["accepted"]) == (1, 0)


BAD = [
    ({"lossless": 0}, "lossless must be a whole number of at least 1, got 0"),
    ({"lossless": 1.5}, "lossless"),
    ({"lossless": True}, "lossless"),
    ({"lossless": 4, "temperature": 1.0}, r"lossless needs temperature 0.*got 1\.0"),
    (
        {"lossless": 4, "revoke": "commit"},
        "expected lossless or revoke, got lossless 4 and revoke 'commit'",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_a_bad_option_is_named_with_what_came(options, message):
    with pytest.raises(InputError, match=message):
        decode.D2F(**options)
