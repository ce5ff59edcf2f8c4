"""Decoders as state machines, with made-up predictions and no model; and their options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import decode
from d2f.contract import OBJECTIVES, PROMPT_RULES, Contract
from d2f.errors import InputError
from decode.decoders import DECODERS, as_decoder, default_decoder
from decode.decoders.base import MOST
from decode.decoders.unmask import reveal_count
from decode.step import Predictions, Step

MASK, END = 1, 0
CONTRACT = Contract(
    family="llada",
    mask_id=MASK,
    end_ids=(END,),
    logit_shift=0,
    rope_fp32=True,
    prompt_rule="bidirectional",
)


def predictions(step: Step, confidence: float | list[float], token: int = 9) -> Predictions:
    count = len(step.read)
    values = np.full(count, confidence) if isinstance(confidence, float) else np.array(confidence)
    return Predictions(np.full(count, token), values.astype(np.float32))


def begin(decoder: decode.Decoder, prompt: list[int] | None = None, **contract):
    return decoder.begin(prompt or [5, 6, 7], replace(CONTRACT, **contract))


def states(session) -> list[str]:
    return [block.state for block in session.blocks()]


def test_the_pipeline_opens_one_block_a_forward_and_only_the_first_is_forced():
    """Block 1 starts fully active because the prompt counts as decoded; a semi-active block reveals
    nothing below tau_conf, a fully active one exactly its best."""
    session = begin(decode.D2F(4, tau_add=0.0, tau_act=1.0, tau_conf=0.9, max_new_tokens=12))
    step = session.step()
    assert states(session) == ["fully active"]
    assert (len(step.tokens), step.cached) == (7, 0)
    session.accept(predictions(step, [0.1, 0.5, 0.3, 0.5]))
    assert session.blocks()[0].tokens == (None, 9, None, None)  # ties go to the first
    step = session.step()
    assert states(session) == ["fully active", "semi-active"]
    assert (len(step.tokens), step.cached) == (8, 3)
    session.accept(predictions(step, 0.5))
    assert session.blocks()[0].tokens == (9, 9, None, None)
    assert session.blocks()[1].tokens == (None,) * 4


@pytest.mark.parametrize(("pick", "first"), [("confidence", 1), ("entropy", 2), ("margin", 0)])
def test_a_forced_pick_goes_by_its_own_score_and_the_others_by_confidence(pick, first):
    """As the official code: tau_conf is of the confidence whatever the pick goes by."""
    session = begin(decode.D2F(3, tau_conf=0.8, forced_pick=pick, max_new_tokens=3))
    step = session.step()
    assert step.uncertainty == (pick != "confidence")
    values = np.array([[0.4, 0.5, 0.3], [0.9, 0.8, 0.2], [0.3, 0.1, 0.2]], np.float32)
    session.accept(Predictions(np.full(3, 9), values[0], entropy=values[1], margin=values[2]))
    assert [r.position for r in session.revealed] == [first]
    session.step()
    values = np.array([[0.85, 0.1], [0.9, 0.1], [0.1, 0.9]], np.float32)
    session.accept(Predictions(np.full(2, 9), values[0], entropy=values[1], margin=values[2]))
    assert len(session.revealed) == 1 and session.revealed[0].confidence == np.float32(0.85)


def test_a_threshold_is_strict_for_confidence_and_inclusive_for_adding_and_activating():
    session = begin(decode.D2F(2, tau_add=0.5, tau_act=0.5, tau_conf=0.5, max_new_tokens=6))
    session.accept(predictions(session.step(), [0.5, 0.25]))  # not above 0.5: only the forced one
    assert session.blocks()[0].tokens == (9, None)
    session.step()
    assert states(session) == ["fully active", "fully active"]  # at 0.5 both happen


def test_a_finished_block_is_fed_once_more_and_then_cached():
    session = begin(decode.D2F(2, tau_add=1.0, tau_act=1.0, tau_conf=0.5, max_new_tokens=4))
    session.accept(predictions(session.step(), 0.9))
    assert states(session) == ["to cache"]
    step = session.step()
    assert (len(step.tokens), step.cached) == (4, 3)  # its two clean tokens, two new masks
    assert states(session) == ["cached", "fully active"]
    session.accept(predictions(step, 0.9))
    assert session.step() is None  # the last block is never cached


def test_an_end_stops_appending_and_early_exit_waits_for_what_is_before_it():
    session = begin(decode.D2F(4, tau_add=0.0, tau_act=0.0, tau_conf=0.5, max_new_tokens=40))
    step = session.step()
    found = Predictions(np.array([9, 9, END, 9]), np.array([0.9, 0.1, 0.9, 0.1], np.float32))
    session.accept(found)
    assert session.blocks()[0].tokens == (9, None, END, None)
    step = session.step()
    assert step is not None and len(session.blocks()) == 1
    session.accept(predictions(step, [0.4, 0.1]))
    assert session.step() is None
    assert session.settled == [9, 9, END]


def test_a_shifted_family_feeds_the_row_before_the_block_again():
    session = begin(decode.D2F(2, tau_add=1.0, max_new_tokens=4), logit_shift=1)
    step = session.step()
    assert step.read.tolist() == [2, 3]
    session.accept(predictions(step, 0.99))
    session.accept(predictions(session.step(), 0.99))
    session = begin(decode.D2F(2, tau_add=0.0, tau_conf=0.9, max_new_tokens=2), logit_shift=1)
    session.accept(predictions(session.step(), [0.1, 0.2]))
    step = session.step()  # position 3 is still masked; its row 2 is cached
    assert step.positions.tolist() == [2, 3, 4]
    assert step.cached == 3
    assert step.tokens[0] == 7
    assert step.spans[0].tolist() == [[0, 3]]


def test_the_last_block_is_short():
    session = begin(decode.D2F(4, tau_add=0.0, max_new_tokens=6))
    session.accept(predictions(session.step(), 0.1))
    session.step()
    assert [(b.start, b.end) for b in session.blocks()] == [(0, 4), (4, 6)]


@given(st.integers(1, 64), st.integers(1, 64))
def test_static_counts_are_even_and_complete(masked, steps):
    counts = [reveal_count(masked, steps, done) for done in range(min(masked, steps))]
    assert sum(counts) == masked
    assert max(counts) - min(counts) <= 1 and min(counts) > 0
    assert counts == sorted(counts, reverse=True)
    assert reveal_count(masked, steps, steps) == masked // steps


@pytest.mark.parametrize(
    ("huge", "plain"),
    [
        (decode.Block(MOST, align="prompt"), decode.Block(9, align="prompt")),
        (decode.Block(MOST, align="absolute"), decode.Block(12, align="absolute")),
        (decode.Block(MOST, MOST, align="prompt"), decode.Block(9, 9, align="prompt")),
        (decode.Static(steps=MOST), decode.Static(steps=9)),
        (decode.Threshold(MOST), decode.Threshold(None)),
        (decode.Wino(MOST), decode.Wino(9)),
        (decode.FreeDave(drafts=MOST), decode.FreeDave(drafts=9)),
        (decode.D2F(MOST), decode.D2F(9)),
        (decode.D2F(4, lossless=MOST), decode.D2F(4, lossless=10)),
        (decode.Autoregressive(top_k=MOST), decode.Autoregressive()),
    ],
)
def test_no_option_is_counted_up_to(huge, plain):
    """The largest option there is, is that of the response, at once and in as many slots."""
    sessions = [
        begin(replace(d, max_new_tokens=9, early_exit=False) if d.name != "autoregressive"
              else replace(d, max_new_tokens=9)) for d in (huge, plain)
    ]  # fmt: skip
    assert sessions[0].slots == sessions[1].slots
    for _ in range(9):
        steps = [session.step() for session in sessions]
        if steps[1] is None:
            break
        for session, step in zip(sessions, steps, strict=True):
            confidence = np.linspace(0.1, 0.95, len(step.read)).tolist()
            made = predictions(step, confidence)
            asked = step.queried_tokens is not None
            ones = np.ones(len(step.read), np.float32) if asked else None
            session.accept(replace(made, queried_probability=ones))
        assert sessions[0].tokens == sessions[1].tokens
    assert len(sessions[0].tokens) == 9


def test_the_positions_after_a_response_are_within_the_context():
    """A window of the official refill reaches past max_new_tokens."""
    from block_tiny import wedlm

    model = wedlm(False, 0)
    decoder = decode.WeDLM(window=MOST, refill="repository", max_new_tokens=9)
    with pytest.raises(InputError, match="max_new_tokens=9 and 1048575 positions after them"):
        decode.generate(model, [[5]], decoder)
    with pytest.raises(InputError, match="no room for a response"):
        decode.generate(model, [[5]], replace(decoder, max_new_tokens=None))
    decoder = decode.WeDLM(window=MOST, max_new_tokens=9)  # the paper's refill stays within
    assert decode.generate(model, [[5]], decoder)[0].tokens == (
        decode.generate(model, [[5]], replace(decoder, window=9))[0].tokens
    )


def test_static_reveals_the_most_confident_of_the_current_block_only():
    session = begin(decode.Static(block_size=3, steps=4, max_new_tokens=6))
    step = session.step()
    assert len(step.tokens) == 9 and step.read.tolist() == [3, 4, 5]
    session.accept(predictions(step, [0.2, 0.9, 0.2]))
    assert [block.tokens for block in session.blocks()] == [(9, 9, None), (None,) * 3]


def test_autoregressive_stops_at_an_end():
    session = begin(decode.Autoregressive(max_new_tokens=5), mask_id=None, prompt_rule="causal")
    session.accept(predictions(session.step(), 0.5))
    step = session.step()
    assert (step.tokens.tolist(), step.positions.tolist(), step.cached) == ([9], [3], 3)
    session.accept(predictions(step, 0.5, token=END))
    assert session.step() is None
    assert session.tokens == [9, END]


BAD = [
    ("d2f", {"tau_add": 1.5}, "tau_add"),
    ("d2f", {"tau_act": -0.1}, "tau_act"),
    ("d2f", {"tau_conf": float("nan")}, "tau_conf"),
    ("d2f", {"tau_conf": "high"}, "tau_conf"),
    ("d2f", {"block_size": 0}, "block_size"),
    ("d2f", {"block_size": 2.0}, "block_size"),
    ("d2f", {"max_new_tokens": 0}, "max_new_tokens"),
    ("static", {"block_size": 8, "max_new_tokens": 24, "steps": 8}, "multiple of the 3 blocks"),
    ("static", {"steps": 0}, "steps"),
    ("autoregressive", {"max_new_tokens": 0}, "max_new_tokens"),
    ("autoregressive", {"temperature": -1.0}, "temperature"),
    ("autoregressive", {"temperature": float("inf")}, "temperature"),
    ("autoregressive", {"top_p": 0.0}, "top_p"),
    ("autoregressive", {"top_k": 0}, "top_k"),
    ("autoregressive", {"seed": 1.5}, "seed"),
    (
        "autoregressive",
        {"seed": 2**64},
        "seed must be a whole number in .*, got 18446744073709551616",
    ),
    ("autoregressive", {"seed": -(2**63) - 1}, "seed must be a whole number in"),
    ("autoregressive", {"stop": ("",)}, "stop"),
    ("autoregressive", {"stop": 5}, "stop"),
    ("d2f", {"early_exit": "no"}, "early_exit"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_a_bad_option_is_named_with_what_came(name, options, message):
    with pytest.raises(InputError, match=message):
        DECODERS[name](**options)


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="tau_adn"):
        decode.D2F(tau_adn=0.1)


def test_a_decoder_refuses_a_model_it_cannot_decode():
    causal = replace(CONTRACT, family="causal", mask_id=None, prompt_rule="causal")
    with pytest.raises(InputError, match="d2f needs a model with a mask id"):
        decode.D2F().check(causal)
    with pytest.raises(InputError, match="autoregressive needs a causal model"):
        decode.Autoregressive().check(CONTRACT)


def test_options_come_in_the_published_order():
    decoder = decode.D2F(32, 0.1, 0.95, 0.9, 256)
    assert (decoder.block_size, decoder.tau_add, decoder.max_new_tokens) == (32, 0.1, 256)
    static = decode.Static(block_size=8, max_new_tokens=64, steps=64)
    assert (static.block_size, static.steps, static.max_new_tokens) == (8, 64, 64)
    assert decode.Autoregressive(7).max_new_tokens == 7


def test_a_type_checker_sees_every_decoder():
    """`decode.NAME` is found at run time; the imports for type checkers are written by hand."""
    source = Path(decode.__file__).read_text(encoding="utf-8")
    for kind in DECODERS.values():
        assert f"from {kind.__module__} import {kind.__name__}\n" in source
        assert kind.__name__ in decode.__all__ and getattr(decode, kind.__name__) is kind


@given(
    st.sampled_from([None, 5]),
    st.sampled_from([None, *OBJECTIVES]),
    st.sampled_from(PROMPT_RULES),
    st.sampled_from([None, 8]),
)
def test_every_model_has_one_default_decoder(mask_id, objective, prompt_rule, block_size):
    contract = replace(
        CONTRACT,
        mask_id=mask_id,
        objective=objective,
        prompt_rule=prompt_rule,
        block_size=block_size,
    )
    claiming = [kind for kind in DECODERS.values() if kind.is_default_for(contract)]
    assert [default_decoder(contract)] == claiming


@pytest.mark.parametrize(
    ("name", "objective", "expected"),
    [
        ("wedlm", "wedlm", decode.WeDLM(window=6)),
        ("wedlm", None, decode.WeDLM()),
        ("threshold", "wino_plus", decode.Threshold(6)),
        ("threshold", "d2f", decode.Threshold()),
        ("d2f", "d2f", decode.D2F(6)),
    ],
)
def test_a_decoder_by_name_has_what_follows_from_the_model(name, objective, expected):
    assert as_decoder(name, replace(CONTRACT, objective=objective, block_size=6)) == expected
