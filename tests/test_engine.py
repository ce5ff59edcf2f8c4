"""How the engine lays the steps of several requests into one flat batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model, random_model, tokenizer

import decode
import triton_kernels.span_attention
from d2f.attention import Segment
from decode.engine import cuda_graphs
from decode.engine.batch import FlatRows, join
from decode.engine.engine import Engine
from decode.engine.request import Request
from decode.engine.sampling import PredictionRequest, Sampler, Wanted, split, table_of, wanted_of
from decode.step import Sampling, Step
from tests.references.predictions import predict
from triton_kernels.span_attention import span_mask

CPU = torch.device("cpu")


def step(tokens: list[int], spans: list[list[tuple[int, int]]], read: list[int]) -> Step:
    places = np.arange(len(tokens))
    return Step(np.array(tokens), places + 3, places, np.array(spans), np.array(read), cached=0)


def request(base: int) -> SimpleNamespace:
    return SimpleNamespace(base=base)


def test_requests_lie_one_after_the_other_with_slots_from_their_bases():
    first = step([7, 8], [[(0, 2), (3, 4)], [(0, 2), (2, 2)]], [1])
    second = step([9, 10, 11], [[(0, 3)]] * 3, [0, 2])
    rows = join([(request(5), first), (request(20), second)]).on(CPU)
    assert rows.tokens.tolist() == [7, 8, 9, 10, 11]
    assert rows.positions.tolist() == [3, 4, 3, 4, 5]
    assert rows.slots.tolist() == [5, 6, 20, 21, 22]
    assert rows.read.tolist() == [1, 2, 4]
    assert rows.plan.spans.dtype == torch.int32
    seen = [mask.nonzero().flatten().tolist() for mask in span_mask(rows.plan.spans, 30)[0]]
    assert seen == [[5, 6, 8], [5, 6], [20, 21, 22], [20, 21, 22], [20, 21, 22]]
    assert rows.plan.segments == [
        Segment(slice(0, 2), slice(5, 9)),
        Segment(slice(2, 5), slice(20, 23), whole=True),
    ]


def test_ranges_that_others_need_hide_nothing():
    """Whose rows see all of its slots needs no mask, beside one of more ranges neither."""
    two = step([7, 8], [[(0, 2), (3, 4)], [(0, 2), (2, 2)]], [1])
    one = step([9, 10], [[(0, 2)]] * 2, [0])
    segments = join([(request(5), two), (request(20), one)]).segments
    assert [segment.whole for segment in segments] == [False, True]


@pytest.mark.parametrize(
    "spans", [[[(0, 3)], [(0, 2)]], [[(1, 3)], [(1, 3)]], [[(0, 1), (1, 3)], [(0, 0), (0, 3)]]]
)
def test_rows_that_may_see_different_slots_keep_their_mask(spans):
    plan = join([(request(4), step([7, 8], spans, [0]))]).on(CPU).plan
    assert not plan.segments[0].whole


@settings(max_examples=15)
@given(
    st.sampled_from(["llada", "dream"]),
    st.lists(st.lists(st.integers(2, len(tokenizer()) - 1), min_size=1, max_size=9), min_size=1,
             max_size=3),
    st.sampled_from([0.1, 0.3, 0.9]),
)  # fmt: skip
def test_a_segment_is_called_whole_exactly_where_its_mask_would_hide_nothing(
    family, prompts, tau_conf
):
    model = random_model(family)
    plans = []

    def keep(*arguments):
        rows = real(*arguments)
        plans.append(rows.plan)
        return rows

    real = FlatRows.on
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatRows, "on", keep)
        decode.generate(model, prompts, decode.D2F(4, tau_conf=tau_conf, max_new_tokens=12))
    segments = [(plan, part) for plan in plans for part in plan.segments]
    for plan, part in segments:
        first, stop = part.slots.start, part.slots.stop
        mask = span_mask(plan.spans[:, part.rows], stop - first, first)
        assert part.whole == bool(mask.all())
    assert {part.whole for _, part in segments} >= {False}


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_tokens_are_the_same_where_the_kernels_are_chosen(family, monkeypatch):
    """Attention and confidence by Triton, as on a GPU, here in its interpreter."""
    import d2f.attention
    import decode.engine.sampling

    model, prompts = random_model(family), [[5, 6, 7, 8], [9]]
    decoder = decode.D2F(block_size=4, tau_conf=0.5, max_new_tokens=9)
    plain = decode.generate(model, prompts, decoder)
    used = []

    def chosen(name: str, x: torch.Tensor) -> bool:
        used.append(x.shape)
        return True

    for module in (d2f.attention, decode.engine.sampling):
        monkeypatch.setattr(module, "use_kernel", chosen)
    monkeypatch.setattr(triton_kernels.span_attention, "HEAD_DIMS", (8,))
    by_kernels = decode.generate(model, prompts, decoder)
    assert [r.raw_tokens for r in by_kernels] == [r.raw_tokens for r in plain]
    assert {len(shape) for shape in used} == {2, 4}, "logits and queries"


@settings(max_examples=15)
@given(
    st.sampled_from(["llada", "dream"]),
    st.lists(st.lists(st.integers(2, 200), min_size=1, max_size=30), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([0.15, 0.9]),
)
def test_padding_rows_to_a_few_sizes_changes_no_token(family, prompts, batch_size, tau_conf):
    """What a GPU replays as CUDA graphs; prompts beyond the largest size are fed as they are."""
    model = fresh_model(family)  # it keeps the sizes that engines used
    decoder = decode.D2F(4, tau_conf=tau_conf, max_new_tokens=12)
    plain = decode.generate(model, prompts, decoder, batch_size=batch_size)
    requests = [Request(i, ids, decoder, model.contract, None) for i, ids in enumerate(prompts)]
    engine = Engine(model, batch_size=batch_size, slots=150, static=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "SIZES", (5, 8, 16, 24))
        for request in requests:
            engine.submit(request)
        list(engine.run())
    for request, want in zip(requests, plain, strict=True):
        assert request.result.raw_tokens == want.raw_tokens
        assert request.result.calls == want.calls
    assert {kind.size for kind in engine.static._forwards} <= {5, 8, 16, 24}


def test_static_forwards_give_queried_probabilities_and_scores():
    model = random_model("llada")
    tokens, ids = np.array([5, 6, 7]), np.array([9, 4])
    asked = Step(
        tokens, np.arange(3), np.arange(3), np.array([[[0, 3]]] * 3), np.array([2, 0]), cached=0,
        queried_tokens=ids, uncertainty=True,
    )  # fmt: skip
    rows = join([(request(0), asked)])
    sampler = Sampler(Sampling(), model.mask_id)
    groups = [PredictionRequest(sampler, 2, ids, True)]
    cache = model.new_cache(9)
    cache.slots = rows.on(CPU).slots
    on = rows.on(CPU)
    with torch.inference_mode():
        logits = model.decode_rows(on.tokens, on.positions, on.plan, cache, on.read)
        want = predict(logits, groups, 1)[0]
    table = cuda_graphs.GraphForwards(model, model.new_cache(9)).start(rows, Wanted(ids))()
    got = split(table, groups)[0]
    assert got.token.tolist() == want.token.tolist()
    for name in (
        "confidence",
        "queried_probability",
        "queried_log_probability",
        "entropy",
        "margin",
    ):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-6)


def test_scores_that_no_request_asked_for_are_not_computed():
    plain = PredictionRequest(Sampler(Sampling(), mask_id=None), 2)
    drawn = PredictionRequest(Sampler(Sampling(temperature=1.0), mask_id=None), 1)
    scored = PredictionRequest(plain.sampler, 2, uncertainty=True)
    for groups, shape in (([plain], (2, 2)), ([plain, drawn], (2, 3)), ([scored, drawn], (6, 3))):
        assert table_of(torch.eye(3)[: shape[1]], wanted_of(groups)).shape == shape


def test_where_the_next_forward_is_started_early_the_tokens_are_the_same(monkeypatch):
    """As on a GPU: requests that come while it runs enter one forward later, none is lost."""
    model, prompts = random_model("dream"), [[5, 6, 7], [8], [9, 10], [11]]
    decoder = decode.D2F(4, tau_conf=0.3, max_new_tokens=9)
    plain = decode.generate(model, prompts, decoder)
    engine = Engine(model, batch_size=2, slots=40)
    monkeypatch.setattr(engine, "early", True)
    results = {}
    waiting = [Request(i, ids, decoder, model.contract, None) for i, ids in enumerate(prompts)]
    engine.submit(waiting.pop(0))
    while engine.waiting or engine.running:
        for event in engine.advance():
            if event.result is not None:
                results[event.request] = event.result.raw_tokens
            if waiting:
                engine.submit(waiting.pop(0))
    assert [results[i] for i in range(4)] == [r.raw_tokens for r in plain]
