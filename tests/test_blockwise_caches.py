"""Blockwise decoding with the exact and the approximate caches: against the plain reference, the
recorded runs of the official code, and what must hold of caches under each mask."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model, random_model, tokenizer

import decode
from d2f.model import DiffusionModel
from decode.decoders.base import visible_ends
from decode.engine.batch import join
from decode.engine.engine import Engine
from decode.engine.request import Request
from decode.step import Predictions, Revealed
from tests.references.blockwise import (
    allowed_pairs,
    cached_forward,
    decode_blockwise,
    whole_forward,
)

CACHES = ("none", "prefix", "dual")
FAMILIES = ("llada", "dream")


def under(model: DiffusionModel, **contract) -> DiffusionModel:
    """The same weights, read under another contract."""
    changed = replace(model.contract, **contract)
    return DiffusionModel(model.backbone, changed, tokenizer=model.tokenizer)


def student(family: str, block_size: int, seed: int = 0) -> DiffusionModel:
    """A block-causal model, as D2F trains them."""
    return under(random_model(family, seed), objective="d2f", block_size=block_size)


def sdar(block_size: int | None, seed: int) -> DiffusionModel:
    """Block-causal from position 0 on."""
    model = random_model("llada", seed)
    return under(model, family="sdar", prompt_rule="block_causal", block_size=block_size)


def forwards(model, requests, batch_size=1) -> list[list[list[Revealed]]]:
    """What each forward of each request reveals."""
    found: list[list[list[Revealed]]] = [[] for _ in requests]
    prompts, decoders = [p for p, _ in requests], [d for _, d in requests]
    for event in decode.stream(model, prompts, decoders, batch_size=batch_size):
        found[event.request].append(event.revealed)
    return found


def assert_same(ours: list[list[Revealed]], theirs: list[list[Revealed]], tolerance: float):
    """The same positions and tokens in each forward, confidences to rounding."""
    for mine, other in zip(ours, theirs, strict=True):
        mine, other = (sorted(part, key=lambda r: r.position) for part in (mine, other))
        assert [(r.position, r.token) for r in mine] == [(r.position, r.token) for r in other]
        for a, b in zip(mine, other, strict=True):
            assert abs(a.confidence - b.confidence) < tolerance


def confidences(steps: list[list[Revealed]]) -> list[float]:
    return [r.confidence for part in steps for r in sorted(part, key=lambda r: r.position)]


families = st.sampled_from(FAMILIES)
seeds = st.integers(0, 3)
sizes = st.sampled_from([1, 3, 4, 8])
models = st.one_of(
    st.builds(random_model, families, seeds),
    st.builds(student, families, sizes, seeds),
    st.builds(sdar, st.sampled_from([None, 3, 8]), seeds),
)
prompts = st.lists(st.integers(2, len(tokenizer()) - 1), min_size=1, max_size=12)


@st.composite
def decoders(draw, caches=CACHES, temperatures=(0.0, 0.0, 1.0), **fixed):
    options = {
        "block_size": draw(st.one_of(st.sampled_from([None, 1, 3, 4, 6, 8]), st.integers(1, 64))),
        "max_new_tokens": draw(st.integers(1, 16)),
        "cache": draw(st.sampled_from(caches)),
        "early_exit": draw(st.booleans()),
        "temperature": draw(st.sampled_from(temperatures)),
        "seed": draw(st.integers(0, 9)),
    } | fixed
    kind = draw(st.sampled_from(["static", "threshold", "factor", "entropy"]))
    if kind == "static":
        decoder = decode.Static(**options)
        return replace(decoder, steps=decoder.block_count * draw(st.integers(1, 4)))
    if kind == "threshold":
        return decode.Threshold(**options, tau=draw(st.sampled_from([0.1, 0.3, 0.6, 2.0])))
    if kind == "factor":
        return decode.Factor(**options, factor=draw(st.sampled_from([0.0, 0.7, 1.5, 3.0])))
    gamma = draw(st.sampled_from([0.0, 0.5, 3.0, 9.0]))
    proxy = draw(st.sampled_from(["entropy", "confidence", "margin"]))
    return decode.EntropyBounded(**options, gamma=gamma, proxy=proxy)


@settings(max_examples=50)
@given(
    models,
    st.lists(st.tuples(prompts, decoders()), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_the_engine_equals_the_reference_forward_by_forward(model, requests, batch_size):
    """All rules, masks and cache policies, block sizes that fit the model's and ones that do not,
    alone and in batches of different requests."""
    found = forwards(model, requests, batch_size)
    for (prompt, decoder), steps in zip(requests, found, strict=True):
        assert_same(steps, decode_blockwise(model, prompt, decoder), 1e-4)


@settings(max_examples=15)
@given(models, prompts, decoders(temperatures=(0.0,)))
def test_early_exit_never_changes_the_visible_tokens(model, prompt, decoder):
    model = under(model, end_ids=tuple(range(2, 60)))  # ends are frequent
    early, late = (
        decode.generate(model, [prompt], replace(decoder, early_exit=exit_))[0]
        for exit_ in (True, False)
    )
    assert (early.tokens, early.finish_reason) == (late.tokens, late.finish_reason)
    assert early.forwards <= late.forwards
    assert len(late.raw_tokens) == decoder.max_new_tokens


@pytest.mark.parametrize("cache", CACHES)
def test_threshold_gives_the_official_tokens(llada, golden, cache):
    """The official loop with a cache makes a forward more for each block that its first forward
    completes; without a cache the forwards are the same."""
    cases = json.loads((golden / "llada-tiny/fast_dllm.json").read_text())["cases"]
    assert len(cases) == 24
    results = decode.generate(
        llada,
        [case["prompt"] for case in cases],
        [
            decode.Threshold(
                tau=case["threshold"],
                block_size=case["block_length"],
                max_new_tokens=case["gen_length"],
                cache=cache,
                early_exit=False,
            )
            for case in cases
        ],
    )
    for case, result in zip(cases, results, strict=True):
        official, blocks = case[cache], case["gen_length"] // case["block_length"]
        assert result.raw_tokens == official["output"]
        spared = official["forwards"] - result.forwards
        assert spared == 0 if cache == "none" else 0 <= spared <= blocks


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(("family", "block_size"), [("llada", 4), ("dream", 4), ("dream", 8)])
@settings(max_examples=6)
@given(data=st.data())
def test_a_cache_of_a_block_causal_model_is_exact(family, block_size, cache, data):
    """Fast-dLLM's caches have no error where no row sees a later block, and feed the same rows: in
    blocks that are made of whole blocks of the model."""
    model = student(family, block_size, data.draw(seeds))
    fitting = st.sampled_from([block_size, 2 * block_size, None])
    decoder = data.draw(decoders(caches=[cache], block_size=data.draw(fitting)))
    prompt = data.draw(prompts)
    exact = replace(decoder, cache="none")
    ours, plain = (forwards(model, [(prompt, d)])[0] for d in (decoder, exact))
    assert_same(ours, plain, 1e-6)
    ours, plain = (decode.generate(model, [prompt], d)[0].calls for d in (decoder, exact))
    assert ours == plain


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_cache_of_a_bidirectional_model_is_not(family, cache, seed):
    """Nor of a block-causal one whose blocks are cut in two. The first forward is the same."""
    decoder = decode.Static(block_size=4, max_new_tokens=8, early_exit=False)
    for model in (random_model(family, seed), student(family, 8, seed)):
        plain, ours = (
            confidences(forwards(model, [([5, 6, 7], replace(decoder, cache=kind))])[0])
            for kind in ("none", cache)
        )
        assert ours[0] == plain[0]
        assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) > 1e-3


@pytest.mark.parametrize("cache", CACHES)
@settings(max_examples=6)
@given(model=models, prompt=prompts, decoder=decoders())
def test_at_their_strictest_the_rules_are_static_decoding(cache, model, prompt, decoder):
    """tau above 1, factor 0, and gamma 0 sorted by confidence: one token a forward, the same
    token."""
    common = {
        name: getattr(decoder, name)
        for name in ("block_size", "max_new_tokens", "early_exit", "temperature", "seed")
    } | {"cache": cache}
    static = forwards(model, [(prompt, decode.Static(**common))])[0]
    assert all(len(revealed) == 1 for revealed in static)
    for strict in (
        decode.Threshold(tau=1.5, **common),
        decode.Factor(factor=0.0, **common),
        decode.EntropyBounded(gamma=0.0, proxy="confidence", **common),
    ):
        assert forwards(model, [(prompt, strict)])[0] == static


def made_up(session, rng: np.random.Generator) -> Predictions:
    """Predictions for what the session wants, drawn at random."""
    count = len(session.wanted)
    values = rng.random((3, count)).astype(np.float32)
    tokens = rng.integers(2, 50, count)
    return Predictions(tokens, values[0], entropy=values[1], margin=values[2])


@given(
    st.one_of(st.builds(student, families, sizes), st.builds(sdar, sizes, st.just(0))),
    prompts,
    decoders(caches=["none"], early_exit=False),
    st.integers(0, 99),
)
def test_a_row_is_fed_until_it_cannot_change_and_then_no_more(model, prompt, decoder, seed):
    """On a block-causal model, aligned or not: once all that a row sees is decided it is fed once,
    with that, and never again but to be read; what counts as cached holds no mask."""
    session, rng = decoder.begin(prompt, model.contract), np.random.default_rng(seed)
    ends = visible_ends(len(session.x), len(prompt), model.contract)
    own, scratch = len(session.x), session.slots - 1
    final: Counter[int] = Counter()
    while (step := session.step()) is not None:
        assert not session.masked[: step.cached].any()
        kept = step.slots < own
        assert step.slots[kept].tolist() == step.positions[kept].tolist()
        assert (~kept).sum() <= model.logit_shift  # only to be read again
        assert step.slots[~kept].tolist() == [scratch] * int((~kept).sum())
        fed = set(step.positions[kept].tolist())
        for row in fed:
            final[row] += not session.masked[: ends[row]].any()
        sees = set(range(int(step.spans.max())))
        assert all(final[row] == 1 for row in sees - fed)  # never fed again, and fed as it is now
        session.accept(made_up(session, rng))
    assert all(count == 1 for count in final.values() if count)


def test_a_finished_block_costs_one_more_feeding_inside_the_next_ones_first_forward():
    model = student("llada", 4)
    decoder = decode.Static(block_size=4, steps=4, max_new_tokens=8, early_exit=False)
    result = decode.generate(model, [[5, 6, 7]], decoder)[0]
    assert result.calls == [(7, 0), (4, 3), (8, 3), (4, 7)]


@pytest.mark.parametrize(
    ("cache", "calls"),
    [
        ("none", [(11, 0)] * 4),
        ("prefix", [(11, 0), (8, 0), (11, 0), (4, 0)]),
        ("dual", [(11, 0), (4, 0), (11, 0), (4, 0)]),
    ],
)
def test_rows_that_each_policy_feeds_to_a_bidirectional_model(cache, calls):
    decoder = decode.Static(4, 8, cache, early_exit=False, steps=4)
    result = decode.generate(random_model("llada"), [[5, 6, 7]], decoder)[0]
    assert result.calls == calls


def logits_of(model: DiffusionModel, engine: Engine, request: Request) -> torch.Tensor:
    """Logits of the rows that the request's next step reads, its slots written."""
    rows = join([(request, request.next_step)]).on(model.device)
    engine.cache.slots = rows.slots
    with torch.inference_mode():
        return model.decode_rows(rows.tokens, rows.positions, rows.plan, engine.cache, rows.read)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("block", [0, 1])
def test_the_row_before_a_block_is_computed_again_to_predict_its_first_token(cache, block):
    """In a shifted family: from the keys and values that the policy keeps, its own among them, and
    without changing any; the logits of the block's first forward would be stale."""
    model, prompt = random_model("dream"), [5, 6, 7, 8]
    decoder = decode.Static(block_size=4, max_new_tokens=12, cache=cache)
    request = Request(0, prompt, decoder, model.contract, None)
    engine = Engine(model, batch_size=1, slots=request.session.slots)
    session = request.session
    start = len(prompt) + 4 * block

    def reveal_last() -> None:
        confidence = np.linspace(0, 1, len(session.wanted), dtype=np.float32)
        tokens = np.arange(len(session.wanted)) + 20
        request.accept(request.next_step, Predictions(tokens, confidence), 0.0)

    for _ in range(4 * block):
        logits_of(model, engine, request)
        reveal_last()
    allowed = allowed_pairs(model.contract, len(prompt), len(session.x))
    logits, kept = whole_forward(model, session.x.tolist(), allowed)
    torch.testing.assert_close(logits_of(model, engine, request)[0], logits[start - 1])
    for _ in range(3):  # the block's first token stays masked and is predicted each time
        reveal_last()
        own_slots = [
            tuple(part[:, :, start - 1].clone() for part in kv) for kv in engine.cache.layers
        ]
        found = logits_of(model, engine, request)[0]
        fed = range(start, len(session.x) if cache == "prefix" else start + 4)
        expected = cached_forward(model, session.x.tolist(), allowed, kept, fed)[start - 1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert (found - logits[start - 1]).abs().max() > 1e-2
        for before, now in zip(own_slots, engine.cache.layers, strict=True):
            assert all(torch.equal(a, b[:, :, start - 1]) for a, b in zip(before, now, strict=True))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("family", "shift"), [("llada", 0), ("dream", 1)])
def test_changing_a_row_changes_only_the_prediction_that_it_makes(family, shift, cache):
    """Row i predicts position i + 1 in a shifted family, position i in the others, in a block's
    first forward and in the cached ones."""
    model = fresh_model(family)
    decoder = decode.EntropyBounded(block_size=4, max_new_tokens=12, cache=cache)
    request = Request(0, [5, 6, 7], decoder, model.contract, None)
    engine = Engine(model, batch_size=1, slots=request.session.slots)
    session, rng = request.session, np.random.default_rng(0)
    changed: list[int] = []

    def change(module, args, output):
        for row in changed:
            output.last_hidden_state[:, row] += 1.0
        return output

    model.backbone.model.register_forward_hook(change)
    forwards_seen = 0
    while (step := request.next_step) is not None:
        plain = logits_of(model, engine, request)
        for row, position in enumerate(step.positions.tolist()):
            changed[:] = [row]
            differs = (logits_of(model, engine, request) - plain).abs().amax(-1) > 1e-3
            changed.clear()
            assert session.wanted[differs.numpy()].tolist() == [
                p for p in session.wanted if p == position + shift
            ]
        request.accept(step, made_up(session, rng), 0.0)
        forwards_seen += 1
    assert forwards_seen > 6
