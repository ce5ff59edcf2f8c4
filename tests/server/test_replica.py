"""What a replica does with calls and new models, without Ray; and what is known to be wrong before
Ray is started."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import aclosing

import pytest
from safetensors.torch import load_file, save_file

import decode.serve
from d2f.errors import InputError
from d2f.models import resolve
from decode.server.options import parse
from decode.server.ray_app import TOLD, Call, Replica, _beginning, application, together

SHORT = {"model": "m", "prompt": "Use 3 and 4 to make 12.", "max_tokens": 24, "ignore_eos": True}


def call(**values) -> Call:
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"x-request-id", b"one")],
    }  # fmt: skip
    return Call(scope, json.dumps({**SHORT, **values}).encode(), "")


async def ask(replica: Replica, **values) -> dict:
    """The answer to a request that does not stream."""
    messages = [one async for some in replica.answer(call(**values)) for one in some]
    assert [one["type"] for one in messages] == [
        TOLD, "http.response.start", "http.response.body",
    ]  # fmt: skip
    assert messages[0]["fields"]["id"] == "one" and messages[0]["fields"]["tokens"] > 0
    return json.loads(messages[2]["body"])["choices"][0]


@pytest.fixture
def adapter(tmp_path):
    """The student's adapter, in a folder that may be changed."""
    place = tmp_path / "adapter"
    shutil.copytree(f"{resolve('tiny-d2f')}/adapter", place)
    return place


def spoil(adapter) -> None:
    """Have it decode other tokens."""
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: -3 * w for name, w in weights.items()}, adapter / "adapter_model.safetensors")


def test_new_models_are_for_new_requests_and_no_request_is_lost(adapter):
    async def main() -> None:
        options = parse(["--model", "m=tiny-teacher", "--adapter", str(adapter)])
        replica = Replica(options)
        await replica.reconfigure({})
        before = await ask(replica)
        async with aclosing(replica.answer(call(stream=True, events=True))) as running:
            first = await anext(running)
            assert first[0]["type"] == "http.response.start" and first[1]["more_body"]
            spoil(adapter)
            await replica.reload()
            after = await ask(replica)
            rest = [one async for some in running for one in some]
        assert b"".join(one.get("body", b"") for one in rest).endswith(b"data: [DONE]\n\n")
        lines = b"".join(one.get("body", b"") for one in [*first, *rest]).split(b"\n\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        assert "".join(one["choices"][0]["text"] for one in chunks) == before["text"]
        assert after["text"] != before["text"]
        await replica.reconfigure({"adapter": f"{resolve('tiny-d2f')}/adapter"})
        assert await ask(replica) == before

    asyncio.run(main())


def test_models_that_cannot_be_loaded_leave_the_former_ones(adapter):
    async def main() -> None:
        replica = Replica(parse(["--model", "m=tiny-teacher", "--adapter", str(adapter)]))
        await replica.reconfigure({})
        before = await ask(replica)
        (adapter / "adapter_model.safetensors").write_bytes(b"nothing")
        with pytest.raises(InputError, match="adapter_model"):
            await replica.reload()
        with pytest.raises(InputError, match="expected adapter alone, got model"):
            await replica.reconfigure({"model": "tiny-ar"})
        assert await ask(replica) == before
        await replica.check_health()

    asyncio.run(main())


def test_who_leaves_the_answer_frees_its_row():
    async def main() -> None:
        replica = Replica(parse(["--model", "m=tiny-d2f"]))
        await replica.reconfigure({})
        (served,) = replica._app.state.server.models.values()
        async with aclosing(replica.answer(call(max_tokens=400, stream=True))) as running:
            await anext(running)
            assert served.engine.stats.running == 1
        while served.engine.stats.running:
            await asyncio.sleep(0.01)
        assert (served.engine.stats.cancelled, served.engine.stats.slots_used) == (1, 0)
        await served.engine.close()
        with pytest.raises(RuntimeError, match="an engine has ended"):
            await replica.check_health()

    asyncio.run(main())


def test_counts_of_replicas_are_told_apart():
    front = '# TYPE d2f_http_responses counter\nd2f_http_responses_total{route="/"} 7.0\n'
    each = (
        '# TYPE d2f_http_responses counter\nd2f_http_responses_total{route="/"} 5.0\n'
        '# TYPE d2f_tokens counter\nd2f_tokens_total{model="m"} 3.0\n'
    )
    lines = together(front + "d2f_tokens_total 9.0\n", {"a": each, "b": each}).decode().split("\n")
    assert [line for line in lines if line and not line.startswith("#")] == [
        "d2f_replicas 2.0",
        'd2f_http_responses_total{route="/"} 7.0',
        'd2f_tokens_total{model="m",replica="a"} 3.0',
        'd2f_tokens_total{model="m",replica="b"} 3.0',
    ]


def test_the_router_sees_how_a_prompt_begins():
    one, two = (
        _beginning(json.dumps({"messages": [{"role": "user", "content": text}]}).encode())
        for text in ("alike, and then this", "alike, and then that")
    )
    assert one.startswith("[{'role': 'user', 'content': 'alike") and one[:40] == two[:40] != one
    for body in (b"", b"[", b"[1]", b'{"prompt": ""}', b"[" * 5000):
        assert _beginning(body)  # Ray's router divides by its length


BAD = [
    (["--replicas", "0"], "--replicas must be at least 1, got 0"),
    (["--replicas", "2", "--max-replicas", "3"], "--replicas is a fixed number"),
    (["--replicas", "2", "--target-requests", "3"], "--target-requests needs --max-replicas"),
    (["--min-replicas", "2"], "--min-replicas needs --replicas or --max-replicas"),
    (["--replica-gpus", "1"], "--replica-gpus needs --replicas or --max-replicas"),
    (["--ray-address", "auto"], "--ray-address needs --replicas or --max-replicas"),
    (["--min-replicas", "3", "--max-replicas", "2"], "--min-replicas 3 is more than"),
    (["--max-replicas", "2", "--target-requests", "nan"], "--target-requests must be a number"),
    (["--replicas", "2", "--device", "cuda:1"], "Ray gives each replica a GPU of its own"),
    (["--replicas", "1000"], "--replicas 1000: there are cores for"),
    (["--max-replicas", "1000"], "--max-replicas 1000: there are cores for"),
    (["--replicas", "1", "--replica-gpus", "100"], "--replicas 1: there are cores with 100 GPU"),
    (["--replicas", "1", "--ray-address", "127.0.0.1:9"], "no Ray cluster can be used at"),
    (["--replicas", "1", "--ray-address", "nowhere"], "HOST:PORT"),
    (["--replicas", "1", "--decoder", "wedlm"], "the decoder wedlm fits none of the models"),
    (["--replicas", "1", "--adapter", "no-such"], "no-such"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=lambda v: " ".join(v)[:40])
def test_bad_replicas_are_one_line_before_any_is_started(arguments, says, capsys, monkeypatch):
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("it was started"))
    assert decode.serve.main(["--port", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("error: ") and error.count("\n") == 1


def test_without_ray_the_error_names_the_extra(capsys, monkeypatch):
    import decode.cli

    find = decode.cli.find_spec
    monkeypatch.setattr(decode.cli, "find_spec", lambda n: None if n == "ray" else find(n))
    assert decode.serve.main(["--replicas", "2"]) == 2
    assert "pip install 'd2f-toolkit[ray]'" in capsys.readouterr().err


def test_a_configuration_of_ray_is_checked_as_a_command_line():
    assert application({"model": "tiny-d2f", "tau-conf": 0.95, "allowed-host": ["a", "b"]})
    with pytest.raises(InputError, match="max-batch must be at least 1"):
        application({"max-batch": 0})
    with pytest.raises(InputError, match="num_replicas of the deployment"):
        application({"replicas": 2})
    with pytest.raises(InputError, match="unrecognized arguments"):
        application({"no-such": True})
