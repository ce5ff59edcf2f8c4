"""What a server says of itself: models, tokens, counts, examples."""

from __future__ import annotations

from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import CHAT, Served, refused, stock
from tiny import random_model

import d2f
from d2f.tasks import DEFAULT_TASKS, check, make_problems
from decode.server.options import Options


def samples(served: Served) -> dict[str, float]:
    """Read the counts at /metrics, by name and labels."""
    families = text_string_to_metric_families(served.client.get("/metrics").text)
    return {
        " ".join([one.name, *(one.labels[name] for name in sorted(one.labels))]): one.value
        for family in families
        for one in family.samples
    }


def test_models_are_listed_with_the_decoders_that_fit(served):
    first, second = served.client.get("/v1/models").json()["data"]
    assert (first["id"], first["object"], first["max_model_len"]) == ("tiny-d2f", "model", 512)
    about = first["d2f"]
    assert (about["objective"], about["block_size"]) == ("d2f", 4)
    assert about["default_decoder"] == "d2f"
    names = [one["name"] for one in about["decoders"]]
    assert names[0] == "d2f" and "wino" in names and "autoregressive" not in names
    options = {one["name"]: one for one in about["decoders"][0]["options"]}
    assert (options["tau_conf"]["kind"], options["tau_conf"]["default"]) == ("float", 0.9)
    revoke = [options["revoke"][name] for name in ("kind", "default", "shown")]
    assert revoke == [["always", "commit"], None, "never"]
    assert second["d2f"]["default_decoder"] == "autoregressive"
    assert served.client.get("/v1/models/tiny-ar").json() == second


def test_only_decoders_that_the_operator_allows_are_taken():
    allowed = stock("m", random_model("llada"), options=Options(allow_decoders="wino"))
    with Served([allowed]) as served:
        (model,) = served.client.get("/v1/models").json()["data"]
        assert [one["name"] for one in model["d2f"]["decoders"]] == ["static", "wino"]
        body = {"model": "m", "prompt": [9], "max_tokens": 3}
        assert served.ask({**body, "decoder": "wino"})
        response = served.post("/v1/completions", {**body, "decoder": "d2f"})
        assert "one of static, wino" in refused(response, 400, "decoder", "decoder_not_found")


def test_tokens_of_text_and_chats_and_back(served, tiny_d2f):
    tokenizer = tiny_d2f.tokenizer

    def tokenize(**values):
        return served.ask(values, "/tokenize")

    ids = tokenizer("Use 3")["input_ids"]
    found = tokenize(model="tiny-d2f", prompt="Use 3", add_special_tokens=False)
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 512)
    assert len(tokenize(prompt="Use 3", return_token_strs=True)["token_strs"]) == len(ids)
    messages = CHAT["messages"]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    chat = tokenize(messages=messages)["tokens"]
    assert served.ask({"tokens": chat}, "/detokenize") == {"prompt": text}
    about = served.client.get("/tokenizer_info").json()
    for name in ("eos_token", "bos_token", "pad_token", "chat_template"):
        assert about[name] == getattr(tokenizer, name)


@pytest.mark.parametrize(
    ("path", "values", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/detokenize", {"tokens": [612]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_what_has_no_tokens_is_refused(served, path, values, field):
    refused(served.post(path, values), 400, field)


@pytest.mark.parametrize("kind", ["llada", "causal"])
def test_the_counts_are_those_of_the_answers(kind):
    """Those of likelihoods, too, which a causal model has."""
    with Served([stock("m", random_model(kind))]) as served:
        body = {"model": "m", "prompt": [9, 10], "max_tokens": 9, "ignore_eos": True}
        more = {"echo": True, "logprobs": 0} if kind == "causal" else {}
        usage = served.ask(body | more)["usage"]
        served.post("/v1/completions", {**body, "n": 0})
        served.client.get("/nothing")
        found = samples(served)
    cost = usage["d2f"]
    whose = f"{cost['decoder']} m"
    assert found[f"d2f_requests_total {whose} finished"] == 1
    assert found[f"d2f_tokens_total {whose}"] == usage["completion_tokens"] == 9
    assert found[f"d2f_prompt_tokens_total {whose}"] == 2
    for name in ("forwards", "rows"):
        assert found[f"d2f_request_{name}_total {whose}"] == cost[name]
    assert found[f"d2f_time_to_first_token_seconds_count {whose}"] == 1
    assert found["d2f_engine_rows_total m"] == cost["rows"]
    assert found["d2f_engine_slots_used m"] == 0 < found["d2f_engine_slots m"]
    assert found["d2f_http_responses_total /v1/completions 200"] == 1
    assert found["d2f_http_responses_total /v1/completions 400"] == 1
    assert found["d2f_http_responses_total none 404"] == 1  # whatever the path was
    if kind == "causal":
        assert found[f"d2f_inter_token_seconds_count {whose}"] == 8
        parts = ("time_to_first_token", "inter_token")
        spent = sum(found[f"d2f_{one}_seconds_sum {whose}"] for one in parts)
        assert 0 < spent <= found[f"d2f_request_seconds_sum {whose}"]
    else:
        assert found[f"d2f_tokens_per_forward_sum {whose}"] == 9 / cost["forwards"]
        assert found["d2f_engine_forwards_total m"] == cost["forwards"]


def test_health_version_and_readiness():
    with Served([stock("m", random_model("llada"))]) as served:
        assert served.client.get("/health").json() == {"status": "ok"}
        assert served.client.get("/version").json() == {"version": d2f.__version__}
        assert served.client.get("/ready").status_code == 200
        served.app.state.server.draining = True
        refused(served.client.get("/ready"), 503, code="not_ready")
        assert served.client.get("/health").status_code == 200
        body = {"model": "m", "prompt": [9], "max_tokens": 3}
        refused(served.post("/v1/completions", body), 503, code="stopping")
        served.app.state.server.draining = False
        served.client.portal.call(partial(served.models[0].engine.close, finish=False))
        refused(served.client.get("/ready"), 503, code="not_ready")
        refused(served.post("/v1/completions", body), 503, code="stopping")


def test_examples_are_problems_with_right_answers(served):
    found = served.client.get("/examples").json()
    for task in DEFAULT_TASKS:
        problems = make_problems(task, "heldout", 5)
        its = [one for one in found if one["task"] == task]
        assert [one["question"] for one in its] == [problem.question for problem in problems]
        assert all(map(check, problems, [one["answer"] for one in its]))
