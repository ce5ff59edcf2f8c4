"""The `openai` client, which nobody here wrote, against a server that listens."""

from __future__ import annotations

import asyncio
import math

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from serving import PATIENCE, QUESTION, Gate, listening, stock, wait_until
from tiny import fresh_model, random_model

import decode
from decode.engine.likelihood import Likelihood
from decode.server.app import create_app
from decode.server.models import Settings

MESSAGES = [{"role": "user", "content": QUESTION}]
RAW = f"<|user|>{QUESTION}<|assistant|>"
SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": 12}


@pytest.fixture(scope="module")
def address(tiny_d2f, tiny_ar):
    models = [stock("tiny-d2f", tiny_d2f), stock("tiny-ar", tiny_ar)]
    with listening(create_app(models)) as found:
        yield found


@pytest.fixture(scope="module")
def client(address):
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


@pytest.fixture(scope="module")
def plain(tiny_d2f):
    return decode.generate(tiny_d2f, QUESTION, "d2f")[0]


def text_of(chunks, index=0):
    parts = [one for chunk in chunks for one in chunk.choices if one.index == index]
    return "".join(
        (one.delta.content if hasattr(one, "delta") else one.text) or "" for one in parts
    )


def test_the_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny-d2f", "tiny-ar"]
    assert client.models.retrieve("tiny-ar").id == "tiny-ar"


def test_a_chat_whole_and_as_a_stream(client, plain):
    asked = {"model": "tiny-d2f", "messages": MESSAGES}
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == plain.text != ""
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(plain.tokens)
    assert answer.usage.d2f["forwards"] == plain.forwards
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert text_of(chunks) == plain.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.d2f["forwards"] == plain.forwards
    assert chunks[-1].usage.total_tokens == plain.prompt_tokens + len(plain.tokens)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_completion_whole_and_as_a_stream(client, plain):
    asked = {"model": "tiny-d2f", "prompt": RAW}
    answer = client.completions.create(**asked)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (plain.text, "stop")
    assert text_of(client.completions.create(**asked, stream=True)) == plain.text


def test_the_async_client_asks_many_at_once(address, plain):
    async def main():
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:

            async def whole():
                answer = await client.chat.completions.create(model="tiny-d2f", messages=MESSAGES)
                return answer.choices[0].message.content

            async def stream():
                chunks = await client.completions.create(model="tiny-d2f", prompt=RAW, stream=True)
                return text_of([chunk async for chunk in chunks])

            return await asyncio.gather(*(ask() for ask in (whole, stream) for _ in range(6)))

    assert asyncio.run(main()) == [plain.text] * 12


def test_samples_with_a_seed_are_those_of_generate(client, tiny_d2f):
    decoder = decode.D2F(max_new_tokens=12, temperature=1.0, seed=3)
    want = [result.text for result in decode.generate(tiny_d2f, QUESTION, decoder, n=3)]
    assert len(set(want)) > 1
    asked = {"model": "tiny-d2f", "messages": MESSAGES, "n": 3, **SAMPLED}
    answer = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in answer.choices] == want
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert [text_of(chunks, i) for i in range(3)] == want


def test_stop_strings_end_the_text_and_are_not_in_it(client, plain):
    stop = [plain.text[4:6], "nowhere"]
    asked = {"model": "tiny-d2f", "messages": MESSAGES, "stop": stop}
    answer = client.chat.completions.create(**asked)
    want = plain.text[: plain.text.find(stop[0])]
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (want, "stop")
    assert text_of(client.chat.completions.create(**asked, stream=True)) == want


def test_options_of_a_decoder_come_in_extra_body(client, tiny_d2f):
    for tau in (0.5, 0.99):
        want = decode.generate(tiny_d2f, QUESTION, decode.D2F(tau_conf=tau))[0]
        answer = client.chat.completions.create(
            model="tiny-d2f", messages=MESSAGES, max_tokens=256,
            extra_body={"decoder": "d2f", "tau_conf": tau},
        )  # fmt: skip
        assert answer.choices[0].message.content == want.text
        cost = answer.usage.d2f
        assert (cost["decoder"], cost["forwards"]) == ("d2f", want.forwards)


def test_logprobs_of_a_response(client, tiny_d2f):
    decided = {}
    for event in decode.stream(tiny_d2f, QUESTION, "d2f"):
        decided |= {one.position: one for one in event.revealed}
    want = [math.log(decided[i].confidence) for i in range(len(event.result.tokens))]
    chat = {"model": "tiny-d2f", "messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    content = client.chat.completions.create(**chat).choices[0].logprobs.content
    assert [one.logprob for one in content] == want
    assert b"".join(bytes(one.bytes) for one in content).decode() == event.result.text
    assert all(one.top_logprobs[0].logprob == one.logprob for one in content)
    chunks = client.chat.completions.create(**chat, stream=True)
    parts = [c.choices[0].logprobs for c in chunks]
    assert [one.logprob for part in parts if part for one in part.content] == want
    for stream in (False, True):
        answer = client.completions.create(model="tiny-d2f", prompt=RAW, logprobs=0, stream=stream)
        parts = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
        # Here with that of the end token, as OpenAI gives it.
        *found, end = [one for part in parts for one in part.token_logprobs]
        assert found == want and end == math.log(decided[len(want)].confidence)
        *tokens, name = [token for part in parts for token in part.tokens]
        assert "".join(tokens) == event.result.text and name == "<|endoftext|>"


@pytest.mark.parametrize("name", ["tiny-ar", "tiny-d2f"])
def test_echo_with_logprobs_is_the_likelihood_of_the_prompt(client, request, name):
    """As lm-eval's local-completions asks for it: batches of ids, a token more; and without."""
    model = request.getfixturevalue(name.replace("-", "_"))
    prompts = [model.tokenizer(text)["input_ids"] for text in (RAW, "Use 5 <|user|> é")]
    kind = Likelihood.of(model.contract)
    known = [decode.generate(model, [ids], [kind])[0].likelihoods for ids in prompts]
    asked = {"model": name, "prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0}
    for more in (0, 1):
        answer = client.completions.create(**asked, max_tokens=more, seed=1)
        for choice, ids, likelihoods in zip(answer.choices, prompts, known, strict=True):
            found = choice.logprobs
            first = len(ids) - len(likelihoods)  # 1 where nothing predicts the first token
            assert found.token_logprobs[:first] == found.top_logprobs[:first] == [None] * first
            # one by one here, batched there: the same up to how sums are rounded
            alone = pytest.approx([one.logprob for one in likelihoods], rel=1e-5, abs=1e-5)
            assert found.token_logprobs[first : len(ids)] == alone
            greedy = [max(top.values()) for top in found.top_logprobs[first : len(ids)]]
            assert greedy == pytest.approx(
                [one.top_logprob for one in likelihoods], rel=1e-5, abs=1e-5
            )
            assert len(found.tokens) - len(ids) <= more
            assert choice.text.startswith(model.tokenizer.decode(ids))
            for token, start in zip(found.tokens, found.text_offset, strict=True):
                assert token.startswith("bytes:") or choice.text[start:].startswith(token)
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    chunks = list(client.completions.create(**asked, max_tokens=9, stream=True))
    whole = client.completions.create(**asked, max_tokens=9)
    for choice in whole.choices:
        assert text_of(chunks, choice.index) == choice.text
        parts = [c.choices[0].logprobs for c in chunks if c.choices[0].index == choice.index]
        for key, values in choice.logprobs.model_dump().items():
            assert [value for part in parts for value in getattr(part, key)] == values


def test_likelihoods_of_a_bidirectional_model_are_refused():
    asked = {"model": "m", "prompt": [9, 10, 11], "echo": True, "logprobs": 1, "max_tokens": 1}
    with listening(create_app([stock("m", random_model("llada"))])) as address:
        with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="llada is bidirectional") as found:
                client.completions.create(**asked)
            assert found.value.param == "echo"
            for less in ("echo", "logprobs"):
                with pytest.raises(openai.BadRequestError, match="at least 1, got 0") as found:
                    client.completions.create(**asked | {"max_tokens": 0, less: None})
                assert found.value.param == "max_tokens"


BAD = {
    "temperature": ({"temperature": -1}, "temperature"),
    "n": ({"n": 0}, "n"),
    "greedy n": ({"n": 2, "temperature": 0}, "n"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "logprobs": ({"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
    "decoder": ({"extra_body": {"decoder": "os:system"}}, "decoder"),
    "option": ({"extra_body": {"tau_conf": 3.0}}, "tau_conf"),
    "unknown": ({"extra_body": {"nonsense": 1}}, "nonsense"),
    "length": ({"max_tokens": 10**6}, "messages"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_a_bad_request_that_names_it(client, name):
    more, param = BAD[name]
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(**{"model": "tiny-d2f", "messages": MESSAGES} | more)
    assert found.value.param == param
    assert found.value.type == "invalid_request_error"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert found.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny-d2f", input="x")


def test_a_wrong_key_is_an_authentication_error(tiny_d2f):
    app = create_app([stock("tiny-d2f", tiny_d2f)], Settings(api_keys=("right",)))
    with listening(app) as address:
        for key, fine in (("right", True), ("wrong", False)):
            with OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client:
                if fine:
                    assert client.models.list().data
                    continue
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()


def test_a_full_queue_is_a_rate_limit_and_a_closed_stream_frees_its_slots():
    """One runs, one waits: a third is refused. Those that are left leave nothing behind."""
    model = fresh_model("llada")
    gate = Gate(model)
    served = stock("m", model, batch_size=1, max_waiting=1)
    asked = {"model": "m", "prompt": [9, 10, 11], "max_tokens": 64}
    stream = asked | {"stream": True, "extra_body": {"events": True}}  # a chunk a forward
    with listening(create_app([served])) as address:
        with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            try:
                gate.let(3)
                running = client.completions.create(**stream)
                next(iter(running))
                waiting = client.completions.create(**stream)
                wait_until(lambda: served.engine.stats.waiting == 1)
                with pytest.raises(openai.RateLimitError) as found:
                    client.completions.create(**asked)
                assert int(found.value.response.headers["retry-after"]) >= 1
                running.close()
                waiting.close()
            finally:
                gate.open()
            wait_until(lambda: served.engine.stats.cancelled == 2)
            wait_until(lambda: served.engine.stats.slots_used == 0)
            assert (served.engine.stats.running, served.engine.stats.waiting) == (0, 0)
            assert client.completions.create(**asked).choices[0].text
