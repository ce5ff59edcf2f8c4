"""Left-to-right likelihoods: those of a forward a token, in a few forwards among others'."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from block_tiny import sdar
from every_decoder import alone, exact_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import POISON, fresh_model, poisoned_model, random_model

import decode
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.engine import likelihood
from decode.engine.engine import Engine
from decode.engine.likelihood import Likelihood
from decode.engine.request import Request
from tests.references.likelihood import likelihoods as plain

KINDS = {  # name in tests/every_decoder.py: block size, whether blocks begin at 0
    "llada student": (4, False),
    "dream student": (4, False),
    "sdar": (4, True),
    "wedlm": (None, False),
    "causal": (None, False),
}
IDS = st.lists(st.integers(8, 250), min_size=1, max_size=14)


def found(model, ids, given=0):
    kind = Likelihood.of(model.contract, given)
    return decode.generate(model, [ids], [kind])[0]


def same(ours, theirs):
    """Positions and tokens to the bit, logarithms to the rounding of fp32."""
    assert [(one.position, one.top) for one in ours] == [(p, top) for p, _, top in theirs]
    assert [one.logprob for one in ours] == pytest.approx(
        [lp for _, lp, _ in theirs], rel=1e-6, abs=1e-5
    )


@settings(max_examples=12)
@pytest.mark.parametrize("kind", KINDS)
@given(IDS, st.data())
def test_they_are_those_of_a_dense_forward_a_token(kind, ids, data):
    model, count = exact_model(kind), data.draw(st.integers(0, len(ids)))
    result = found(model, ids, count)
    same(result.likelihoods, plain(model, ids, count, *KINDS[kind]))
    assert [one.token for one in result.likelihoods] == ids[len(ids) - len(result.likelihoods) :]
    assert (result.tokens, result.finish_reason) == ([], "length")


@pytest.mark.parametrize("kind", KINDS)
def test_forwards_are_bounded_and_their_number_changes_nothing(kind, monkeypatch):
    """Rows of a forward at most 256, or 9 where that is the bound."""
    model, ids = exact_model(kind), torch.arange(8, 158).tolist()
    whole = found(model, ids, 3)
    monkeypatch.setattr(likelihood, "ROWS", 9)
    small = found(model, ids, 3)
    assert small.likelihoods == whole.likelihoods
    assert max(rows for rows, _ in whole.calls) <= 256 and max(rows for rows, _ in small.calls) <= 9
    assert len(small.calls) > len(whole.calls)


def test_a_causal_models_are_transformers_own():
    model = random_model("causal")
    ids = torch.randint(8, 250, (40,)).tolist()
    with torch.inference_mode():
        stock = type(model.backbone)(copy.deepcopy(model.backbone.config))
        stock.load_state_dict(model.backbone.state_dict())
        stock.set_attn_implementation("sdpa")
        logits = stock.eval()(torch.tensor([ids])).logits[0]
    result = found(model, ids)
    want = logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert [one.logprob for one in result.likelihoods] == pytest.approx(want.tolist(), abs=2e-4)
    assert [one.top for one in result.likelihoods] == logits[:-1].argmax(-1).tolist()
    assert len(result.calls) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_what_follows_it(kind):
    """Nor on how much does: blocks are whole."""
    model, ids = exact_model(kind), [9, 40, 77, 8, 120, 33, 200, 91, 14, 60]
    whole = found(model, ids, 3).likelihoods
    for length in range(4, len(ids)):
        assert found(model, ids[:length], 3).likelihoods == whole[: length - 3]


@settings(max_examples=5)
@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(IDS, min_size=2, max_size=3), st.sampled_from([None, 5]), st.booleans())
def test_among_other_requests_each_has_what_it_has_alone(kind, many, rows, reuse):
    """In pieces, with rows of others, beside those that decode."""
    model = exact_model(kind)
    chain = kind in ("wedlm", "causal")
    other = decode.Autoregressive(6) if chain else decode.Block(max_new_tokens=6)
    engine = Engine(model, batch_size=3, slots=700, prefill_rows=rows, reuse_prefixes=reuse)
    asked = [(ids, Likelihood.of(model.contract, len(ids) // 2)) for ids in many + many]
    asked.insert(1, (many[0], other))
    requests = [Request(i, *job, model.contract, None) for i, job in enumerate(asked)]
    for request in requests:
        engine.submit(request)
    list(engine.run())
    for request, (ids, decoder) in zip(requests, asked, strict=True):
        want = alone(kind, tuple(ids), decoder)
        assert request.result.likelihoods == want.likelihoods
        assert request.result.tokens == want.tokens


def test_what_greedy_decoding_chose_is_greedy():
    for model, decoder in (
        (exact_model("causal"), decode.Autoregressive(8)),
        (exact_model("wedlm"), decode.WeDLM(5, verify="ar", max_new_tokens=8)),
    ):
        prompt = [9, 40, 77]
        answer = decode.generate(model, [prompt], decoder)[0].raw_tokens
        scored = found(model, prompt + answer, len(prompt)).likelihoods
        assert len(scored) == len(answer) and all(one.greedy for one in scored)
        assert all(one.top_logprob == one.logprob for one in scored)
        wrong = found(model, [*prompt, 8 if answer[0] != 8 else 9], len(prompt)).likelihoods[0]
        assert not wrong.greedy and wrong.top == answer[0] and wrong.top_logprob > wrong.logprob


def test_the_tail_keeps_its_precision():
    """A probability of e^-400 is 0 in fp32, its logarithm is not -inf."""
    model = fresh_model("causal")
    with torch.no_grad():
        model.backbone.double().lm_head.weight.mul_(60)
    result = found(model, [9, 40, 77, 8, 120])
    lowest = min(one.logprob for one in result.likelihoods)
    assert -math.inf < lowest < -150 and math.exp(lowest) < 1e-60
    same(result.likelihoods, plain(model, [9, 40, 77, 8, 120], 0, None, False))


def test_what_nothing_was_read_of_awaits_no_later_request():
    """A sequence of one token has no prediction in which its NaN would show."""
    model = student_of(poisoned_model())
    model = DiffusionModel(model.backbone, replace(model.contract, logit_shift=1))
    engine = Engine(model, batch_size=2, slots=40)
    request = Request(0, [POISON], Likelihood.of(model.contract), model.contract, None)
    engine.submit(request)
    list(engine.run())
    assert request.result.error is None and request.result.likelihoods == []
    assert all(torch.isfinite(part).all() for layer in engine.cache.layers for part in layer)


def student_of(model):
    contract = replace(model.contract, objective="d2f", block_size=4)
    return DiffusionModel(model.backbone, contract, tokenizer=model.tokenizer)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_bidirectional_model_is_refused(family):
    contract = random_model(family).contract
    message = f"need a causal or block-causal model, this one of the family {family} is bidirec"
    with pytest.raises(InputError, match=message):
        Likelihood.of(contract)
    with pytest.raises(InputError, match=message):
        decode.generate(random_model(family), [[9, 8]], Likelihood())


def test_bad_numbers_are_refused():
    model = sdar(4, 0)
    with pytest.raises(InputError, match=r"given must lie in \[0, 2\], .* got 3"):
        found(model, [9, 8], 3)
    # The last block is whole: 3 positions may be fed after the sequence.
    assert found(model, [9] * 253, 250).likelihoods
    with pytest.raises(InputError, match="the model's context is 256"):
        found(model, [9] * 254, 250)
