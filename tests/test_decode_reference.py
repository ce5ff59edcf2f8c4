"""The engine equals the plain reference decoders token by token: cached as uncached, batched as
one by one, whatever the models, options, prompts, batches and arrival orders."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipelines import pipelines as drawn_pipelines
from tiny import random_model, tokenizer

import decode
from d2f.model import DiffusionModel
from decode.decoders import Decoder
from decode.decoders.d2f_session import D2FSession
from decode.engine.engine import Engine
from decode.engine.request import Request
from tests.references import d2f as reference

REFERENCES = {
    "d2f": reference.decode_d2f,
    "static": reference.decode_static,
    "autoregressive": reference.decode_autoregressive,
}
models = st.builds(random_model, st.sampled_from(["llada", "dream"]), st.integers(0, 3))
prompts = st.lists(st.integers(2, len(tokenizer()) - 1), min_size=1, max_size=20)
sampling = st.sampled_from(
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 5},
    ]
)
pipelines = drawn_pipelines(
    sampling=sampling,
    tau_conf=st.sampled_from([0.05, 0.15, 0.3, 0.9, 1.0]),
    early_exit=st.booleans(),
    seed=st.integers(0, 9),
)
statics = st.builds(
    lambda chosen, **options: decode.Static(**options, **chosen),
    sampling,
    block_size=st.one_of(st.none(), st.integers(1, 64)),
    max_new_tokens=st.integers(1, 20),
    early_exit=st.booleans(),
    seed=st.integers(0, 9),
)
causals = st.builds(
    lambda chosen, **options: decode.Autoregressive(**options, **chosen),
    sampling,
    max_new_tokens=st.integers(1, 15),
    seed=st.integers(0, 9),
)


def expected(model: DiffusionModel, prompt: list[int], decoder: Decoder) -> list[int | None]:
    return REFERENCES[decoder.name](model, prompt, decoder)


def visible(model: DiffusionModel, raw: list[int | None]) -> list[int]:
    kept: list[int] = []
    for token in raw:
        if token is None or token in model.end_ids:
            break
        kept.append(token)
    return kept


@settings(max_examples=40)
@example(
    random_model("llada"),
    [([5, 6, 7], decode.D2F(10, 0.1, 0.1, max_new_tokens=30, early_exit=False))],
    1,
)
@example(  # at a temperature too, blocks that could reveal nothing are not read
    random_model("dream"),
    [([5, 6, 7], decode.D2F(4, 0.1, 0.9, tau_conf=1.0, max_new_tokens=24, temperature=0.7))],
    1,
)
@example(  # an end id at a temperature: fewer rows are read after it
    random_model("dream"),
    [([256, 280, 92, 292, 101, 131, 28],
      decode.D2F(16, 0.0, 0.0, tau_conf=0.3, max_new_tokens=29, temperature=0.7, seed=2))],
    1,
)  # fmt: skip
@given(
    models,
    st.lists(st.tuples(prompts, st.one_of(pipelines, statics)), min_size=1, max_size=5),
    st.integers(1, 5),
)
def test_the_engine_equals_the_reference(model, requests, batch_size):
    results = decode.generate(
        model, [p for p, _ in requests], [d for _, d in requests], batch_size=batch_size
    )
    for (prompt, decoder), result in zip(requests, results, strict=True):
        raw = expected(model, prompt, decoder)
        assert result.tokens == visible(model, raw)
        assert result.raw_tokens == [token for token in raw if token is not None]


@settings(max_examples=15)
@given(
    st.builds(random_model, st.just("causal"), st.integers(0, 3)),
    st.lists(st.tuples(prompts, causals), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_autoregressive_equals_the_reference(model, requests, batch_size):
    results = decode.generate(
        model, [p for p, _ in requests], [d for _, d in requests], batch_size=batch_size
    )
    for (prompt, decoder), result in zip(requests, results, strict=True):
        raw = expected(model, prompt, decoder)
        assert result.raw_tokens == raw
        assert result.tokens == visible(model, raw)


@settings(max_examples=15)
@given(
    models,
    st.lists(st.tuples(prompts, pipelines), min_size=2, max_size=5),
    st.lists(st.integers(0, 3), min_size=5, max_size=5),
    st.data(),
)
def test_arrival_order_changes_nothing(model, requests, pauses, data):
    """Requests that enter while others are being decoded give what they give alone."""
    order = data.draw(st.permutations(range(len(requests))))
    slots = sum(len(p) + d.max_new_tokens for p, d in requests)
    engine = Engine(model, batch_size=3, slots=slots)
    found = {}

    def advance(times: int) -> None:
        for _ in range(times):
            for event in engine.advance():
                if event.result is not None:
                    found[event.request] = event.result.raw_tokens

    for i, pause in zip(order, pauses, strict=False):
        engine.submit(Request(i, *requests[i], model.contract, None))
        advance(pause)
    for event in engine.run():
        if event.result is not None:
            found[event.request] = event.result.raw_tokens
    for i, (prompt, decoder) in enumerate(requests):
        raw = expected(model, prompt, decoder)
        assert found[i] == [token for token in raw if token is not None]


@settings(max_examples=20)
@given(models, prompts, pipelines)
def test_a_cached_span_holds_no_mask_and_counts_add_up(model, prompt, decoder):
    """Only decoded blocks are ever left out of a forward."""
    request = Request(0, prompt, decoder, model.contract, None)
    engine = Engine(model, batch_size=1, slots=request.session.slots)
    engine.submit(request)
    while not request.done:
        step = request.next_step
        assert step is not None
        assert not request.session.masked[: step.cached].any()
        assert step.cached + len(step.tokens) >= step.positions.max() + 1
        engine.advance()
    result = request.result
    assert result.forwards == len(result.calls) == engine.forwards
    assert len(result.raw_tokens) <= decoder.max_new_tokens


@settings(max_examples=20)
@given(models, prompts, pipelines)
def test_early_exit_never_changes_the_visible_tokens(model, prompt, decoder):
    early, late = (
        decode.generate(model, [prompt], replace(decoder, early_exit=exit_, temperature=0.0))[0]
        for exit_ in (True, False)
    )
    assert early.tokens == late.tokens
    assert early.forwards <= late.forwards


@settings(max_examples=20)
@given(models, prompts, pipelines)
def test_the_response_is_exactly_max_new_tokens_without_an_end(model, prompt, decoder):
    """A short last block, never a response cut to a multiple of the block size."""
    result = decode.generate(model, [prompt], replace(decoder, early_exit=False))[0]
    if not set(result.raw_tokens) & set(model.end_ids):
        assert len(result.raw_tokens) == decoder.max_new_tokens
        assert result.finish_reason == "length"


@settings(max_examples=30)
@given(models, prompts, pipelines)
def test_d2f_feeds_only_blocks_that_may_reveal_or_are_cached(model, prompt, decoder):
    """And would decode the same if it fed all open ones."""
    result = decode.generate(model, [prompt], decoder)[0]
    with patch.object(D2FSession, "needed_end", lambda self: self.pipeline[-1].end):
        whole = decode.generate(model, [prompt], decoder)[0]
    assert result.raw_tokens == whole.raw_tokens
    assert result.forwards == whole.forwards
    fed, all_fed = ([rows for rows, _ in one.calls] for one in (result, whole))
    assert all(few <= many for few, many in zip(fed, all_fed, strict=True))


def test_d2f_feeds_no_block_that_could_not_reveal_anything():
    decoder = decode.D2F(4, tau_add=0.0, tau_act=1.0, tau_conf=1.0, max_new_tokens=16)
    result = decode.generate(random_model("llada", 0), [[5, 6, 7]], decoder)[0]
    with patch.object(D2FSession, "needed_end", lambda self: self.pipeline[-1].end):
        whole = decode.generate(random_model("llada", 0), [[5, 6, 7]], decoder)[0]
    assert result.raw_tokens == whole.raw_tokens
    assert max(rows for rows, _ in result.calls[1:]) == 8  # one that is cached, one that reveals
    assert max(rows for rows, _ in whole.calls[1:]) > 8
