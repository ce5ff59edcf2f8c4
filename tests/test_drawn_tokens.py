"""Drawn tokens follow from the request and its seed: not from the batch, from pieces, from padding
to fixed sizes, or from which computation draws them."""

from __future__ import annotations

import pytest
import torch
from every_decoder import exact_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_model

import decode
import decode.engine.sampling
from decode.engine import cuda_graphs
from decode.engine.engine import Engine
from decode.engine.request import Request
from decode.engine.sampling import ROWS_A_STEP, PredictionRequest, Sampler, Wanted, wanted_of
from decode.step import Sampling

SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.4, 1.0, 1e300]),
        "top_k": st.sampled_from([None, None, 3]),
        "top_p": st.sampled_from([1.0, 1.0, 0.7]),
        "seed": st.sampled_from([0, 5, 2**64 - 1, -(2**63)]),
    }
)
REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(4, 200), min_size=1, max_size=20), SAMPLING),
    min_size=1,
    max_size=4,
)


def run(model, decoders, prompts, *, early=False, **options) -> tuple[Engine, list[list[int]]]:
    requests = [
        Request(i, ids, decoder, model.contract, None)
        for i, (ids, decoder) in enumerate(zip(prompts, decoders, strict=True))
    ]
    engine = Engine(model, slots=200, **options)
    engine.early = early
    for request in requests:
        engine.submit(request)
    list(engine.run())
    assert [request.result.error for request in requests] == [None] * len(requests)
    return engine, [request.result.raw_tokens for request in requests]


@settings(max_examples=30)
@given(REQUESTS, st.sampled_from(["d2f", "autoregressive"]), st.booleans(), st.booleans())
def test_alone_together_in_pieces_and_padded_the_same_tokens_are_drawn(asked, name, pieces, early):
    model = exact_model("llada" if name == "d2f" else "causal")
    prompts = [ids for ids, _ in asked]
    decoders = [
        decode.D2F(4, tau_conf=0.2, max_new_tokens=9, **own)
        if name == "d2f"
        else decode.Autoregressive(6, **own)
        for _, own in asked
    ]
    alone = [
        run(model, [decoder], [ids], batch_size=1, static=False)[1][0]
        for ids, decoder in zip(prompts, decoders, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "SIZES", (5, 8, 16))  # some forwards have more rows
        rows = 5 if pieces else None
        options = {"batch_size": 3, "static": True, "prefill_rows": rows, "early": early}
        engine, together = run(model, decoders, prompts, **options)
    assert together == alone
    assert engine.static._forwards


def test_the_kernel_draws_what_the_plain_computation_draws(monkeypatch):
    model, prompts = random_model("dream"), [[5, 6, 7, 8], [9], [10, 11]]
    decoders = [
        decode.D2F(4, tau_conf=0.3, max_new_tokens=9, temperature=0.9, seed=2**40),
        decode.D2F(4, tau_conf=0.3, max_new_tokens=9, temperature=0.9, top_k=9, top_p=0.8),
        decode.D2F(4, tau_conf=0.3, max_new_tokens=9),
    ]
    plain = run(model, decoders, prompts, batch_size=3)[1]
    asked = []

    def chosen(name: str, x: torch.Tensor) -> bool:
        asked.append(name)
        return True

    monkeypatch.setattr(decode.engine.sampling, "use_kernel", chosen)
    assert run(model, decoders, prompts, batch_size=3, static=True)[1] == plain
    assert "confidence" in asked


def test_forwards_with_drawn_tokens_are_static_ones(monkeypatch):
    """On a GPU: captured."""
    model, computed = random_model("llada"), []
    monkeypatch.setattr(Engine, "_compute", lambda self, *_: computed.append(self))
    decoder = decode.D2F(4, max_new_tokens=9, temperature=1.0)
    engine, _ = run(model, [decoder], [[5, 6]], batch_size=1, static=True)
    kinds = set(engine.static._forwards)
    assert kinds and all(kind.drawn and not kind.filtered for kind in kinds)
    assert not computed


def test_rows_are_numbered_on_once_their_predictions_are_taken():
    model = random_model("llada")
    decoder = decode.D2F(4, max_new_tokens=9, temperature=1.0)
    request = Request(0, [5, 6], decoder, model.contract, None)
    engine, numbers = Engine(model, batch_size=1, slots=40), []
    engine.submit(request)
    group = PredictionRequest(request.sampler, 2)
    while not request.done:
        numbers += [wanted_of([group]).draws[1].tolist() for _ in range(2)]
        engine.advance()
    assert numbers[:3] == [[0, 1], [0, 1], [ROWS_A_STEP, ROWS_A_STEP + 1]]
    assert len(numbers) > 4
    assert numbers[::2] == numbers[1::2] == sorted(numbers[::2])


def test_only_what_is_drawn_from_a_part_of_the_vocabulary_is_filtered():
    for sampling, filtered in [
        (Sampling(1.0), False),
        (Sampling(0.0, top_p=0.5, top_k=4), False),
        (Sampling(1.0, top_p=0.5), True),
        (Sampling(1.0, top_k=4), True),
    ]:
        groups = [PredictionRequest(Sampler(s, None), 2) for s in (sampling, Sampling(1.0))]
        assert wanted_of(groups).filtered is filtered
    assert not Wanted().filtered
    assert wanted_of([PredictionRequest(Sampler(Sampling(), None), 2)]).draws is None
