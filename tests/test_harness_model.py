"""`D2FLM`: what lm-eval asks is what our models are asked; what comes is counted and said."""

from __future__ import annotations

import random

import pytest
import torch
from harness_requests import generation, likelihood, rolling
from lm_eval.api.model import CachingLM
from sqlitedict import SqliteDict
from tiny import random_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from d2f.errors import InputError
from d2f.saving import save_model
from d2f.tokenizer import encode
from decode import generate
from decode.decoders.autoregressive import Autoregressive
from decode.decoders.d2f import D2F
from decode.decoders.unmask import Static, Threshold
from decode.engine.likelihood import Likelihood
from decode.harness.model import D2FLM, asked_decoder, distinct, request_seed
from decode.harness.monte_carlo import MonteCarlo

TEXTS = ["Ann has 3 apples.", "Use 3, 5 and 27", "a", "Tom buys 12 pens. He loses 4 of them.", ""]


def lm(family="llada", **more):
    return D2FLM(random_model(family), **more)


@pytest.fixture(scope="module")
def student():
    return D2FLM("tiny-d2f", tau_conf=0.9, device="cpu")


def ids_of(model, text):
    return model.tokenizer(text)["input_ids"] or [model.end_ids[0]]


@pytest.mark.parametrize(
    ("family", "decoder"),
    [("causal", Autoregressive()), ("llada", Threshold(tau=0.5)), ("dream", Static())],
)
def test_responses_are_those_of_generate(family, decoder):
    """Whatever the batch and the order, each with its own length, stops and temperature."""
    model = random_model(family)
    asked = [
        {"max_gen_toks": 24, "until": []},
        {"max_gen_toks": 16, "until": ["e"]},
        {"max_gen_toks": 8, "until": "a"},
        {"max_gen_toks": 32, "do_sample": True, "temperature": 0.7, "top_p": 0.9},
        {"max_gen_toks": 16, "temperature": 0.7, "top_k": 5},
    ]
    requests = [
        generation(text, document=i, **kwargs)
        for i, (text, kwargs) in enumerate(zip(TEXTS, asked, strict=True))
    ]
    found = {}
    for size in (1, 3):
        order = random.Random(size).sample(requests, len(requests))
        torch.manual_seed(size)  # no seed but the model's own counts
        texts = D2FLM(model, decoder=decoder, batch_size=size).generate_until(order, True)
        found[size] = dict(zip((r.doc_id for r in order), texts, strict=True))
    assert found[1] == found[3]
    for i, (request, kwargs) in enumerate(zip(requests, asked, strict=True)):
        seed = request_seed(0, "t", i, 0, 0, TEXTS[i])
        own = asked_decoder(decoder, kwargs, seed)
        (result,) = generate(model, [ids_of(model, TEXTS[i])], [own])
        assert found[1][request.doc_id] == result.text
        assert own.max_new_tokens == kwargs["max_gen_toks"] >= len(result.raw_tokens)


def test_arguments_mean_what_transformers_means_or_are_refused():
    for asked, temperature in (
        ({}, 0),
        ({"temperature": 0.0}, 0),
        ({"temperature": 0.5}, 0.5),
        ({"do_sample": True}, 1),
        ({"do_sample": True, "temperature": 0.3}, 0.3),
        ({"do_sample": False, "temperature": 0.3}, 0),
        ({"do_sample": None, "temperature": None, "num_beams": 1}, 0),
    ):
        decoder = asked_decoder(D2F(), asked, seed=3)
        assert decoder.temperature == temperature
        assert (decoder.max_new_tokens, decoder.stop, decoder.seed) == (256, (), 3)
    assert [asked_decoder(D2F(), {"top_k": k}, 0).top_k for k in (0, -1, 5)] == [None, None, 5]
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        assert asked_decoder(D2F(), {name: 7}, 0).max_new_tokens == 7
    for asked, said in (
        ({"typical_p": 0.5, "num_beams": 4}, "gen_kwargs: num_beams, typical_p is not honoured"),
        ({"do_sample": "yes"}, "do_sample must be true or false, got 'yes'"),
        ({"max_gen_toks": 0}, "max_new_tokens must be a whole number"),
    ):
        with pytest.raises(InputError, match=said):
            asked_decoder(D2F(), asked, 0)


def test_answers_that_are_asked_for_again_are_others_and_a_copy_is_not_run():
    """lm-eval gives a request k times for k answers; at a temperature they differ. To processes
    with fewer requests it gives their last again."""
    sampled = {"max_gen_toks": 16, "do_sample": True, "temperature": 1.5}
    once = generation("a", repeats=3, **sampled)
    others = [generation("a", document=i, **sampled) for i in (1, 2)]
    model = lm()
    first = model.generate_until([once] * 3 + others + others[1:], True)
    assert len(set(first[:5])) == 5 and first[5] == first[4]
    assert model.get_model_info()["d2f"]["tasks"]["t"]["generation"]["requests"] == 5
    assert lm().generate_until([others[1], *[once] * 3], True) == [first[4], *first[:3]]
    assert lm(seed=1).generate_until([others[1]], True) != [first[4]]
    kept, answers = distinct([once, others[0], once, once, once])
    assert [repeat for _, repeat in kept] == [0, 0, 1, 2] and answers == [0, 1, 2, 3, 0]


def test_a_prompt_too_long_loses_its_beginning_and_is_counted():
    model = lm("causal", decoder="autoregressive")
    long = " ".join(TEXTS * 20)
    room = model.max_length - 32
    (text,) = model.generate_until([generation(long, max_gen_toks=32)], True)
    cut = model.tokenizer(long)["input_ids"][-room:]
    (result,) = generate(model.model, [cut], Autoregressive(max_new_tokens=32))
    assert text == result.text
    figures = model.get_model_info()["d2f"]["tasks"]["t"]["generation"]
    assert figures["truncated_prompts"] == 1
    with pytest.raises(InputError, match="leaves no room for a prompt"):
        model.generate_until([generation("a", max_gen_toks=256)], True)


def test_chat_messages_are_written_as_the_template_writes_them(student):
    history = [
        {"role": "user", "content": "What is 2+3?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "And 4+5?"},
    ]
    text = student.apply_chat_template(history)
    assert text == student.tokenizer.apply_chat_template(
        history, tokenize=False, add_generation_prompt=True
    )
    assert student.tok_encode(text) == encode(student.tokenizer, history)
    begun = [*history, {"role": "assistant", "content": "The answer"}]
    assert student.apply_chat_template(begun, add_generation_prompt=False) == text + "The answer"


def test_the_first_token_of_a_text_is_not_doubled():
    """A tokenizer that begins every text so, and a template that writes it, too."""
    model = lm("llada")
    bos = model.tokenizer.eos_token
    number = model.tokenizer.eos_token_id
    tokenizer = type(model.tokenizer)(
        tokenizer_object=model.tokenizer._tokenizer, bos_token=bos, eos_token=bos
    )
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, number)]
    )
    model.tokenizer = tokenizer
    plain = model.tok_encode("a b")
    assert plain[0] == number and plain.count(number) == 1
    assert model.tok_encode(f"{bos}a b") == plain
    assert model.tok_encode("a b", add_special_tokens=False) == plain[1:]


def test_a_causal_models_likelihoods_are_those_of_transformers(tmp_path):
    model = random_model("causal")
    save_model(model, tmp_path, dtype=torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = D2FLM(str(tmp_path), device="cpu", batch_size=3)
    pairs = [(a, b) for a in TEXTS[:4] for b in (" 15", " He has 12 cookies.")] + [("", "Ann has")]
    requests = [likelihood(*pair, document=i) for i, pair in enumerate(pairs)]
    found = ours.loglikelihood(requests, True)
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        prompt = ids_of(model, context)
        target = ours.tok_encode(context + continuation)[len(prompt) if context else 0 :]
        with torch.inference_mode():
            logs = stock(torch.tensor([prompt + target])).logits[0].double().log_softmax(-1)
        rows = logs[len(prompt) - 1 : -1]
        expected = rows[torch.arange(len(target)), torch.tensor(target)].sum()
        assert value == pytest.approx(float(expected), rel=1e-5)
        assert greedy == (rows.argmax(-1).tolist() == target)
    figures = ours.get_model_info()["d2f"]["tasks"]["t"]["likelihood"]
    assert "standard_errors" not in figures  # exact
    assert figures["requests"] == len(pairs)


def test_a_students_likelihoods_go_block_by_block(student):
    prompt = student.apply_chat_template([{"role": "user", "content": "What is 2+3?"}])
    ((value, _),) = student.loglikelihood([likelihood(prompt, " 5 pens")], True)
    ids = student.tok_encode(prompt)
    whole = student.tok_encode(prompt + " 5 pens")
    kind = Likelihood.of(student.model.contract, given=len(ids))
    (result,) = generate(student.model, [whole], [kind])
    assert len(result.likelihoods) == len(whole) - len(ids)
    assert value == sum(one.logprob for one in result.likelihoods)


def test_a_bidirectional_models_likelihoods_are_estimates_with_their_error():
    """Of the continuation's own tokens, with no end token behind them."""
    model, pairs = lm(mc_num=24, batch_size=5), [(TEXTS[0], " 15"), (TEXTS[1], " to make 22.")]
    requests = [likelihood(*pairs[i], document=7, number=i) for i in (0, 1)]
    found = model.loglikelihood(requests, True)
    errors = []
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        prompt = model.tok_encode(context)
        target = model.tok_encode(context + continuation)[len(prompt) :]
        score = MonteCarlo(24, 5).score(
            model.model, prompt, target, request_seed(0, prompt, target)
        )
        assert (value, greedy) == (score.loglikelihood, score.greedy)
        errors.append(score.standard_error)
    report = model.get_model_info()["d2f"]["tasks"]["t"]["likelihood"]
    assert report["standard_errors"]["7"] == pytest.approx(errors, rel=1e-3)
    assert report["mean_standard_error"] == pytest.approx(sum(errors) / 2)
    # Neither what else is asked nor in which order changes one.
    assert lm(mc_num=24, batch_size=5).loglikelihood(requests[::-1], True) == found[::-1]
    assert lm(mc_num=24, batch_size=5, seed=1).loglikelihood(requests, True) != found


@pytest.mark.parametrize("family", ["causal", "llada"])
def test_a_long_text_is_scored_window_by_window(family):
    model = lm(family, mc_num=8, check_greedy=False, batch_size=16)
    long, short = " ".join(TEXTS * 9), TEXTS[3]
    values = model.loglikelihood_rolling([rolling(long), rolling(short, document=1)], True)
    tokens = model.tok_encode(long)
    assert len(tokens) > model.max_length
    windows = model.windows(long)
    assert [token for _, target in windows for token in target] == tokens
    assert max(len(prompt) + len(target) for prompt, target in windows) <= model.max_length
    requests = [(("", ""), *pair) for pair in windows]
    each = model._loglikelihood_tokens(requests)
    assert values[0] == pytest.approx(sum(value for value, _ in each))
    own = model._loglikelihood_tokens([(("", ""), [model.prefix_token_id], ids_of(model, short))])
    assert values[1] == pytest.approx(own[0][0])
    report = model.get_model_info()["d2f"]["tasks"]["t"]["rolling likelihood"]
    assert report["tokens"] == len(tokens) + len(ids_of(model, short))
    if family == "causal":  # exact
        assert "standard_errors" not in report
        return
    each = [s.standard_error for _, s in model.scores(windows)]
    assert len(each) > 1
    expected = sum(error**2 for error in each) ** 0.5  # windows are drawn apart
    assert report["standard_errors"]["0"] == [pytest.approx(expected, rel=1e-3)]


def test_forwards_and_tokens_are_counted_by_task():
    model = lm(decoder="threshold", tau=0.5, batch_size="auto", max_batch_size=2)
    assert (model.rank, model.world_size, model.batch_size) == (0, 1, 2)
    tasks = ["x", "y", "x"]
    requests = [generation(TEXTS[i], tasks[i], i, max_gen_toks=16) for i in range(3)]
    model.generate_until(requests, True)
    model.loglikelihood([likelihood("a", " b", "y")], True)
    found = model.get_model_info()["d2f"]["tasks"]
    for task, places in (("x", [0, 2]), ("y", [1])):
        prompts = [ids_of(model, TEXTS[i]) for i in places]
        results = generate(model.model, prompts, Threshold(tau=0.5, max_new_tokens=16))
        its = found[task]["generation"]
        assert its["requests"] == len(places)
        assert its["forwards"] == sum(r.forwards for r in results) > len(places)
        assert its["tokens"] == sum(len(r.tokens) for r in results)
        assert its["tokens_per_forward"] == its["tokens"] / its["forwards"]
        assert its["seconds"] > 0
    assert found["y"]["likelihood"]["requests"] == 1 and "likelihood" not in found["x"]
    assert model.get_model_info()["d2f"]["tasks"] == {}  # of what comes next


def test_a_cache_is_for_the_settings_that_made_it(tmp_path):
    requests = [generation(text, document=i, max_gen_toks=8) for i, text in enumerate(TEXTS)]
    place = str(tmp_path / "answers.db")
    first = lm(decoder="threshold", tau=0.5, batch_size=2)
    texts = CachingLM(first, place).generate_until(requests)
    again = lm(decoder="threshold", tau=0.5, batch_size=3)  # no answer depends on the batch
    assert CachingLM(again, place).generate_until(requests) == texts
    assert again.get_model_info()["d2f"]["tasks"] == {}
    for other, said in (
        (lm(decoder="threshold", tau=0.6), "tau': 0.5.*not .*tau': 0.6"),
        (lm(decoder="static"), "decoder 'threshold', not 'static'"),
        (lm("dream", decoder="threshold", tau=0.5), "weights '"),
        (lm(decoder="threshold", tau=0.5, mc_num=64), "mc_num 128, not 64"),
        (lm(decoder="threshold", tau=0.5, seed=1), "seed 0, not 1"),
    ):
        with pytest.raises(InputError, match=f"answers.db has answers of other settings: .*{said}"):
            CachingLM(other, place)
    with SqliteDict(str(tmp_path / "theirs.db"), autocommit=True) as theirs:
        theirs["abc"] = "an answer"
    with pytest.raises(InputError, match=r"theirs\.db has answers of other settings"):
        CachingLM(again, str(tmp_path / "theirs.db"))


def test_what_was_answered_before_an_interruption_is_not_asked_again(tmp_path):
    requests = [generation(text, document=i, max_gen_toks=8) for i, text in enumerate(TEXTS)]
    requests += [likelihood("a", f" {i}", document=i) for i in range(4)]
    place = str(tmp_path / "answers.db")
    for kind, its in (("generate_until", requests[:5]), ("loglikelihood", requests[5:])):
        model = lm(mc_num=8, batch_size=1)
        cached, added = CachingLM(model, place), []
        keep = model.cache_hook.add_partial

        def add(*given, keep=keep, added=added):
            if len(added) == 2:
                raise KeyboardInterrupt
            added.append(given)
            keep(*given)

        model.cache_hook.add_partial = add
        with pytest.raises(KeyboardInterrupt):
            getattr(cached, kind)(its)
        model = lm(mc_num=8, batch_size=1)
        found = getattr(CachingLM(model, place), kind)(its)
        (figures,) = model.get_model_info()["d2f"]["tasks"]["t"].values()
        assert figures["requests"] == len(its) - 2
        assert found == getattr(lm(mc_num=8, batch_size=1), kind)(its, True)


def test_bad_arguments_are_refused_before_weights_are_read(monkeypatch, student):
    assert [lm("causal").way, lm("llada").way] == ["left_to_right", "mc"]
    assert student.way == "left_to_right"
    monkeypatch.setattr("decode.harness.model.load", lambda options: pytest.fail("loaded"))
    for model, more, said in (
        ("tiny-d2f", {"tau_conf": 2.0}, r"tau_conf must lie in \[0, 1\], got 2"),
        ("tiny-d2f", {"tau": 0.5}, "the decoder d2f, .* has no option tau"),
        ("tiny-d2f", {"decoder": "autoregressive"}, "needs a causal model"),
        ("tiny-d2f", {"temperature": 0.5}, "temperature: a task says it itself, or --gen_kwargs"),
        ("tiny-d2f", {"mc_num": 0}, "mc_num must be a whole number of at least 1, got 0"),
        ("tiny-d2f", {"cfg": -1}, "cfg must be 0 or more, got -1"),
        ("tiny-d2f", {"batch_size": "many"}, "batch_size must be a whole number"),
        ("tiny-d2f", {"compile": "yes"}, "compile must be true or false"),
        ("tiny-ar", {"nll": "mc"}, "nll=mc: expected nll=left_to_right .* causal"),
        ("tiny-ar", {"cfg": 0.5}, "cfg=0.5: expected nll=left_to_right"),
        ("tiny-teacher", {"nll": "left_to_right"}, "expected nll=mc .* bidirectional"),
        ("tiny-teacher", {"nll": "elbo"}, "nll=elbo: expected nll=mc"),
        ("nowhere", {}, "nowhere: no such folder"),
    ):
        with pytest.raises(InputError, match=said):
            D2FLM(model, **more)
