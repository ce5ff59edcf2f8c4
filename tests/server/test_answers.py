"""A server's answers are those of `decode.generate`, whatever runs beside them, whole or in
pieces."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest
from every_decoder import KINDS, exact_model
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import CHAT, QUESTION, Served, pieces, sse, stock

import decode
from decode.cli import DecoderSettings
from decode.decoders import Decoder
from decode.server.options import Options

PROMPT = [9, 10, 11]
COMMON = ("temperature", "top_p", "top_k", "seed")
RAW = f"<|user|>{QUESTION}<|assistant|>"


def asked(decoder: Decoder, model: str = "m") -> dict:
    """Write the fields that ask for a decoder."""
    values = {field.name: getattr(decoder, field.name) for field in fields(decoder)}
    values["max_tokens"] = values.pop("max_new_tokens")
    del values["stop"]
    given = {name: value for name, value in values.items() if value is not None}
    return {"model": model, "prompt": PROMPT, "decoder": decoder.name, **given}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_decoder_in_one_batch_gives_what_it_gives_alone(kind):
    """Greedy and sampled, half of them as streams, all at once."""
    model, decoders = exact_model(kind), KINDS[kind][1]
    # So many that no decoder speculates less for its share of them.
    rows = {"max_rows": 1000}
    alone = [decode.generate(model, PROMPT, one, **rows)[0] for one in decoders]
    with Served([stock("m", model, **rows)]) as served:

        def ask(place: int) -> tuple[str, dict]:
            body = asked(decoders[place])
            if place % 2:
                chunks = served.chunks({**body, "stream_options": {"include_usage": True}})
                return pieces(chunks), chunks[-1]["usage"]
            answer = served.ask(body)
            return answer["choices"][0]["text"], answer["usage"]

        with ThreadPoolExecutor(len(decoders)) as threads:
            found = list(threads.map(ask, range(len(decoders))))
    for decoder, result, (text, usage) in zip(decoders, alone, found, strict=True):
        assert text == result.text
        assert usage["prompt_tokens"] == len(PROMPT)
        assert usage["completion_tokens"] == len(result.tokens)
        assert usage["total_tokens"] == len(PROMPT) + len(result.tokens)
        cost = usage["d2f"]
        assert (cost["decoder"], cost["forwards"]) == (decoder.name, result.forwards)
        assert cost["rows"] == sum(fed for fed, _ in result.calls)
        assert cost["tokens_per_forward"] == round(result.tokens_per_forward, 4)
        assert cost["seed"] == (None if decoder.greedy else decoder.seed)


def test_an_empty_answer_has_its_likely_reason(served):
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    answer = served.ask({**CHAT, "messages": asked}, "/v1/chat/completions")
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["usage"]["d2f"]["notice"].startswith("1 answer is empty: the model may not know")
    assert served.ask(CHAT, "/v1/chat/completions")["usage"]["d2f"]["notice"] is None


def test_a_chat_of_text_in_parts_is_what_generate_makes_of_its_messages(served, tiny_d2f):
    (result,) = decode.generate(tiny_d2f, CHAT["messages"], decode.D2F(max_new_tokens=64))
    parts = [{"type": "text", "text": QUESTION[:7]}, {"type": "text", "text": QUESTION[7:]}]
    body = {**CHAT, "messages": [{"role": "user", "content": parts}], "max_completion_tokens": 64}
    (choice,) = served.ask(body, "/v1/chat/completions")["choices"]
    assert choice["message"] == {"role": "assistant", "content": result.text, "refusal": None}
    chunks = served.chunks(body, "/v1/chat/completions")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert pieces(chunks) == result.text
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert ends == [None] * (len(ends) - 1) + ["stop"] and choice["finish_reason"] == "stop"


def test_prompts_of_both_kinds_and_several_samples_in_order(served, tiny_ar):
    """The choice ``prompt * n + sample`` has the tokens and the seed of `decode.generate`."""
    ids = tiny_ar.tokenizer(RAW)["input_ids"]
    decoder = decode.Autoregressive(12, temperature=1.0, seed=11)
    results = decode.generate(tiny_ar, [RAW, ids], decoder, n=2, raw=True)
    body = {"model": "tiny-ar", "max_tokens": 12, "n": 2, "temperature": 1.0, "seed": 11}
    answer = served.ask({**body, "prompt": [RAW, ids]})
    assert [c["text"] for c in answer["choices"]] == [r.text for r in results]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert len({result.seed for result in results}) == 4
    assert answer["usage"]["prompt_tokens"] == 2 * len(ids)
    assert answer["usage"]["completion_tokens"] == sum(len(r.tokens) for r in results)
    assert answer["usage"]["d2f"]["seed"] == 11
    chunks = served.chunks({**body, "prompt": [RAW, ids]})
    assert [pieces(chunks, i) for i in range(4)] == [r.text for r in results]


def test_a_seed_that_is_not_given_is_drawn_and_said(served):
    body = {"model": "tiny-ar", "prompt": RAW, "temperature": 1.5, "max_tokens": 20}
    one, two = served.ask(body), served.ask(body)
    seeds = [answer["usage"]["d2f"]["seed"] for answer in (one, two)]
    assert seeds[0] != seeds[1]
    again = served.ask({**body, "seed": seeds[0]})
    assert again["choices"] == one["choices"]


def test_stop_strings_end_the_text_and_are_not_in_it(served, tiny_d2f):
    (whole,) = decode.generate(tiny_d2f, RAW, decode.D2F(max_new_tokens=64), raw=True)
    stop = whole.text[3:5]
    for given in (stop, [stop, "zzz"]):
        body = {"model": "tiny-d2f", "prompt": RAW, "stop": given}
        (choice,) = served.ask(body)["choices"]
        assert choice["text"] == whole.text[: whole.text.index(stop)]
        assert choice["finish_reason"] == "stop"
        assert pieces(served.chunks(body)) == choice["text"]


def test_usage_comes_when_it_is_asked_for(served):
    def usages(**options):
        more = {"stream_options": options} if options else {}
        return [c.get("usage", "none") for c in served.chunks({**body, **more})]

    body = {"model": "tiny-ar", "prompt": RAW, "max_tokens": 20}
    assert set(usages()) == {"none"}
    *before, last = usages(include_usage=True)
    assert before and set(map(str, before)) == {"None"}
    whole = served.ask(body)["usage"]
    assert last["completion_tokens"] == whole["completion_tokens"]
    growing = usages(include_usage=True, continuous_usage_stats=True)
    counts = [usage["completion_tokens"] for usage in growing]
    assert counts == sorted(counts) and 0 < counts[0] < counts[-1] == last["completion_tokens"]


def test_every_forward_is_an_event_where_they_are_asked_for(served, tiny_d2f):
    (result,) = decode.generate(tiny_d2f, RAW, decode.D2F(max_new_tokens=64), raw=True)
    chunks = served.chunks({"model": "tiny-d2f", "prompt": RAW, "max_tokens": 64, "events": True})
    events = [chunk["d2f"] for chunk in chunks]
    assert [event["forward"] for event in events] == list(range(1, result.forwards + 1))
    assert [(event["fed"], event["cached"]) for event in events] == result.calls
    assert pieces(chunks) == result.text
    first = events[0]["blocks"][0]
    assert (first["start"], first["end"]) == (0, 4) and len(first["tokens"]) == 4
    shown = [one for event in events for one in event["revealed"]]
    decode_one = tiny_d2f.tokenizer.decode
    assert all(one["text"] == decode_one([one["token"]]) for one in shown)
    assert events[-1]["settled"] >= len(result.tokens)
    assert all(event["revoked"] == [] for event in events)


def test_what_was_taken_back_is_an_event():
    """And no text of it was sent."""
    model = exact_model("llada student")
    decoder = decode.D2F(4, tau_conf=0.2, max_new_tokens=24, revoke="always", tau_revoke=0.6)
    with Served([stock("m", model)]) as served:
        chunks = served.chunks({**asked(decoder), "events": True})
    assert any(chunk["d2f"]["revoked"] for chunk in chunks)
    assert pieces(chunks) == decode.generate(model, PROMPT, decoder)[0].text


def test_the_operators_options_hold_where_a_request_says_nothing(tiny_d2f, tiny_ar):
    """Those that not every decoder has hold for the named one alone."""
    settings = DecoderSettings("d2f", {"tau_conf": 0.5, "max_new_tokens": 10, "temperature": 0.0})
    models = [stock("a", tiny_d2f, settings), stock("b", tiny_ar, settings)]
    with Served(models) as served:
        prompt = {"prompt": RAW, "ignore_eos": True}
        own = served.ask({"model": "a", **prompt})
        (alone,) = decode.generate(tiny_d2f, RAW, decode.D2F(tau_conf=0.5), raw=True)
        assert own["usage"]["completion_tokens"] == 10
        assert own["choices"][0]["text"].startswith(alone.text[:4])
        other = served.ask({"model": "b", **prompt})["usage"]
        assert other["completion_tokens"] == 10
        assert other["d2f"]["decoder"] == "autoregressive"
        changed = served.ask({"model": "a", **prompt, "max_tokens": 8, "tau_conf": 0.95})
        assert changed["usage"]["completion_tokens"] == 8
        found = {
            option["name"]: option["default"]
            for option in served.client.get("/v1/models/a").json()["d2f"]["decoders"][0]["options"]
        }
        assert (found["tau_conf"], found["max_new_tokens"]) == (0.5, 10)


def test_a_length_that_nobody_said_fits_the_context(tiny_d2f):
    with Served([stock("m", tiny_d2f, options=Options(max_model_len=20))]) as served:
        ids = tiny_d2f.tokenizer(RAW)["input_ids"]
        answer = served.ask({"model": "m", "prompt": [RAW, [5]], "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 20 - len(ids) + 19


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_answers_are_what_the_types_of_openai_write(served, path, stream):
    """To the byte: fields, their order, and which of them are left out."""
    chat = "chat" in path
    whole = ChatCompletionChunk if stream else ChatCompletion
    kind = whole if chat else Completion
    for logprobs in (True, False):
        body = CHAT if chat else {"model": "tiny-d2f", "prompt": "Use 3 and 4.", "echo": True}
        if logprobs:
            body = body | ({"logprobs": True} if chat else {"logprobs": 1, "echo": False})
        if stream:
            options = {"include_usage": True, "continuous_usage_stats": logprobs}
            body = body | {"stream": True, "stream_options": options}
        text = served.post(path, {**body, "max_tokens": 16}).text
        found = sse(text)[:-1] if stream else [text]
        assert found
        for one in found:
            # As their client reads it: the type of a completion's chunk knows no end that is null.
            read = kind.construct(**json.loads(one))
            written = read.model_dump(mode="json", exclude_unset=True)
            assert json.dumps(written, separators=(",", ":"), ensure_ascii=stream) == one
