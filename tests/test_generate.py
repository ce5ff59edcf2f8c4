"""`decode.generate` and `decode.stream`: prompts, batches, stop strings, sampling, errors."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model, random_model, tokenizer

import d2f
import decode
from d2f.errors import InputError, NonFiniteLogitsError
from decode.decoders import DECODERS
from decode.engine.prompts import fitted
from decode.engine.sampling import PredictionRequest, Sampler, draws_of
from decode.step import Sampling
from tests.references.predictions import predict

PIPELINE = decode.D2F(4, tau_conf=0.2, max_new_tokens=12)


@pytest.fixture(scope="module")
def model() -> d2f.DiffusionModel:
    return random_model("llada")


def test_prompts_may_be_text_messages_or_ids(model):
    text = "Use 3 and 4 to make 12."
    ids = tokenizer()(text)["input_ids"]
    chat = [{"role": "user", "content": text}]
    chat_ids = [2, *ids, 3]
    forms = [text, chat, chat[0], chat_ids, ids]
    results = decode.generate(model, forms, PIPELINE)
    assert [r.prompt_tokens for r in results] == [len(chat_ids)] * 4 + [len(ids)]
    assert len({tuple(r.tokens) for r in results[:4]}) == 1
    for one in (*forms, np.array(ids)):
        assert len(decode.generate(model, one, PIPELINE)) == 1
    for one in (torch.tensor(ids), torch.tensor([ids]), [torch.tensor(ids)]):  # as tokenizers do
        assert decode.generate(model, one, PIPELINE)[0].tokens == results[4].tokens
    assert decode.generate(model, [], PIPELINE) == []


def test_raw_text_is_taken_as_it_is_and_so_is_text_without_a_template(model):
    text = "Use 3 and 4 to make 12."
    ids = tokenizer()(text)["input_ids"]
    expected = decode.generate(model, ids, PIPELINE)[0]
    plain = copy.copy(model)
    plain.tokenizer = copy.deepcopy(model.tokenizer)
    plain.tokenizer.chat_template = None
    for result in (
        *decode.generate(model, [text], PIPELINE, raw=True),
        *decode.generate(plain, [text], PIPELINE),
    ):
        assert (result.prompt_tokens, result.tokens) == (len(ids), expected.tokens)
    with pytest.raises(InputError, match="raw must be true or false, got 'yes'"):
        decode.generate(model, text, PIPELINE, raw="yes")


def test_a_decoder_may_be_named(model):
    named = decode.generate(model, ["Use 3"], "d2f")[0]
    assert named.tokens == decode.generate(model, ["Use 3"], decode.D2F())[0].tokens
    assert len(decode.generate(model, ["Use 3", "Use 4"], ["d2f", decode.Static()])) == 2


@pytest.mark.parametrize("decoder", ["d3f", decode.D2F, None, 5, ["d2f", 7]])
def test_what_is_no_decoder_is_named_with_what_is_expected(model, decoder):
    message = (
        r"decoder must be a Decoder, such as decode.D2F\(\), or one of the names .*d2f, .* got "
    )
    with pytest.raises(InputError, match=message):
        decode.generate(model, ["Use 3"], decoder)


@pytest.mark.parametrize("name", ["d2f", "static", "freedave", "wino"])
def test_a_response_has_256_tokens_by_default_and_less_where_the_context_leaves_less(model, name):
    """The context of the model is 256."""
    decoder = replace(DECODERS[name](), early_exit=False)
    long, short = decode.generate(model, [[5] * 250, [5] * 249], decoder)
    assert (len(long.raw_tokens), len(short.raw_tokens)) == (6, 7)
    with pytest.raises(InputError, match=r"prompt 0 has 256 tokens.* no room for a response"):
        decode.generate(model, [5] * 256, decoder)
    wide = fresh_model("llada")
    wide.backbone.config.max_position_embeddings = 300
    assert fitted(wide, [5] * 9, decoder, "").length == decoder.length == 256


def test_a_model_that_d2f_did_not_train_is_noticed_once():
    other, student = fresh_model("llada"), fresh_model("llada")
    student.contract = replace(student.contract, objective="d2f", block_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decode.generate(student, [5, 6], PIPELINE)
        decode.generate(other, [5, 6], decode.Static(4, 4))
        assert not caught
        for _ in range(2):
            decode.generate(other, [5, 6], PIPELINE)
    assert {w.filename for w in caught} == {__file__}
    assert [str(w.message).split(" (")[0] for w in caught] == ["the model was not trained by D2F"]


def test_text_is_the_visible_tokens(model):
    result = decode.generate(model, "Use 3", PIPELINE)[0]
    assert result.text == tokenizer().decode(result.tokens, skip_special_tokens=True)
    assert result.seconds > 0
    assert result.tokens_per_forward == len(result.tokens) / result.forwards


def test_a_stop_string_hides_itself_and_what_follows(model):
    """Tokens that it hides are not counted, whatever the decoder."""
    for decoder in (
        PIPELINE,
        decode.Static(block_size=4, max_new_tokens=12),
    ):
        free = decode.generate(model, "Use 3", decoder)[0]
        middle = tokenizer().decode(free.tokens[2:3])
        stopped = decode.generate(model, "Use 3", replace(decoder, stop=(middle,)))[0]
        assert stopped.finish_reason == "stop"
        assert stopped.text == free.text[: free.text.index(middle)]
        assert stopped.tokens == free.tokens[: len(stopped.tokens)]
        assert len(stopped.tokens) < len(free.tokens)
        assert stopped.forwards <= free.forwards


def test_the_stream_reports_every_reveal_once(model):
    events = list(decode.stream(model, ["Use 3", "Use 4 and 5"], PIPELINE, batch_size=1))
    for request in (0, 1):
        own = [event for event in events if event.request == request]
        assert [event.forward for event in own] == list(range(1, len(own) + 1))
        assert [event.result is not None for event in own] == [False] * (len(own) - 1) + [True]
        result = own[-1].result
        revealed = {r.position: r.token for event in own for r in event.revealed}
        assert len(revealed) == sum(len(event.revealed) for event in own)
        assert [revealed[p] for p in sorted(revealed)] == result.raw_tokens
        for event in own:
            shown = {
                block.start + i: token
                for block in event.blocks
                for i, token in enumerate(block.tokens)
                if token is not None
            }
            assert shown.items() <= revealed.items()


def test_batch_size_bounds_what_runs_together(model):
    order = [e.request for e in decode.stream(model, ["Use 3"] * 3, PIPELINE, batch_size=1)]
    assert order == sorted(order)
    both = [e.request for e in decode.stream(model, ["Use 3"] * 3, PIPELINE, batch_size=2)]
    assert both[:2] == [0, 1] and 2 not in both[:4]


def test_the_same_seed_gives_the_same_sample_whatever_the_batch(model):
    hot = decode.D2F(4, tau_conf=0.2, max_new_tokens=12, temperature=1.5, seed=3)
    other = decode.D2F(4, tau_conf=0.2, max_new_tokens=12, temperature=1.5, seed=4)
    alone = decode.generate(model, "Use 3", hot)[0].raw_tokens
    results = decode.generate(model, ["Use 9", "Use 3", "Use 3"], [other, hot, other])
    assert results[1].raw_tokens == alone
    assert results[2].raw_tokens != alone


HOT = decode.D2F(4, tau_conf=0.2, max_new_tokens=12, temperature=1.5, seed=3)


def test_equal_prompts_and_samples_of_one_give_different_answers_the_same_each_time(model):
    prompts = ["Use 3", "Use 9", "Use 3"]
    results = decode.generate(model, prompts, HOT, n=2)
    answers = [tuple(result.raw_tokens) for result in results]
    assert len({answers[i] for i in (0, 1, 4, 5)}) == 4
    assert len({result.seed for result in results}) == 6
    again = decode.generate(model, prompts, HOT, n=2, batch_size=1)
    assert [r.raw_tokens for r in again] == [r.raw_tokens for r in results]
    for prompt, result in zip([p for p in prompts for _ in range(2)], results, strict=True):
        alone = decode.generate(model, prompt, replace(HOT, seed=result.seed))[0]
        assert alone.raw_tokens == result.raw_tokens


def test_the_first_sample_has_the_seed_as_it_was_given(model):
    """So one prompt, or one with a decoder of its own, gives what it gives whatever n."""
    one = decode.generate(model, "Use 3", HOT)[0]
    assert one.seed == 3
    assert decode.generate(model, ["Use 3", "Use 3"], HOT, n=3)[0].raw_tokens == one.raw_tokens
    own = decode.generate(model, ["Use 9", "Use 3"], [HOT, HOT], n=2)
    assert own[2].raw_tokens == one.raw_tokens
    assert [result.seed for result in own][0::2] == [3, 3]


def test_greedy_samples_are_equal_and_n_is_checked(model):
    results = decode.generate(model, ["Use 3", "Use 9"], PIPELINE, n=2)
    assert results[0].tokens == results[1].tokens != results[2].tokens == results[3].tokens
    assert {result.seed for result in results} == {0}
    with pytest.raises(InputError, match="n must be a whole number of at least 1, got 0"):
        decode.generate(model, "Use 3", PIPELINE, n=0)
    found = decode.generate(model, ["Use 3", ""], PIPELINE, n=2, on_error="return")
    assert [result.error is None for result in found] == [True, True, False, False]


@settings(max_examples=30)
@given(st.integers(0, 99), st.sampled_from([None, 1, 3]), st.sampled_from([1.0, 0.6, 0.01]))
def test_sampling_stays_within_top_k_and_top_p_and_never_takes_the_mask(seed, top_k, top_p):
    torch.manual_seed(seed)
    logits = torch.randn(40, 12) * 2
    logits[:, 5] = 50.0  # the mask would be certain
    sampler = Sampler(Sampling(1.0, top_p, top_k, seed), mask_id=5)
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


def test_confidence_is_the_probability_under_the_full_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, 3.0]])
    greedy = Sampler(Sampling(), mask_id=3)
    found = predict(logits, [PredictionRequest(greedy, 1)], 1)[0]
    assert found.token.tolist() == [0]
    assert found.confidence[0] == pytest.approx(logits.softmax(-1)[0, 0].item())


def test_each_request_gets_the_scores_that_its_step_asked_for():
    logits = torch.tensor([[2.0, 1.0, 0.0, 3.0], [0.0, 4.0, 1.0, 0.0], [1.0, 1.0, 5.0, 1.0]])
    sampler = Sampler(Sampling(), mask_id=3)
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_logit_is_found_whichever_token_is_chosen(bad):
    logits = torch.zeros(3, 5)
    logits[:, 0], logits[1, 4] = 9.0, bad
    with pytest.raises(NonFiniteLogitsError, match="forward 7"):
        predict(logits, [PredictionRequest(Sampler(Sampling(), mask_id=4), 3)], 7)
    logits[1, 4] = -torch.inf  # a token that the model rules out is no fault
    found = predict(logits, [PredictionRequest(Sampler(Sampling(), mask_id=3), 3)], 7)[0]
    assert found.token.tolist() == [0] * 3


@pytest.mark.parametrize("temperature", [1e-9, 1e-12, 1e-38, 1e-45, 5e-324])
def test_a_temperature_near_0_is_greedy(model, temperature):
    """Also where fp32 cannot hold it, or a logit divided by it."""
    logits = torch.tensor([[3.0, -1e4, 9.0, 8.99999], [1e4, 2e4, 0.0, -5.0]])
    sampler = Sampler(Sampling(temperature, 0.9, 3), mask_id=None)
    assert predict(logits, [PredictionRequest(sampler, 2)], 1)[0].token.tolist() == [2, 1]
    cold = replace(PIPELINE, temperature=temperature)
    results = [decode.generate(model, "Use 3", d)[0].tokens for d in (cold, PIPELINE)]
    assert results[0] == results[1]


@pytest.mark.parametrize("top_p", [1e-30, 1e-45, 1e-46, 5e-324])
def test_the_smallest_top_p_keeps_the_likeliest_token_alone(top_p):
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]]).expand(50, 4)
    found = predict(logits, [PredictionRequest(Sampler(Sampling(1.0, top_p), None), 50)], 1)[0]
    assert set(found.token.tolist()) == {2}


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63, 2**64 - 1])
def test_any_seed_that_torch_takes_is_taken(model, seed):
    hot = replace(PIPELINE, temperature=1.0, seed=seed)
    results = decode.generate(model, ["Use 3"] * 2, hot, n=2)
    assert len({result.seed for result in results}) == 4


def test_a_temperature_may_be_a_whole_number_of_any_size(model):
    """Beyond int64, too; what is drawn is then any token alike."""
    hot = decode.D2F(4, tau_conf=0.2, max_new_tokens=4, temperature=2**64)
    same = decode.D2F(4, tau_conf=0.2, max_new_tokens=4, temperature=2.0**64)
    first, second = (decode.generate(model, "Use 3", d)[0].raw_tokens for d in (hot, same))
    assert first == second and len(first) == 4


def test_sampled_frequencies_follow_the_probabilities():
    logits = torch.tensor([0.1, 0.2, 0.7]).log().expand(20000, 3)
    found = predict(logits, [PredictionRequest(Sampler(Sampling(1.0), None), 20000)], 1)[0]
    shares = np.bincount(found.token, minlength=3) / 20000
    assert np.abs(shares - [0.1, 0.2, 0.7]).max() < 0.015


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "prompt 0 is empty"),
        ("", "prompt 0 is empty"),
        (["Use 3", ""], "prompt 1 is empty"),
        ([4, 1, 5], "mask id 1 at position 1"),
        ([4, 10**6], "ids must lie in"),
        ([4, -1], "ids must lie in"),
        (5, "expected text, chat messages or ids, one or a list of them, got 5"),
        ("\ud800", "prompt 0 is not Unicode text"),
        ({"role": "user", "content": "\ud800"}, "prompt 0 is not Unicode text"),
        ({"role": "wizard", "content": "x"}, "chat template"),
        ([4.5], "expected text, chat messages or ids"),
        ([[4.5]], "whole token ids"),
        ([[True, 4]], "whole token ids"),
        (b"Use 3", "expected text, chat messages or ids"),
        ([b"Use 3"], "prompt 0: expected text, chat messages or ids"),
        ([{"role": "user", "content": "x"}, "y"], "chat messages alone, got 'y' among them"),
        ([4] * 250, "context is 256"),
        ([{"role": "wizard", "content": "x"}], "chat template"),
    ],
)  # fmt: skip
def test_a_bad_prompt_is_refused_before_any_forward(model, prompt, message):
    with pytest.raises(InputError, match=message):
        decode.generate(model, prompt, PIPELINE)


def test_a_mixed_prompt_may_hold_what_cannot_be_printed(model):
    with pytest.raises(InputError, match="expected chat messages alone, got int"):
        decode.generate(model, [[{"role": "user", "content": "x"}, 10**5000]], PIPELINE)


def test_text_needs_a_tokenizer(llada):
    with pytest.raises(InputError, match="needs a tokenizer"):
        decode.generate(llada, "hello", PIPELINE)
    with pytest.raises(InputError, match="need a tokenizer"):
        decode.generate(llada, [[4, 5]], decode.D2F(4, max_new_tokens=4, stop=("x",)))


def test_batch_size_and_decoder_count_are_checked(model):
    with pytest.raises(InputError, match="batch_size"):
        decode.generate(model, "Use 3", PIPELINE, batch_size=0)
    with pytest.raises(InputError, match="expected one decoder or 2, got 1"):
        decode.generate(model, ["Use 3", "Use 4"], [PIPELINE])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_logits_stop_the_run_at_their_forward(bad):
    """No token is chosen from them; the forwards before stand."""
    model = fresh_model("llada")
    head, calls = model.backbone.lm_head, 0

    def spoil(module, inputs, output):
        nonlocal calls
        calls += 1
        return torch.full_like(output, bad) if calls == 3 else output

    head.register_forward_hook(spoil)
    events = []
    with pytest.raises(NonFiniteLogitsError, match="forward 3"):
        for event in decode.stream(model, "Use 3", PIPELINE):
            events.append(event)
    assert [event.forward for event in events] == [1, 2]
