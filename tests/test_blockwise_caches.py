"""The approximate caches of blockwise decoding: where they are exact, which rows are fed, and the
row before a block (against the plain reference: test_decode_reference.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from block_tiny import student
from hypothesis import given, settings
from hypothesis import strategies as st
from shadows import models
from test_decode_reference import block_models, blockwise, prompts, seeds
from tiny import random_model

import decode
from decode.decoders.session import visible_ends
from decode.step import Predictions, Revealed

FAMILIES = ("llada", "dream")


def forwards(model, requests, batch_size=1) -> list[list[list[Revealed]]]:
    """What each forward of each request reveals."""
    found: list[list[list[Revealed]]] = [[] for _ in requests]
    prompts, decoders = [p for p, _ in requests], [d for _, d in requests]
    for event in decode.stream(model, prompts, decoders, batch_size=batch_size):
        found[event.request].append(event.revealed)
    return found


def confidences(steps: list[list[Revealed]]) -> list[float]:
    return [r.confidence for part in steps for r in sorted(part, key=lambda r: r.position)]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(("family", "block_size"), [("llada", 4), ("dream", 4), ("dream", 8)])
@settings(max_examples=6)
@given(data=st.data())
def test_a_cache_of_a_block_causal_model_is_exact(family, block_size, cache, data):
    """Fast-dLLM's caches have no error where no row sees a later block, and feed the same rows: in
    blocks that are made of whole blocks of the model."""
    model = student(family, block_size, data.draw(seeds))
    size = data.draw(st.sampled_from([block_size, 2 * block_size, None]))
    # The number of its steps is that of other blocks.
    fields = {"block_size": size, "cache": cache}
    decoder = data.draw(blockwise)
    if decoder.name == "static":
        fields["steps"] = None
    decoder, prompt = replace(decoder, **fields), data.draw(prompts)
    exact = replace(decoder, cache="none")
    ours, plain = (decode.generate(model, [prompt], d)[0] for d in (decoder, exact))
    assert (ours.raw_tokens, ours.calls) == (plain.raw_tokens, plain.calls)
    ours, plain = (confidences(forwards(model, [(prompt, d)])[0]) for d in (decoder, exact))
    assert ours == pytest.approx(plain, abs=1e-6)


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


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@settings(max_examples=6)
@given(model=models, prompt=prompts, decoder=blockwise)
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


@given(block_models, prompts, blockwise, st.integers(0, 99))
def test_a_row_is_fed_until_it_cannot_change_and_then_no_more(model, prompt, decoder, seed):
    """On a block-causal model, aligned or not: once all that a row sees is decided it is fed once,
    with that, and never again but to be read; what counts as cached holds no mask."""
    decoder = replace(decoder, cache="none", early_exit=False)
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
