"""Training data as a stream of samples: lengths, padding, order, tokenizers that do not fit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from data_rows import END, MASK, long_rows, pairs, run_settings, samples, settings, stream, write
from hypothesis import given
from hypothesis import strategies as st
from tiny import fresh_model, random_model, tokenizer
from tokenizers.processors import TemplateProcessing

from d2f import noise
from d2f.convert import build
from d2f.errors import CheckpointError, InputError
from d2f.saving import save_model
from d2f.tasks import make_problem
from d2f.tasks.task import RESPONSE_LENGTH
from distill.data.samples import Encoder, kept_tokens
from distill.data.stream import Stream, fill_rows
from distill.objectives import OBJECTIVES
from distill.train import train

# Lengths


@given(
    prompt=st.integers(1, 40),
    response=st.integers(1, 40),
    row_length=st.integers(1, 50),
    max_prompt=st.none() | st.integers(1, 50),
    max_response=st.none() | st.integers(1, 50),
    on_long=st.sampled_from(["error", "drop", "truncate"]),
)
def test_what_is_kept_fits_and_nothing_that_fits_is_lost(
    prompt, response, row_length, max_prompt, max_response, on_long
):
    limits = {"max_prompt": max_prompt, "max_response": max_response, "row_length": row_length}
    data = settings(file="x", on_long=on_long, **limits)
    (kept,) = kept_tokens(np.array([prompt]), np.array([response]), data)
    room = min(row_length - prompt, max_response or 99)
    fits = room >= 1 and prompt <= (max_prompt or 99)
    whole = fits and response <= room
    cut = fits and not whole and on_long == "truncate"
    assert kept == (response if whole else room if cut else 0)


def test_long_rows_are_named_or_dropped_or_cut_and_counted(tmp_path):
    """A long prompt is never cut, and a cut response has no end token."""
    path = long_rows(tmp_path / "long.jsonl")
    limits = {"max_response": 30, "row_length": 60}
    dropped = stream(file=path, on_long="drop", **limits)
    assert len(samples(dropped)) == 10
    assert dropped.report() == (
        f"{path}: 10 of 13 rows used, 1 dropped for a long prompt, 2 dropped for a long response"
    )
    cut = stream(file=path, on_long="truncate", short_tail=9, **limits)
    found = samples(cut)
    long = [s for s in found if END not in s.response]
    assert len(found) == 12 and [len(s.response) for s in long] == [30, 30]
    assert [s.answer for s in long] == [30, 30]
    assert "12 of 13 rows used, 2 of them with a cut response, 1 dropped for a long prompt" in (
        cut.report()
    )
    named = r"long\.jsonl, line 11: .* response 42, data\.max_response is 30, .*on_long: drop or tr"
    with pytest.raises(InputError, match=named):
        stream(file=path, max_response=30, row_length=400)
    with pytest.raises(InputError, match=r"no row is left to train on; .* 13 dropped for a long p"):
        stream(file=path, max_prompt=1, on_long="truncate")


def test_rows_are_encoded_once(tmp_path, monkeypatch):
    """And again only where the data, the tokenizer or what makes tokens of them is another."""
    path = write(tmp_path / "d.jsonl", [*pairs(9), "{"])
    counted = []
    encode = Encoder.encode_rows

    def counting(self, batch):
        counted.append(len(next(iter(batch.values()))))
        return encode(self, batch)

    monkeypatch.setattr(Encoder, "encode_rows", counting)

    def opened(**changes):
        counted.clear()
        found = stream(file=str(path), on_bad_row="skip", on_long="truncate", **changes)
        return found.report(), sum(counted)

    first, times = opened()
    assert times == 10 and "line 10: not JSON" in first
    assert opened() == (first, 0)
    assert opened(max_response=5)[1] == 0  # limits are judged on what is there
    assert opened(chat_template="none")[1] == 10
    write(path, [*pairs(8), {"prompt": "another", "response": "row"}, "{"])
    assert opened()[1] == 10


# Padding and the end of a response


def test_padding_is_not_trained_on_unless_asked(tmp_path):
    path = str(write(tmp_path / "d.jsonl", pairs(6)))
    plain = samples(stream(file=path))
    assert all(s.response.count(END) == 1 and len(s.response) == s.answer for s in plain)
    short = samples(stream(file=path, short_tail=3))
    tails = {len(s.response) - s.answer for s in short}
    assert max(tails) in (1, 2, 3) and all(
        s.response[s.answer :].count(END) in tails for s in short
    )


@pytest.mark.parametrize("objective", ["masked_diffusion", "d2f"])
def test_the_preset_of_the_published_code_trains_on_all_padding(tmp_path, objective):
    """Each row holds one sample, filled with end tokens, which count as any other token; masked
    ones are targets. With max_response that is the full length."""
    path = str(write(tmp_path / "d.jsonl", pairs(6)))
    data = {"file": path, "train_on_padding": True}
    noise = {"min_ratio": 1.0}  # everything masked
    more = {}
    if objective == "d2f":
        noise, more = {"low": 1.0, "high": 1.0}, {"init": "unused"}
    config = run_settings(tmp_path, data, objective, noise=noise, **more)
    model = fresh_model("llada")
    made = OBJECTIVES[objective](model, config)
    rows, _ = fill_rows(made.stream(), 0)
    assert [len(row) for row in rows] == [1, 1]
    for sample in (row[0].sample for row in rows):
        assert len(sample) == 96 and set(sample.response[sample.answer - 1 :]) == {END}
        assert made.importance(sample).min() == 1.0
    batch = made.batch(rows, slice(0, 2))
    assert len(batch.targets) == sum(len(row[0].sample.response) for row in rows)
    assert batch.weight.unique().numel() == 1 and (batch.targets == END).sum() > 50
    full = samples(stream(file=path, train_on_padding=True, max_response=20))
    assert {len(s.response) for s in full} == {20}
    tight = samples(stream(file=path, train_on_padding=True, max_response=20, row_length=24))
    assert {len(s) for s in tight} == {24}


def test_an_end_token_of_its_own(tmp_path):
    """The published data for LLaDA: answer, end-of-turn token, then the other end token."""
    path = str(write(tmp_path / "d.jsonl", pairs(2)))
    turn = tokenizer().get_vocab()["<|user|>"]
    found = stream(file=path, end_token="<|user|>", train_on_padding=True, ends=(END, turn))
    for sample in samples(found):
        assert sample.response[sample.answer - 1 :] == [turn] + [END] * (
            len(sample.response) - sample.answer
        )
    first = tokenizer().convert_ids_to_tokens(0)  # an id that a test for truth would take for none
    assert all(0 in s.response for s in samples(stream(file=path, end_token=first)))
    with pytest.raises(InputError, match=r"data\.end_token must be a token .* got '<eot>'"):
        stream(file=path, end_token="<eot>")
    with pytest.raises(InputError, match=rf"has id {turn}, but decoding stops at {END}"):
        stream(file=path, end_token="<|user|>")


# Tokenizers and models that do not fit


def test_a_tokenizer_without_chat_template(tmp_path):
    """The error says what to do; data.chat_template none takes prompts as they are."""
    path = str(write(tmp_path / "d.jsonl", [{"prompt": "2+3?", "response": "5"}]))
    bare = copy.deepcopy(tokenizer())
    bare.chat_template = None
    with pytest.raises(InputError, match=r"no chat template: take .* data.chat_template: none"):
        Stream(settings(file=path), bare, (END,), 0, True, MASK)
    found = Stream(settings(file=path, chat_template="none"), bare, (END,), 0, True, MASK)
    assert bare.decode(found.sample(0).prompt) == "2+3?"
    bare.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", 2)]
    )
    found = Stream(settings(file=path, chat_template="none"), bare, (END,), 0, True, MASK)
    assert bare.decode(found.sample(0).prompt) == "<|user|>2+3?"  # as decoding reads plain text
    assert bare.decode(found.sample(0).response) == "5<|endoftext|>"
    bare.chat_template = tokenizer().chat_template  # which writes special tokens by itself
    assert bare.decode(
        Stream(settings(file=path), bare, (END,), 0, True, MASK).sample(0).prompt
    ) == ("<|user|>2+3?<|assistant|>")
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]
    path = str(write(tmp_path / "m.jsonl", [{"messages": turns}]))
    with pytest.raises(InputError, match="line 1: several messages need a chat template"):
        Stream(settings(file=path, chat_template="none"), bare, (END,), 0, True, MASK)


@pytest.mark.parametrize("token", ["mask_token", "eos_token"])
def test_a_tokenizer_without_a_needed_token_is_an_error_before_any_work(tmp_path, token):
    bare = copy.deepcopy(tokenizer())
    setattr(bare, token, None)
    bare.save_pretrained(tmp_path / "bare")
    data = {"tasks": {"countdown": 1.0}}
    config = run_settings(tmp_path / "out", data, tokenizer=str(tmp_path / "bare"))
    with pytest.raises(CheckpointError, match=f"llada needs a tokenizer with a {token}, .* none"):
        train(config)
    assert not (tmp_path / "out").exists()
    if token == "mask_token":  # an autoregressive model needs none
        assert build("causal", bare, **config.model.model_dump()).mask_id is None
        save_model(random_model("llada"), tmp_path / "m", dtype=torch.float32, mask_id=None)
        with pytest.raises(InputError, match=r"/m: the family llada needs a mask id, got none"):
            train(run_settings(tmp_path / "out", data, init=str(tmp_path / "m")))


# Order


def test_each_epoch_has_each_row_once_in_an_order_of_its_own(tmp_path):
    path = str(write(tmp_path / "d.jsonl", pairs(40)))
    found = stream(file=path, seed=3)
    orders = [[found.row(epoch * 40 + i) for i in range(40)] for epoch in range(3)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    again = stream(file=path, seed=3)
    assert [again.row(i) for i in reversed(range(120))] == [
        row for order in orders for row in order
    ][::-1]
    assert [stream(file=path, seed=4).row(i) for i in range(40)] != orders[0]


def test_a_generated_sample_is_template_text_answer_and_a_tail_drawn_for_it_alone():
    """The tail ends with the row: else the first long prompt with a padded response would end a
    training."""
    given = {"tasks": {"countdown": 1.0}, "padded_share": 0.4, "short_tail": 5, "seed": 3}
    found, bare, tails = stream(**given), stream(tail=False, **given), set()
    for index in range(30):
        sample, rng = found.sample(index), noise.sample_rng(3, index, noise.TAIL)
        problem = make_problem("countdown", "train", index, 3)
        messages = [{"role": "user", "content": problem.question}]
        assert sample.prompt == tokenizer().apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        answer = [*tokenizer()(problem.answer, add_special_tokens=False)["input_ids"], END]
        padded = rng.random() < 0.4
        tail = RESPONSE_LENGTH["countdown"] - len(answer) if padded else int(rng.integers(6))
        assert sample.response == answer + [END] * tail and sample.answer == len(answer)
        assert bare.sample(index).response == answer
        tails.add((bool(padded), tail))
    assert len(tails) > 8
    padded = {"tasks": {"countdown": 1.0}, "padded_share": 1.0}
    whole = [stream(**padded).sample(i) for i in range(9)]
    limit = max(len(sample.prompt) + sample.answer for sample in whole)
    cut = stream(row_length=limit, **padded)
    for index, sample in enumerate(whole):
        assert sample.answer < len(sample.response)
        assert cut.sample(index).response == sample.response[: limit - len(sample.prompt)]
    short = stream(row_length=limit - 1, **padded)
    with pytest.raises(InputError, match=f"{limit} tokens, data.row_length is {limit - 1}"):
        short.check_generated(9)
