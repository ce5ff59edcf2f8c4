"""WeDLM's streaming decoding: as the official code, as its plain reference, and, verified, as
greedy autoregressive decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_tiny import sdar, student, wedlm
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_model, tokenizer

import d2f
import decode
from d2f import spans as sp
from d2f.attention import SpanPlan
from d2f.errors import InputError
from decode.engine.engine import Engine
from decode.engine.request import Request
from decode.step import Predictions, Step
from tests.references.d2f import DensePlan, decode_autoregressive
from tests.references.wedlm import decode_wedlm, streaming_mask

GOLDEN = Path(__file__).parent / "golden" / "dream-tiny"
models = st.builds(wedlm, st.booleans(), st.integers(0, 2))
prompts = st.lists(st.integers(2, len(tokenizer()) - 1), min_size=1, max_size=12)
sampling = st.sampled_from([{}, {"temperature": 0.7}, {"temperature": 2.0, "top_k": 5}])
greedy = {
    "window": st.sampled_from([1, 2, 4, 9]),
    "entropy_threshold": st.sampled_from([None, 0.0, 0.5, 1.5, 3.0]),
    "distance_penalty": st.sampled_from([0.0, 0.02, 0.5]),
    "refill": st.sampled_from(["paper", "repository"]),
    "max_new_tokens": st.integers(1, 24),
}
refills = st.sampled_from(
    [
        {"refill": "paper"},
        {"refill": "repository"},
        {"refill": "block"},
        {"refill": "block", "window_attention": "bidirectional"},
    ]
)
decoders = st.builds(
    lambda chosen, way, **options: decode.WeDLM(**(options | chosen | way)),
    sampling,
    refills,
    seed=st.integers(0, 9),
    **greedy,
)
verified = st.builds(decode.WeDLM, verify=st.just("ar"), **greedy)


def visible(tokens: list[int | None], end_ids: tuple[int, ...]) -> list[int | None]:
    ends = [i for i, token in enumerate(tokens) if token in end_ids or token is None]
    return tokens[: ends[0]] if ends else tokens


@pytest.mark.parametrize("batch_size", [1, 16])
def test_the_official_tokens_forwards_and_rows(batch_size):
    """The official loop follows a forward of the prompt alone, which is part of the first forward
    here, and ends with one that only commits, which is left out."""
    model = d2f.load(GOLDEN, family="wedlm", device="cpu")
    cases = json.loads((GOLDEN / "wedlm.json").read_text())["cases"]
    assert len(cases) == 24
    results = decode.generate(
        model,
        [case["prompt"] for case in cases],
        [
            decode.WeDLM(
                window=case["window"],
                entropy_threshold=case["entropy_threshold"],
                distance_penalty=case["pos_penalty"],
                max_new_tokens=case["max_new_tokens"],
                refill="repository",
            )
            for case in cases
        ],
        batch_size=batch_size,
    )
    for case, result in zip(cases, results, strict=True):
        official = case["output"][: case["max_new_tokens"]]
        assert result.tokens == visible(official, (2,))
        assert (result.finish_reason == "end") == (2 in official)
        assert len(result.raw_tokens) <= case["max_new_tokens"]
        (rows, cached), *later = case["calls"]
        expected = [(rows + cached, 0), *map(tuple, later[:-1])]
        assert result.calls == expected
        # The same rows but for the forward that only commits, and that of the prompt.
        assert result.counts["window_rows"] == rows + sum(fed for fed, _ in later[:-1])
        assert result.p_cache == len(result.tokens) / result.counts["window_rows"]
        assert result.forwards == case["forwards"] - 1


@settings(max_examples=40)
@given(models, st.lists(st.tuples(prompts, decoders), min_size=1, max_size=4), st.integers(1, 4))
def test_the_engine_equals_the_reference(model, requests, batch_size):
    results = decode.generate(
        model, [p for p, _ in requests], [d for _, d in requests], batch_size=batch_size
    )
    for (prompt, decoder), result in zip(requests, results, strict=True):
        raw, forwards = decode_wedlm(model, prompt, decoder)
        assert result.raw_tokens == [token for token in raw if token is not None]
        assert result.tokens == visible(raw, model.end_ids)
        assert result.forwards == forwards


@settings(max_examples=40)
@given(models, st.lists(st.tuples(prompts, verified), min_size=1, max_size=4), st.integers(1, 4))
def test_verified_is_greedy_autoregressive_in_no_more_forwards(model, requests, batch_size):
    results = decode.generate(
        model, [p for p, _ in requests], [d for _, d in requests], batch_size=batch_size
    )
    for (prompt, decoder), result in zip(requests, results, strict=True):
        plain = decode.Autoregressive(decoder.max_new_tokens)
        tokens = decode_autoregressive(model, prompt, plain)
        assert result.raw_tokens == tokens
        assert result.tokens == visible(tokens, model.end_ids)
        assert 1 <= result.forwards <= len(tokens)
        assert len(tokens) <= result.forwards + result.counts["accepted"]


def test_verified_drafts_are_accepted_and_rejected():
    """A draft that holds saves a forward, even on a model that was not trained to draft."""
    model = d2f.load(GOLDEN, family="wedlm", device="cpu")
    cases = json.loads((GOLDEN / "wedlm.json").read_text())["cases"]
    given_prompts = [case["prompt"] for case in cases]
    found = decode.generate(model, given_prompts, decode.WeDLM(max_new_tokens=32, verify="ar"))
    plain = decode.generate(model, given_prompts, decode.Autoregressive(32))
    assert [r.raw_tokens for r in found] == [r.raw_tokens for r in plain]
    assert sum(r.forwards for r in found) < sum(r.forwards for r in plain)
    assert sum(r.counts["accepted"] for r in found) > 0
    assert sum(r.counts["rejected"] for r in found) > 0


@settings(max_examples=15)
@given(models, prompts, st.integers(1, 12), st.sampled_from([0.0, 1.0]))
def test_autoregressive_decodes_a_wedlm_model_with_a_shift_of_one(
    model, prompt, length, temperature
):
    decoder = decode.Autoregressive(length, temperature=temperature)
    result = decode.generate(model, [prompt], decoder)[0]
    assert result.raw_tokens == decode_autoregressive(model, prompt, decoder)
    assert model.mask_id not in result.raw_tokens


@settings(max_examples=25)
@given(models, st.lists(st.booleans(), min_size=1, max_size=14), st.randoms(use_true_random=False))
def test_a_causal_forward_in_the_physical_order_is_the_logical_mask(model, filled, random):
    """And masks added on the right leave the earlier rows alone."""
    length = len(filled)
    tokens = [random.randrange(2, 90) if f else model.mask_id for f in filled]
    order = sorted(range(length), key=lambda p: (not filled[p], p))
    x, positions = torch.tensor([tokens]), torch.tensor([order])
    with torch.inference_mode():
        logical = model.forward(x, DensePlan(streaming_mask(filled)))[0]
        physical = model.forward(x[:, order], sp.causal(length), positions)[0]
        longer = model.forward(
            torch.tensor([[*tokens, model.mask_id, model.mask_id]]),
            DensePlan(streaming_mask([*filled, False, False])),
        )[0]
    torch.testing.assert_close(physical, logical[order], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(longer[:length], logical, atol=2e-5, rtol=1e-4)


@settings(max_examples=25)
@given(models, prompts, st.one_of(decoders, verified))
def test_what_is_committed_are_the_keys_and_values_of_a_causal_pass(model, prompt, decoder):
    request = Request(0, prompt, decoder, model.contract, None)
    engine = Engine(model, batch_size=1, slots=request.session.slots)
    engine.submit(request)
    while not request.done:
        step = request.next_step
        assert not np.isin(model.mask_id, request.session.x[: step.cached])
        assert step.slots.tolist() == list(range(step.cached, step.cached + len(step.tokens)))
        engine.advance()
    count = request.session.committed
    rows = torch.arange(count)
    plain = model.new_cache(count)
    plain.slots = rows
    with torch.inference_mode():
        tokens = torch.from_numpy(request.session.x[:count])
        model.decode_rows(tokens, rows, SpanPlan(sp.causal(count)), plain, rows[-1:])
    for ours, truth in zip(engine.cache.layers, plain.layers, strict=True):
        for mine, expected in zip(ours, truth, strict=True):
            torch.testing.assert_close(mine[:, :, :count], expected, atol=2e-5, rtol=1e-4)


def predictions(step: Step, tokens: list[int], entropy: list[float]) -> Predictions:
    assert len(step.read) == len(tokens) == len(entropy)
    values = np.array(entropy, np.float32)
    return Predictions(np.array(tokens), values, entropy=values)


CONTRACT = replace(wedlm(False, 0).contract, mask_id=1, end_ids=(0,))


def test_the_window_is_reordered_and_committed_from_the_left():
    session = decode.WeDLM(3, 0.5, 0.1, 9, refill="repository").begin([5, 6], CONTRACT)
    step = session.step()
    assert (step.tokens.tolist(), step.cached) == ([5, 6, 1, 1, 1], 0)
    assert step.read.tolist() == [2, 3, 4] and step.uncertainty
    session.accept(predictions(step, [7, 8, 9], [0.6, 0.6, 0.2]))  # 0.4 at distance 2
    assert (session.settled, session.tokens) == ([], [9])
    step = session.step()
    assert step.positions.tolist() == [4, 2, 3]
    assert step.slots.tolist() == [2, 3, 4]
    assert step.spans[:, 0].tolist() == [[0, 3], [0, 4], [0, 5]]
    session.accept(predictions(step, [7, 8], [0.5, 0.8]))  # none strictly below: the lowest
    step = session.step()
    assert step.positions.tolist() == [2, 4, 3, 5]  # one to commit, so one mask more
    assert step.cached == 2
    session.accept(predictions(step, [0, 9], [0.1, 0.5]))
    assert session.step() is None  # an end id, and all before it is known
    assert session.settled == [7, 0, 9]


def test_a_window_of_the_paper_goes_on_once_it_has_no_mask():
    session = decode.WeDLM(2, 0.5, 0.0, 3).begin([5], CONTRACT)
    session.accept(predictions(session.step(), [7, 8], [0.1, 0.5]))  # not strictly below
    step = session.step()
    assert step.positions.tolist() == [1, 2]  # topped up only after the commit
    session.accept(predictions(step, [8], [0.6]))
    step = session.step()
    assert (step.positions.tolist(), step.cached) == ([2, 3], 2)
    session = decode.WeDLM(2, 0.5, 0.0, 3).begin([5], CONTRACT)
    session.accept(predictions(session.step(), [7, 8], [0.1, 0.1]))
    step = session.step()
    assert step.positions.tolist() == [1, 2, 3]  # no slot beyond the response
    assert [block.state for block in session.blocks()] == ["cached", "fully active"]


def test_a_draft_that_fails_becomes_the_greedy_token_and_later_ones_are_masked_again():
    session = decode.WeDLM(4, 9.0, 0.0, 9, verify="ar").begin([5], CONTRACT)
    step = session.step()
    assert step.read.tolist() == [0, 1, 2, 3, 4]
    session.accept(predictions(step, [7, 2, 3, 4, 5], [0.1] * 5))
    assert (session.settled, session.counts["accepted"]) == ([7], 0)
    step = session.step()
    assert step.tokens.tolist() == [7, 3, 4, 5, 1, 1, 1, 1]
    assert step.read.tolist() == list(range(8))
    session.accept(predictions(step, [3, 8, 9, 9, 9, 9, 9, 9], [0.1] * 8))
    assert session.settled == [7, 3, 8]
    assert session.counts == {"accepted": 1, "rejected": 2, "window_rows": 4 + 8}
    step = session.step()
    assert (step.tokens.tolist(), step.cached) == ([8, 1, 1, 1], 3)
    assert session.blocks()[-1].tokens == (8, None, None, None)


BAD = [
    ({"window": 0}, "window must be a whole number of at least 1, got 0"),
    (
        {"entropy_threshold": -0.1},
        "entropy_threshold must be a finite number of at least 0, got -0.1",
    ),
    ({"entropy_threshold": float("nan")}, "entropy_threshold .* got nan"),
    ({"distance_penalty": "far"}, "distance_penalty .* got 'far'"),
    ({"refill": "both"}, "refill must be one of paper, repository, block, got 'both'"),
    ({"refill": "block", "verify": "ar"}, "expected another refill, got block"),
    ({"window_attention": "bidirectional"}, "needs refill block.*got refill paper"),
    ({"verify": True}, "verify must be one of ar, got True"),
    ({"verify": "ar", "temperature": 0.2}, "verify needs temperature 0, got 0.2"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_a_bad_option_is_named_with_what_came(options, message):
    with pytest.raises(InputError, match=message):
        decode.WeDLM(**options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (random_model("llada"), "llada is bidirectional: take static or d2f"),
        (student("dream", 4, 0), "dream is block-causal: take block"),
        (sdar(4, 0), "sdar is absolute block-causal: take block"),
        (random_model("causal"), "wedlm needs a model with a mask id"),
    ],
)
def test_a_model_that_is_not_causal_is_refused_with_the_alternative(model, message):
    with pytest.raises(InputError, match=message):
        decode.generate(model, [[5]], decode.WeDLM())


def test_block_by_block_a_window_stands_until_it_is_filled_and_is_committed_whole():
    """Windows of 3; in brackets what each forward fills. Its rows see all of it where it is
    bidirectional, and are committed causally."""
    for attention in ("causal", "bidirectional"):
        decoder = decode.WeDLM(3, None, 0.0, 6, refill="block", window_attention=attention)
        session = decoder.begin([5], CONTRACT)
        fed, last_ends = [], []
        while (step := session.step()) is not None:
            fed.append(step.positions.tolist())
            last_ends.append((step.spans[:, 0, 1]).tolist())
            count = len(step.read)
            session.accept(predictions(step, [7] * count, [0.1] * count))
        assert fed[:4] == [[0, 1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5, 6]]
        causal = [[1, 2, 3, 4], [2, 3, 4], [2, 3, 4], [2, 3, 4, 5, 6, 7]]
        whole = [[1, 4, 4, 4], [4, 4, 4], [4, 4, 4], [2, 3, 4, 7, 7, 7]]
        assert last_ends[:4] == (causal if attention == "causal" else whole)
        assert session.counts["window_rows"] == 3 + 3 + 3 + 6 + 3 + 3


@pytest.mark.parametrize("refill", ["paper", "repository"])
@pytest.mark.parametrize("verify", [None, "ar"])
def test_the_blocks_shown_lie_where_their_tokens_do(refill, verify):
    """Positions of a block count from the response's start: committed, then the window."""
    model = wedlm(True, 0)
    decoder = decode.WeDLM(
        window=4, entropy_threshold=1.5, max_new_tokens=14, refill=refill, verify=verify
    )
    events = list(decode.stream(model, [[5, 6, 7, 8, 9]], decoder))
    response = events[-1].result.raw_tokens
    assert len(events) > 3
    for event in events:
        starts = [block.start for block in event.blocks]
        ends = [block.end for block in event.blocks]
        assert starts[0] == 0 and starts[1:] == ends[:-1], "one after the other from 0"
        assert [block.state for block in event.blocks] == ["cached", "fully active"][
            -len(event.blocks) :
        ]
        assert all(revealed.position < 14 for revealed in event.revealed)
        for block in event.blocks:
            assert len(block.tokens) == block.end - block.start > 0
            if block.state == "cached":  # never revised
                assert list(block.tokens) == response[block.start : block.end]
        shown = {
            block.start + i: token for block in event.blocks for i, token in enumerate(block.tokens)
        }
        new = {r.position: r.token for r in event.revealed}
        assert all(shown.get(position, token) == token for position, token in new.items())
