"""Tokens are chosen as asked: within top-k and top-p, by the probabilities, and drawn tokens follow
from the request and its seed alone: not from the batch, from pieces, from padding to fixed sizes,
or from which computation draws them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_model

import decode
import decode.engine.batch
from d2f.errors import NonFiniteLogitsError
from decode.engine.batch import (
    ROWS_A_STEP,
    PredictionRequest,
    Sampler,
    Wanted,
    draws_of,
    table_of,
    wanted_of,
)
from decode.engine.engine import Engine
from decode.engine.request import Request
from tests.references.predictions import choosing, predict

PIPELINE = decode.D2F(4, tau_conf=0.2, max_new_tokens=12)


@pytest.fixture(scope="module")
def model():
    return random_model("llada")


def test_scores_that_no_request_asked_for_are_not_computed():
    plain = PredictionRequest(Sampler(choosing(), mask_id=None), 2)
    drawn = PredictionRequest(Sampler(choosing(temperature=1.0), mask_id=None), 1)
    scored = PredictionRequest(plain.sampler, 2, uncertainty=True)
    for groups, shape in (([plain], (2, 2)), ([plain, drawn], (2, 3)), ([scored, drawn], (6, 3))):
        assert table_of(torch.eye(3)[: shape[1]], wanted_of(groups)).shape == shape


@settings(max_examples=30)
@given(st.integers(0, 99), st.sampled_from([None, 1, 3]), st.sampled_from([1.0, 0.6, 0.01]))
def test_sampling_stays_within_top_k_and_top_p_and_never_takes_the_mask(seed, top_k, top_p):
    torch.manual_seed(seed)
    logits = torch.randn(40, 12) * 2
    logits[:, 5] = 50.0  # the mask would be certain
    sampler = Sampler(choosing(1.0, top_p, top_k, seed), mask_id=5)
    found = predict(logits, [PredictionRequest(sampler, 40)], 1)[0]
    assert 5 not in found.token
    allowed = logits.clone()
    allowed[:, 5] = -torch.inf
    draws = draws_of(torch.from_numpy(sampler.lines(40)), filtered=True)
    kept = allowed.masked_fill(allowed < draws.floor(allowed)[:, None], -torch.inf)
    assert torch.isfinite(kept.gather(1, torch.from_numpy(found.token)[:, None])).all()
    probability = allowed.softmax(-1)
    for row, keep in zip(probability, torch.isfinite(kept), strict=True):
        chosen = row[keep]
        if top_k is not None:
            assert len(chosen) <= top_k
        if len(chosen) > 1:  # without its least likely token it would not reach top_p
            assert chosen.sum() - chosen.min() < top_p + 1e-6
        assert keep[row.argmax()]


def test_each_request_gets_the_scores_that_its_step_asked_for():
    logits = torch.tensor([[2.0, 1.0, 0.0, 3.0], [0.0, 4.0, 1.0, 0.0], [1.0, 1.0, 5.0, 1.0]])
    sampler = Sampler(choosing(), mask_id=3)
    p = logits.double().softmax(-1)
    plain, queried, scored = predict(
        logits,
        [
            PredictionRequest(sampler, 1),
            PredictionRequest(sampler, 1, queried_tokens=np.array([2])),
            PredictionRequest(sampler, 1, uncertainty=True),
        ],
        1,
    )
    assert plain.queried_probability is plain.entropy is plain.margin is None
    assert queried.entropy is scored.queried_probability is None
    assert queried.queried_probability == pytest.approx([p[1, 2].item()])
    assert scored.entropy == pytest.approx([-(p[2] * p[2].log()).sum().item()])
    assert scored.margin == pytest.approx([(p[2, 2] - p[2, 0]).item()])
    assert [x.token.tolist() for x in (plain, queried, scored)] == [[0], [1], [2]]
    assert plain.confidence == pytest.approx([p[0, 0].item()]), "under the full softmax"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_logit_is_found_whichever_token_is_chosen(bad):
    logits = torch.zeros(3, 5)
    logits[:, 0], logits[1, 4] = 9.0, bad
    with pytest.raises(NonFiniteLogitsError, match="forward 7"):
        predict(logits, [PredictionRequest(Sampler(choosing(), mask_id=4), 3)], 7)
    logits[1, 4] = -torch.inf  # a token that the model rules out is no fault
    found = predict(logits, [PredictionRequest(Sampler(choosing(), mask_id=3), 3)], 7)[0]
    assert found.token.tolist() == [0] * 3


@pytest.mark.parametrize("temperature", [1e-9, 1e-12, 1e-38, 1e-45, 5e-324])
def test_a_temperature_near_0_is_greedy(model, temperature):
    """Also where fp32 cannot hold it, or a logit divided by it."""
    logits = torch.tensor([[3.0, -1e4, 9.0, 8.99999], [1e4, 2e4, 0.0, -5.0]])
    sampler = Sampler(choosing(temperature, 0.9, 3), mask_id=None)
    assert predict(logits, [PredictionRequest(sampler, 2)], 1)[0].token.tolist() == [2, 1]
    cold = replace(PIPELINE, temperature=temperature)
    results = [decode.generate(model, "Use 3", d)[0].tokens for d in (cold, PIPELINE)]
    assert results[0] == results[1]


@pytest.mark.parametrize("top_p", [1e-30, 1e-45, 1e-46, 5e-324])
def test_the_smallest_top_p_keeps_the_likeliest_token_alone(top_p):
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]]).expand(50, 4)
    found = predict(logits, [PredictionRequest(Sampler(choosing(1.0, top_p), None), 50)], 1)[0]
    assert set(found.token.tolist()) == {2}


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63, 2**64 - 1])
def test_any_seed_that_torch_takes_is_taken(model, seed):
    hot = replace(PIPELINE, temperature=1.0, seed=seed)
    results = decode.generate(model, ["Use 3"] * 2, hot, n=2)
    assert len({result.seed for result in results}) == 4


def test_forwards_with_drawn_tokens_are_static_ones(monkeypatch):
    """On a GPU: captured."""
    model, computed = random_model("llada"), []
    monkeypatch.setattr(Engine, "_compute", lambda self, *_: computed.append(self))
    decoder = decode.D2F(4, max_new_tokens=9, temperature=1.0)
    engine = Engine(model, slots=200, batch_size=1, static=True)
    engine.submit(Request(0, [5, 6], decoder, model.contract, None))
    list(engine.run())
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
        (choosing(1.0), False),
        (choosing(0.0, top_p=0.5, top_k=4), False),
        (choosing(1.0, top_p=0.5), True),
        (choosing(1.0, top_k=4), True),
    ]:
        groups = [PredictionRequest(Sampler(s, None), 2) for s in (sampling, choosing(1.0))]
        assert wanted_of(groups).filtered is filtered
    assert not Wanted().filtered
    assert wanted_of([PredictionRequest(Sampler(choosing(), None), 2)]).draws is None
