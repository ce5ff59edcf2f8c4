"""What cannot be decoded is refused in OpenAI's format, with the field's name, and the server goes
on serving."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import CHAT, Served, stock
from tiny import fresh_model

from decode.server.models import Settings

TEXT = {"model": "tiny-d2f", "prompt": "1+1", "max_tokens": 4}
MASK = 1  # id of the bundled models' mask token
JSON = {"content-type": "application/json"}


def refused(response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The message of an error in OpenAI's format."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    assert error["type"] == kinds.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    assert error["message"].isprintable() and len(error["message"]) < 2000
    return error["message"]


def test_the_mask_id_is_that_of_the_table_below(tiny_d2f):
    assert tiny_d2f.mask_id == MASK


FIELDS = [
    # field, value, what the message says, status
    ("model", "gpt-4", "no model 'gpt-4': expected one of tiny-d2f, tiny-ar", 404),
    ("model", 3, "model: expected text", 400),
    ("model", None, "model: expected a value, got nothing", 400),
    ("model", "\ud800", "no model", 404),
    ("prompt", None, "prompt: expected a value", 400),
    ("prompt", "", "prompt is empty", 400),
    ("prompt", [], "prompt is empty", 400),
    ("prompt", [[]], "prompt is empty", 400),
    ("prompt", ["1", ""], "prompt 1 is empty", 400),
    ("prompt", {"a": 1}, "prompt", 400),
    ("prompt", [1, "a"], "prompt", 400),
    ("prompt", [True], "prompt", 400),
    ("prompt", [1.0], "prompt", 400),
    ("prompt", "\ud800", "not Unicode text", 400),
    ("prompt", [5, 612], "ids must lie in [0, 612), got 612", 400),
    ("prompt", [-1], "ids must lie in [0, 612), got -1", 400),
    ("prompt", [2**70], "ids must lie in [0, 612)", 400),
    ("prompt", [5, MASK], "contains the mask id 1 at position 1", 400),
    ("prompt", "1<|mask|>", "contains the mask id 1 at position 1", 400),
    ("prompt", [5] * 510, "510 tokens and the response 4: the context", 400),
    ("prompt", [[5]] * 129, "at most 128 answers a request, prompts times n, got 129", 400),
    ("max_tokens", 0, "at least 1, got 0", 400),
    ("max_tokens", "4", "max_tokens: expected a whole number, got '4'", 400),
    ("max_tokens", 4.5, "max_tokens", 400),
    ("max_tokens", 10**9, "max_tokens: expected at most 1048576", 400),
    ("n", 0, "n: expected at least 1, got 0", 400),
    ("n", 2, "greedy decoding gives the same answer", 400),
    ("n", 200, "at most 128 answers", 400),
    ("n", True, "n: expected a whole number", 400),
    ("temperature", -1, "temperature must be 0 or more, got -1", 400),
    ("temperature", "hot", "temperature: expected a number, got 'hot'", 400),
    ("top_p", 0, "top_p must lie in (0, 1], got 0", 400),
    ("top_p", 2, "top_p must lie in (0, 1], got 2", 400),
    ("top_k", -2, "top_k must be a whole number of at least 1, got -2", 400),
    ("seed", 2**64, "seed must be a whole number in [-2^63, 2^64)", 400),
    ("seed", 1.5, "seed", 400),
    ("stop", "", "stop", 400),
    ("stop", ["a", 1], "stop", 400),
    ("stop", ["a"] * 33, "at most 32 of them, got a list of 33", 400),
    ("stop", "a" * 257, "stop", 400),
    ("stream", "yes", "stream: expected true or false", 400),
    ("stream_options", {"include_usage": True}, "stream_options needs stream", 400),
    ("stream_options", {"unknown": True}, "stream_options", 400),
    ("events", True, "events needs stream", 400),
    ("ignore_eos", 1, "ignore_eos: expected true or false", 400),
    ("user", 1, "user", 400),
    ("decoder", "os:system", "decoder must be one of d2f", 400),
    ("decoder", "decode.decoders.d2f:D2F", "decoder must be one of d2f", 400),
    ("decoder", "autoregressive", "decoder must be one of d2f", 400),
    ("decoder", 3, "decoder: expected text", 400),
    ("tau_conf", 1.5, "tau_conf must lie in [0, 1], got 1.5", 400),
    ("tau_conf", "a", "tau_conf must lie in [0, 1], got 'a'", 400),
    ("block_size", 0, "block_size must be a whole number of at least 1, got 0", 400),
    ("early_exit", 1, "early_exit must be true or false, got 1", 400),
    ("revoke", "never", "revoke must be one of always, commit", 400),
    ("tau", 0.5, "there is no field tau, and no such option of the decoder d2f", 400),
    ("max_new_tokens", 5, "there is no field max_new_tokens", 400),
    ("colour", "red", "there is no field colour", 400),
    ("tools", [{"type": "function"}], "tools is not supported", 400),
    ("response_format", {"type": "json_object"}, "response_format is not supported", 400),
    ("logit_bias", {"5": 1}, "logit_bias is not supported", 400),
    ("best_of", 2, "best_of is not supported", 400),
    ("frequency_penalty", 0.5, "frequency_penalty is not supported", 400),
    ("suffix", "a", "suffix is not supported", 400),
    ("logprobs", 2, "logprobs must be at most 1, got 2: a decoder that decides many", 400),
    ("logprobs", -1, "logprobs: expected at least 0", 400),
    ("logprobs", True, "logprobs: expected a whole number", 400),
    ("top_logprobs", 1, "there is no field top_logprobs", 400),
    ("repetition_penalty", True, "repetition_penalty is not supported", 400),
]


@pytest.mark.parametrize(
    ("field", "value", "says", "status"), FIELDS, ids=lambda v: repr(v)[:30].replace("\\", "")
)
def test_a_field_that_is_wrong_is_named(served, field, value, says, status):
    body = json.dumps({**TEXT, field: value})
    response = served.client.post("/v1/completions", content=body, headers=JSON)
    assert says in refused(response, status, field)
    assert served.ask(TEXT)["usage"]["completion_tokens"] <= 4


CHATS = [
    ("messages", [], "messages: expected at least 1"),
    ("messages", "hello", "messages: expected a list"),
    ("messages", None, "messages: expected a value"),
    ("messages", [{"role": "user"}], "content"),
    ("messages", [{"role": "tool", "content": "a"}], "role"),
    ("messages", [{"role": "user", "content": "a", "tool_calls": [{}]}], "tool_calls"),
    ("stream_options", {"include_obfuscation": True}, "expected False, got true"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "type"),
    ("messages", [{"role": "system", "content": "a"}], "role must be user or assistant"),
    ("messages", [{"role": "user", "content": "a " * 600}], "the context of tiny-d2f is 512"),
    ("messages", [{"role": "user", "content": "\ud800"}], "not Unicode text"),
    ("prompt", "a", "there is no field prompt"),
    ("echo", True, "there is no field echo"),
    ("max_completion_tokens", 0, "at least 1"),
    ("top_logprobs", 1, "top_logprobs needs logprobs"),
    ("logprobs", 1, "logprobs: expected true or false"),
    ("functions", [{}], "functions is not supported"),
]


@pytest.mark.parametrize(("field", "value", "says"), CHATS, ids=lambda v: repr(v)[:30])
def test_a_field_of_a_chat_that_is_wrong_is_named(served, field, value, says):
    body = json.dumps({**CHAT, "max_tokens": 4, field: value})
    response = served.client.post("/v1/chat/completions", content=body, headers=JSON)
    assert says in refused(response, 400, field)
    served.ask({**CHAT, "max_tokens": 4}, "/v1/chat/completions")


def test_two_lengths_have_to_agree(served):
    body = {**CHAT, "max_tokens": 4, "max_completion_tokens": 5}
    response = served.post("/v1/chat/completions", body)
    assert "expected one" in refused(response, 400, "max_tokens")


BODIES = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b'"text"', "must be a JSON object, got str"),
    (b"[]", "must be a JSON object, got list"),
    (b"null", "must be a JSON object, got NoneType"),
    (b'{"temperature": NaN}', "NaN is no number of JSON"),
    (b'{"temperature": -Infinity}', "-Infinity is no number of JSON"),
    (b"[" * 200_000, "nested too deep"),
    (b'{"a":' * 100_000, "nested too deep"),
    (b"9" * 100_000, "not JSON"),
    (b"\xff\xfe{}", "not JSON"),
    (b"\x80", "not JSON"),
]


@pytest.mark.parametrize(("body", "says"), BODIES, ids=lambda v: repr(v)[:30])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_that_is_no_object_is_refused(served, path, body, says):
    response = served.client.post(path, content=body, headers=JSON)
    assert says in refused(response, 400)


def test_of_a_key_that_comes_twice_the_last_counts(served):
    body = b'{"model": "x", "model": "tiny-d2f", "prompt": "1+1", "max_tokens": 4}'
    assert served.client.post("/v1/completions", content=body, headers=JSON).status_code == 200


def test_a_body_of_another_type_is_refused(served):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = served.client.post(
            "/v1/completions", content=json.dumps(TEXT), headers={"content-type": kind}
        )
        assert "application/json" in refused(response, 415)
    packed = served.client.post(
        "/v1/completions",
        content=gzip.compress(json.dumps(TEXT).encode()),
        headers={**JSON, "content-encoding": "gzip"},
    )
    assert "expected no Content-Encoding, got gzip" in refused(packed, 415)


def test_a_neutral_value_of_what_is_not_supported_is_taken(served):
    neutral = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "best_of": 1, "logit_bias": {},
        "suffix": None, "store": False, "tools": [], "response_format": {"type": "text"},
        "logprobs": None, "prompt_logprobs": None, "echo": False, "top_k": -1, "n": 1,
        "user": "me", "seed": 3, "safety_identifier": "me", "prompt_cache_key": "mine",
    }  # fmt: skip
    assert served.ask({**TEXT, **neutral})["choices"] == served.ask(TEXT)["choices"]


def test_an_answer_of_another_server_may_be_sent_back(served):
    """OpenAI's has lists that are empty and fields that are null."""
    before = {"role": "assistant", "content": "12", "refusal": None, "audio": None}
    told = [{"role": "user", "content": "a"}, before, {"role": "user", "content": "b"}]
    plain = served.ask({**CHAT, "messages": told}, "/v1/chat/completions")
    told[1] |= {"annotations": [], "tool_calls": [], "function_call": None}
    assert (
        served.ask({**CHAT, "messages": told}, "/v1/chat/completions")["choices"]
        == (plain["choices"])
    )


def test_paths_and_methods_that_are_none(served):
    for path in ("/v1/embeddings", "/v2", "/page/../settings.py", "/page/none.js"):
        assert refused(served.client.get(path), 404)
    refused(served.client.get("/v1/completions"), 405)
    refused(served.client.delete("/v1/models"), 405)
    assert "no model 'a/b'" in refused(served.client.get("/v1/models/a/b"), 404, "model")


def test_monitors_may_ask_for_the_head_alone(served):
    for path in ("/", "/health", "/ready"):
        response = served.client.head(path)
        assert (response.status_code, response.content) == (200, b""), path


def test_a_template_that_wants_out_of_its_sandbox_is_refused(tiny_d2f):
    """And one that does not end, or wants all memory."""
    model = fresh_model("llada")
    model.tokenizer = type(model.tokenizer)(tokenizer_object=model.tokenizer.backend_tokenizer)
    templates = (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__.os.popen('touch /tmp/out').read() }}",
        "{{ 'a' * 10 ** 11 }}",
        "{% for",
    )
    with Served([stock("m", model), stock("tiny-d2f", tiny_d2f)]) as served:
        for template in templates:
            model.tokenizer.chat_template = template
            response = served.post("/v1/chat/completions", {**CHAT, "model": "m"})
            assert "chat template" in refused(response, 400, "messages"), template
            served.ask({**CHAT, "max_tokens": 4}, "/v1/chat/completions")


def test_a_body_that_is_too_large_is_refused(tiny_d2f):
    with Served([stock("tiny-d2f", tiny_d2f)], Settings(max_body=1000)) as served:
        response = served.post("/v1/completions", {**TEXT, "prompt": "1" * 1000})
        assert "more than 1000 bytes" in refused(response, 413)

        def parts():
            for _ in range(100):
                yield b" " * 100

        response = served.client.post("/v1/completions", content=parts(), headers=JSON)
        refused(response, 413)
        served.ask(TEXT)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner,
                                                                max_size=3),
    max_leaves=6,
)  # fmt: skip
names = st.sampled_from(sorted({row[0] for row in FIELDS} | {"messages", "echo", "logprobs"}))


@settings(max_examples=150)
@given(fields=st.dictionaries(names | st.text(max_size=6), values, max_size=4), chat=st.booleans())
def test_whatever_comes_is_answered_or_refused(served, fields, chat):
    """Never a 500."""
    base = {**CHAT, "max_tokens": 2} if chat else {**TEXT, "max_tokens": 2}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = json.dumps(base | fields)
    response = served.client.post(path, content=body, headers=JSON)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


MANY = 3000


@pytest.mark.parametrize(
    ("path", "more", "says"),
    [
        ("/v1/completions", {"prompt": [1.5] * MANY}, "prompt.0: expected"),
        ("/v1/completions", {"prompt": [[5, "a"]] * MANY}, "prompt.0.1: expected"),
        ("/v1/completions", {"prompt": ["a", [5, *["a"] * MANY]]}, "prompt.1.1: expected"),
        ("/v1/chat/completions", {"messages": ["a"] * MANY}, "messages.0: expected"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ["a"] * MANY}]},
            "messages.0.content.0: expected",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a", **{f"x{i}": 1 for i in range(MANY)}}]},
            f"at most 256 fields, got {MANY + 2}",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "stream_options": {f"x{i}": 1 for i in range(MANY)}},
            f"at most 256 fields, got {MANY}",
        ),
        ("/detokenize", {"tokens": ["a"] * MANY}, "tokens.0: expected"),
        ("/tokenize", {f"x{i}": 1 for i in range(MANY)}, "at most 256 fields"),
    ],
)
def test_of_thousands_of_faults_one_is_looked_for(served, path, more, says):
    # All of those in a body of megabytes would hold up everyone's requests for minutes.
    response = served.post(path, {"model": "tiny-d2f", **more})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert says in message and " more" not in message
