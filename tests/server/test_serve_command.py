"""The command: what it refuses before it serves, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from importlib.util import find_spec

import httpx
import pytest
from serving import PATIENCE, command, listening, stock, wait_until

import decode.serve
from d2f.errors import InputError
from decode.cli import DecoderSettings
from decode.decoders.d2f import D2F
from decode.decoders.freedave import FreeDave
from decode.server import models
from decode.server.app import create_app
from decode.server.models import check_settings
from decode.server.options import Options, listening_at, parse

LONG = {"model": "tiny-ar", "prompt": [9], "max_tokens": 300, "ignore_eos": True}


def test_the_defaults_are_careful():
    options = parse([])
    assert options.named == {"tiny-d2f": "tiny-d2f"}
    assert (options.host, options.api_key, options.cors_origin) == ("127.0.0.1", (), ())
    assert not options.log_prompts and options.public_paths == ("/health", "/ready")
    assert parse(["--model", "a=tiny-d2f", "--model", "x/a=b"]).named == {
        "a": "tiny-d2f", "x/a=b": "x/a=b",
    }  # fmt: skip
    own = ("localhost", "127.0.0.1", "[::1]")
    for address, names in (
        ("127.0.0.1", own),
        ("::1", own),
        ("127.0.0.2", (*own, "127.0.0.2")),  # as much a loopback address as the first
        ("0.0.0.0", ("*",)),
        ("10.0.0.3", ("*",)),
    ):
        assert listening_at(options, address).allowed_host == names
    assert parse(["--allowed-host", "A.Example."]).allowed_host == ("a.example",)


def test_keys_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("D2F_API_KEY", "one two")
    assert parse([]).api_key == ("one", "two")
    for empty in ("", " \n"):  # as of a file that is not there: no reason to let everyone in
        monkeypatch.setenv("D2F_API_KEY", empty)
        with pytest.raises(InputError, match="D2F_API_KEY is set and has no key"):
            parse([])
        assert parse(["--api-key", "three"]).api_key == ("three",)


BAD = [
    (["--model", "tiny-d2f", "--model", "tiny-d2f"], "two are called tiny-d2f"),
    (["--model", "tiny-d2f", "--model", "tiny-ar", "--adapter", "x"], "--adapter is for one model"),
    (["--max-batch", "0"], "--max-batch must be at least 1"),
    (["--port", "70000"], "--port must be at most 65535"),
    (["--allowed-host", "http://x"], "--allowed-host must be a name or address without port"),
    (["--cors-origin", "x.example"], "--cors-origin must be like https://a.example:8443 or *"),
    (["--public", "/v1/models"], "--public must be some of /health,/ready,/metrics"),
    (["--allow-decoders", "d2f,none"], "decoder: got 'none'; expected one of"),
    (["--tau-conf", "2", "--decoder", "d2f"], "tau_conf must"),
    (["--model", "no-such-model"], "no-such-model"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=lambda v: " ".join(v)[:40])
def test_a_bad_command_line_is_one_line(arguments, says, capsys):
    given = arguments if "--port" in arguments else ["--port", "0", *arguments]
    assert decode.serve.main(given) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("error: ") and error.count("\n") == 1


def test_what_is_known_before_a_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(models, "load_models", lambda *_: pytest.fail("it was loaded"))
    assert decode.serve.main(["--api-key", "se cret"]) == 2
    assert "cret" not in capsys.readouterr().err  # a key is not shown
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert decode.serve.main(["--port", str(port)]) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
    find = find_spec
    monkeypatch.setattr("d2f.command.find_spec", lambda n: None if n == "uvicorn" else find(n))
    assert decode.serve.main([]) == 2
    error = capsys.readouterr().err
    assert "needs uvicorn" in error and "pip install 'd2f-toolkit[serve]'" in error


def test_sanitizing_needs_a_transformers_that_can(monkeypatch, capsys):
    monkeypatch.setattr(
        models.transformers.PreTrainedTokenizerBase, "apply_chat_template", lambda self: None
    )
    assert decode.serve.main(["--port", "0", "--sanitize-content"]) == 2
    assert "--sanitize-content needs transformers 5.23, got" in capsys.readouterr().err


def test_an_option_that_fits_no_model_is_refused(tiny_ar, tiny_d2f):
    with pytest.raises(InputError, match=r"none of the models .* the options tau_conf"):
        check_settings([tiny_ar], DecoderSettings(None, {"tau_conf": 0.5}))
    with pytest.raises(InputError, match="the decoder d2f fits none of the models"):
        check_settings([tiny_ar], DecoderSettings("d2f", {}))
    check_settings([tiny_ar, tiny_d2f], DecoderSettings(None, {"tau_conf": 0.5}))
    check_settings([tiny_ar, tiny_d2f], DecoderSettings("d2f", {"temperature": 1.0}))


def test_one_request_may_not_hold_up_all_others(tiny_d2f, capsys):
    """By default it has slots for what decoders do unless they are told to do more."""
    words = ["--model", f"m={tiny_d2f.path}", "--max-model-len", "9999", "--max-rows", "40"]
    (served,) = models.load_models(parse(words))
    asyncio.run(served.engine.close())
    assert served.context_length == tiny_d2f.context_length == 512
    assert "has a context of 512, which holds" in capsys.readouterr().err
    most = models.most_slots(tiny_d2f, None)
    assert served.engine._engine.request_slots == most < served.engine.stats.slots
    assert models.most_slots(tiny_d2f, 100) < most

    def slots(kind, **options) -> int:
        return kind(max_new_tokens=511, **options).begin([5], tiny_d2f.contract).slots

    kinds = stock("m", tiny_d2f).decoders.values()
    assert max(map(slots, kinds)) <= most
    assert slots(FreeDave, drafts=8) > most and slots(D2F, lossless=8) > most


@pytest.mark.slow
def test_a_signal_lets_what_runs_finish_and_refuses_what_comes():
    with command("--model", "tiny-ar", "--log-format", "json") as (process, client, log):
        body = {**LONG, "stream": True, "events": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            found = response.iter_lines()
            next(found)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: "stopping" in log.read_text())
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "stopping"
            assert client.get("/ready").status_code == 503
            rest = [line for line in found if line]
            assert rest[-1] == "data: [DONE]" and len(rest) >= 299
        assert process.wait(PATIENCE) == 0
        lines = log.read_text().splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    assert {entry.get("status", 200) for entry in entries} == {200, 503}
    assert not [line for line in lines if "leaked" in line]  # triton's, at the process's end


def test_a_second_signal_cancels_what_runs(tiny_ar):
    app = create_app([stock("tiny-ar", tiny_ar)], Options(drain_seconds=600))
    with listening(app) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        body = {**LONG, "stream": True, "prompt": [[9]] * 16}
        with client.stream("POST", "/v1/completions", json=body) as response:
            found = response.iter_lines()
            next(found)
            app.state.uvicorn.handle_exit(signal.SIGINT, None)
            wait_until(lambda: app.state.server.draining)
            app.state.uvicorn.handle_exit(signal.SIGINT, None)
            rest = [line for line in found if line]
        assert json.loads(rest[-1][6:])["error"]["code"] == "stopping"
