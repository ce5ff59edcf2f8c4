"""The `openai` client, which nobody here wrote, against a server that listens."""

from __future__ import annotations

import openai
import pytest
from openai import OpenAI
from serving import PATIENCE, QUESTION, listening, stock
from tiny import random_model

import decode
from decode.engine.likelihood import Likelihood
from decode.server.app import create_app
from decode.server.options import Options

MESSAGES = [{"role": "user", "content": QUESTION}]
CHAT = {"model": "tiny-d2f", "messages": MESSAGES}
RAW = f"<|user|>{QUESTION}<|assistant|>"


@pytest.fixture(scope="module")
def client(address):
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


@pytest.fixture(scope="module")
def plain(tiny_d2f):
    return decode.generate(tiny_d2f, QUESTION, "d2f")[0]


def text_of(chunks, index=0):
    parts = [one for chunk in chunks for one in chunk.choices if one.index == index]
    texts = [one.delta.content if hasattr(one, "delta") else one.text for one in parts]
    return "".join(text or "" for text in texts)


def test_models_answers_and_streams(client, plain):
    assert [model.id for model in client.models.list()] == ["tiny-d2f", "tiny-ar"]
    assert client.models.retrieve("tiny-ar").id == "tiny-ar"
    answer = client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == plain.text != ""
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(plain.tokens)
    assert answer.usage.d2f["forwards"] == plain.forwards
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options))
    assert text_of(chunks) == plain.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.d2f["forwards"] == plain.forwards
    assert chunks[-1].usage.total_tokens == plain.prompt_tokens + len(plain.tokens)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    asked = {"model": "tiny-d2f", "prompt": RAW}
    assert client.completions.create(**asked).choices[0].text == plain.text
    assert text_of(client.completions.create(**asked, stream=True)) == plain.text


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


BAD = [
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"extra_body": {"nonsense": 1}}, "nonsense"),
    ({"max_tokens": 10**6}, "messages"),
]


def test_errors_are_the_clients_exceptions(client, tiny_d2f):
    for more, param in BAD:
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(**CHAT | more)
        assert (bad.value.param, bad.value.type) == (param, "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny-d2f", input="x")
    models = [stock("tiny-d2f", tiny_d2f), stock("m", random_model("llada"))]
    with listening(create_app(models, Options(api_key=("right",)))) as address:
        with OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                stranger.models.list()
        with OpenAI(base_url=f"{address}/v1", api_key="right", max_retries=0) as owner:
            asked = {"model": "m", "prompt": [9], "echo": True, "logprobs": 1, "max_tokens": 1}
            with pytest.raises(openai.BadRequestError, match="llada is bidirectional") as bad:
                owner.completions.create(**asked)
            assert bad.value.param == "echo"
            for less in ("echo", "logprobs"):
                with pytest.raises(openai.BadRequestError, match="at least 1, got 0") as bad:
                    owner.completions.create(**asked | {"max_tokens": 0, less: None})
                assert bad.value.param == "max_tokens"
