"""`decode.generate` and `decode.stream`: prompts, batches, stop strings, sampling, errors."""

from __future__ import annotations

import copy
import importlib
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import POISON, fresh_model, poisoned_model, random_model, tokenizer

import d2f
import decode
import decode.api
from d2f.errors import InputError, NonFiniteLogitsError
from decode.decoders import DECODERS
from decode.engine.prompts import fitted

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


def test_a_decoder_may_be_named(model):
    prompt = [5] * 240  # leaves 16 tokens of the context
    named, *two = decode.generate(model, [prompt] * 3, ["d2f", "static", decode.D2F()])
    assert named.tokens == two[1].tokens and len(two) == 2
    assert decode.generate(model, [prompt], "d2f")[0].tokens == named.tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decoder": "treshold"}, r"'treshold'; did you mean threshold\?; expected one of autoreg"),
        ({"decoder": "Threshold"}, "did you mean threshold"),
        ({"decoder": decode.D2F}, r"must be a Decoder, such as decode.D2F\(\), .* got "),
        ({"decoder": ["d2f", 7]}, "expected one decoder or 1, got 2"),
        ({"decoder": [7]}, "decoder must be a Decoder, .* got 7"),
        ({"model": "tiny-d2f"}, r"expected a model, as d2f.load\(...\) gives it, got 'tiny-d2f'"),
        ({"raw": "yes"}, "raw must be true or false, got 'yes'"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"max_rows": 0}, "max_rows must be a whole number of at least 1, got 0"),
        ({"on_error": "ignore"}, "on_error: got 'ignore'; expected one of raise, return"),
    ],
)
def test_a_bad_argument_is_refused_with_what_is_expected(model, given, message):
    with pytest.raises(InputError, match=message):
        decode.generate(**({"model": model, "prompts": ["Use 3"], "decoder": PIPELINE} | given))


def test_names_of_the_package():
    """`dir` shows what there is, a typing error is told the nearest name."""
    assert dir(decode) == sorted(decode.__all__) and dir(d2f) == sorted(d2f.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Treshold'; did you mean Threshold"):
        decode.Treshold  # noqa: B018


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


def texts(tokens: list[int]) -> list[str]:
    """The text of the first 0, 1, 2, ... tokens."""
    return [
        tokenizer().decode(tokens[:n], skip_special_tokens=True) for n in range(len(tokens) + 1)
    ]


@pytest.mark.parametrize(
    "decoder",
    [
        decode.D2F(4, tau_conf=0.2, max_new_tokens=16),
        decode.Static(4, 16),
        decode.Static(4, 16, steps=4),
    ],
)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_stop_string_over_two_tokens_cuts_inside_the_first(family, decoder):
    """The text ends where the string begins, in the middle of a token; that token, which is partly
    hidden, is not counted."""
    model, cases = random_model(family), 0
    for prompt in ([token, 5, 6] for token in range(7, 40, 2)):
        free = decode.generate(model, [prompt], decoder)[0]
        upto = texts(free.tokens)
        for n in range(1, len(free.tokens)):
            first, second = upto[n][len(upto[n - 1]) :], upto[n + 1][len(upto[n]) :]
            if len(first) < 2 or not second or "\ufffd" in first + second:
                continue
            stop = first[1:] + second[0]
            place = upto[-1].find(stop)
            if place != len(upto[n - 1]) + 1:
                continue  # it stands earlier, too
            cases += 1
            result = decode.generate(model, [prompt], replace(decoder, stop=(stop,)))[0]
            assert result.finish_reason == "stop"
            assert result.text == upto[-1][:place]
            assert result.tokens == free.tokens[: n - 1]
    assert cases, "no token of two characters was followed by another: nothing was tested"


@pytest.mark.parametrize(
    ("stop", "text"), [(("8", "18+"), "1"), (("+", "8+7="), "18"), (("7=", "+7=2"), "18+")]
)
def test_a_stop_string_within_another_cuts_the_same_at_any_width(stop, text):
    """The inner one ends first: a forward that settles one token ends there, and one that settles
    the outer one's end with it must not prefer the outer one, which begins first."""
    model = d2f.load("tiny-wedlm", device="cpu")
    question = "Raj has 18 stamps. He buys 7 more. How many stamps does Raj have now?"
    plain = decode.Autoregressive(64, stop=stop)
    wide = decode.WeDLM(window=16, verify="ar", max_new_tokens=64, stop=stop)
    one, many = (decode.generate(model, question, way)[0] for way in (plain, wide))
    assert len(many.raw_tokens) > len(one.raw_tokens)  # it settled what follows, too
    assert one.text == many.text == text
    assert one.tokens == many.tokens


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


HOT = decode.D2F(4, tau_conf=0.2, max_new_tokens=12, temperature=1.5, seed=3)


def test_equal_prompts_and_samples_of_one_give_different_answers_the_same_each_time(model):
    prompts = ["Use 3", "Use 9", "Use 3"]
    results = decode.generate(model, prompts, HOT, n=2)
    answers = [tuple(result.raw_tokens) for result in results]
    assert len({answers[i] for i in (0, 1, 4, 5)}) == 4
    assert len({result.seed for result in results}) == 6 and results[0].seed == HOT.seed
    own = decode.generate(model, prompts[1:], [HOT, HOT], n=2)  # a decoder of its own for each
    assert own[2].raw_tokens == results[0].raw_tokens
    assert [result.seed for result in own][0::2] == [HOT.seed, HOT.seed]
    again = decode.generate(model, prompts, HOT, n=2, batch_size=1)
    assert [r.raw_tokens for r in again] == [r.raw_tokens for r in results]
    for prompt, result in zip([p for p in prompts for _ in range(2)], results, strict=True):
        alone = decode.generate(model, prompt, replace(HOT, seed=result.seed))[0]
        assert alone.raw_tokens == result.raw_tokens


def test_greedy_samples_are_equal(model):
    results = decode.generate(model, ["Use 3", "Use 9"], PIPELINE, n=2)
    assert results[0].tokens == results[1].tokens != results[2].tokens == results[3].tokens
    assert {result.seed for result in results} == {0}
    found = decode.generate(model, ["Use 3", ""], PIPELINE, n=2, on_error="return")
    assert [result.error is None for result in found] == [True, True, False, False]


def test_where_no_decoder_is_named_it_is_the_one_that_suits_the_model():
    model, prompt, result = fresh_model("llada"), [5, 6], decode.Static(max_new_tokens=8)
    model.contract = replace(model.contract, response_length=8)
    (found,) = decode.generate(model, [prompt])
    assert found.tokens == decode.generate(model, [prompt], result)[0].tokens


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


def test_text_needs_a_tokenizer(llada):
    with pytest.raises(InputError, match="needs a tokenizer"):
        decode.generate(llada, "hello", PIPELINE)
    with pytest.raises(InputError, match="need a tokenizer"):
        decode.generate(llada, [[4, 5]], decode.D2F(4, max_new_tokens=4, stop=("x",)))


def test_an_iterator_of_prompts_is_drawn_from_as_requests_enter(model):
    """With a decoder for each, or one for all."""
    prompts = [[9 + i, 10, 11] for i in range(7)]
    decoders = [PIPELINE, decode.Static(4, 8), HOT] * 3
    drawn = []

    def draw():
        for prompt in prompts:
            drawn.append(prompt)
            yield prompt

    events = decode.stream(model, draw(), iter(decoders), batch_size=2)
    next(events)
    assert len(drawn) == 2, "no more than may enter"
    rest = [event.result for event in events if event.result is not None]
    want = decode.generate(model, prompts, decoders[:7], batch_size=3)
    assert sorted(r.raw_tokens for r in rest) == sorted(r.raw_tokens for r in want)
    assert events.forwards > 0
    shared = decode.generate(model, iter(prompts), HOT, batch_size=3)
    want = decode.generate(model, prompts, HOT)
    assert [r.raw_tokens for r in shared] == [r.raw_tokens for r in want]
    with pytest.raises(InputError, match="prompt 1 is empty"):
        list(decode.stream(model, iter([[9], []]), PIPELINE))


BAD_PROMPTS = [("", "is empty"), ([4, 1], "mask id"), ([10**6], "ids must lie in"), ([4] * 250, "")]


@pytest.mark.parametrize(("bad", "message"), BAD_PROMPTS)
def test_a_bad_prompt_or_request_fails_alone_where_asked(bad, message):
    poisoned = poisoned_model()
    good = [[9, 10, 11], [30, 31]]
    alone = [decode.generate(poisoned, [p], HOT)[0] for p in good]
    asked = [good[0], bad, [9, POISON], good[1]]
    results = decode.generate(poisoned, asked, [HOT] * 4, on_error="return")
    assert [r.error is None for r in results] == [True, False, False, True]
    assert [results[i].raw_tokens for i in (0, 3)] == [r.raw_tokens for r in alone]
    assert "prompt 1" in str(results[1].error) and message in str(results[1].error)
    assert isinstance(results[1].error, InputError)
    assert isinstance(results[2].error, NonFiniteLogitsError)
    for result in results[1:3]:
        assert (result.tokens, result.finish_reason) == ([], "error")
        assert result.tokens_per_forward == 0
    assert (results[1].forwards, results[2].forwards) == (0, 1)
    with pytest.raises(NonFiniteLogitsError, match="prompt 1: the model gave NaN"):
        decode.generate(poisoned, [[9], [POISON]], HOT)


@pytest.mark.parametrize("command", ["pipeline", "evaluate", "batch"])
def test_each_command_gives_its_max_rows_to_the_engine(command, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Two and two?"}\n')
    own = {
        "pipeline": ["--prompt", "Two and two?"],
        "evaluate": ["--tasks", "story", "--problems", "1"],
        "batch": ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")],
    }
    given, real = [], decode.api.Engine

    def engine(*arguments, max_rows, **options):
        given.append(max_rows)
        return real(*arguments, max_rows=max_rows, **options)

    monkeypatch.setattr(decode.api, "Engine", engine)
    shared = ["--model", "tiny-wedlm", "--device", "cpu", "--max-new-tokens", "4"]
    module = importlib.import_module(f"decode.{command}")
    assert module.main([*shared, *own[command], "--max-rows", "7"]) == 0
    assert 7 in given
