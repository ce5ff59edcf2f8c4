"""The command: what it refuses before it serves, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from serving import PATIENCE, wait_until

import decode.serve
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.cli import DecoderSettings
from decode.decoders import Decoder
from decode.decoders.d2f import D2F
from decode.decoders.freedave import FreeDave
from decode.server import models as load_models
from decode.server import options as serve_flags
from decode.server.models import check_settings, fitting, own_names

ROOT = Path(__file__).parent.parent.parent
LONG = {"model": "tiny-ar", "prompt": [9], "max_tokens": 500, "ignore_eos": True}


def test_the_defaults_are_careful():
    options = serve_flags.parse([])
    assert options.named == {"tiny-d2f": "tiny-d2f"}
    assert (options.host, options.api_key, options.cors_origin) == ("127.0.0.1", (), ())
    assert not options.log_prompts and options.public_paths == ("/health", "/ready")


def test_models_have_names(tmp_path):
    parse = serve_flags.parse
    assert parse(["--model", "a=tiny-d2f", "--model", "tiny-ar"]).named == {
        "a": "tiny-d2f", "tiny-ar": "tiny-ar",
    }  # fmt: skip
    folder = str(tmp_path / "a=b")
    (tmp_path / "a=b").mkdir()
    assert parse(["--model", folder]).named == {folder: folder}


def test_a_server_for_this_machine_alone_has_its_own_names():
    own = ("localhost", "127.0.0.1", "[::1]")
    assert own_names("127.0.0.1") == own_names("::1") == own
    assert own_names("127.0.0.2") == (*own, "127.0.0.2")  # as much a loopback address as the first
    assert own_names("0.0.0.0") == own_names("10.0.0.3") == own_names("::") == ("*",)
    assert serve_flags.parse(["--allowed-host", "A.Example."]).allowed_host == ("a.example",)


def test_keys_come_from_the_environment_too(monkeypatch):
    monkeypatch.setenv("D2F_API_KEY", "one two")
    assert serve_flags.parse([]).api_key == ("one", "two")
    assert serve_flags.parse(["--api-key", "three"]).api_key == ("three",)
    for empty in ("", " \n"):  # as of a file that is not there: no reason to let everyone in
        monkeypatch.setenv("D2F_API_KEY", empty)
        with pytest.raises(InputError, match="D2F_API_KEY is set and has no key"):
            serve_flags.parse([])
        assert serve_flags.parse(["--api-key", "three"]).api_key == ("three",)


BAD = [
    (["--model", "tiny-d2f", "--model", "tiny-d2f"], "two are called tiny-d2f"),
    (["--model", "=a"], "must be NAME or ALIAS=NAME"),
    (["--model", "tiny-d2f", "--model", "tiny-ar", "--adapter", "x"], "--adapter is for one model"),
    (["--max-batch", "0"], "--max-batch must be at least 1"),
    (["--max-waiting", "-1"], "--max-waiting must be at least 0"),
    (["--port", "70000"], "--port must be at most 65535"),
    (["--body-timeout", "0"], "--body-timeout must be a number of seconds above 0"),
    (["--request-timeout", "nan"], "--request-timeout must be"),
    (["--send-timeout", "2000000"], "--send-timeout must be at most 1000000 seconds, got 2e+06"),
    (["--max-batch", "9999999"], "--max-batch must be at most 1000000"),
    (["--allowed-host", "http://x"], "--allowed-host must be a name or address without port"),
    (["--allowed-host", "x:80"], "--allowed-host must be a name or address without port"),
    (["--cors-origin", "x.example"], "--cors-origin must be like https://a.example:8443 or *"),
    (["--cors-origin", "https://x.example/"], "--cors-origin must be like"),
    (["--public", "/v1/models"], "--public must be some of /health,/ready,/metrics"),
    (["--allow-decoders", "d2f,none"], "decoder must be one of"),
    (["--tau-conf", "2", "--decoder", "d2f"], "tau_conf must lie in [0, 1]"),
    (["--tau-confidence", "2"], "unknown option"),
    (["--model", "no-such-model"], "--model no-such-model: expected a folder"),
    (["--config", "no-such"], "no-such"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=lambda v: " ".join(v)[:40])
def test_a_bad_command_line_is_one_line(arguments, says, capsys):
    assert decode.serve.main(["--port", "0", *arguments] if "--port" not in arguments else
                             arguments) == 2  # fmt: skip
    error = capsys.readouterr().err
    assert says in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_key_that_cannot_be_one_is_not_shown(capsys):
    assert decode.serve.main(["--api-key", "se cret"]) == 2
    assert "cret" not in capsys.readouterr().err


def test_a_port_in_use_is_known_before_a_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(load_models, "load_models", lambda *_: pytest.fail("it was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert decode.serve.main(["--port", str(port)]) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err
    assert decode.serve.main(["--host", "no.such.host.invalid"]) == 2


def test_without_the_extra_the_error_names_it(capsys, monkeypatch):
    import decode.cli

    find = decode.cli.find_spec
    monkeypatch.setattr(decode.cli, "find_spec", lambda n: None if n == "uvicorn" else find(n))
    assert decode.serve.main([]) == 2
    error = capsys.readouterr().err
    assert "needs uvicorn" in error and "pip install 'd2f-toolkit[serve]'" in error


def test_an_option_that_fits_no_model_is_refused(tiny_ar, tiny_d2f):
    with pytest.raises(InputError, match=r"none of the models .* the options tau_conf"):
        check_settings([tiny_ar], DecoderSettings(None, {"tau_conf": 0.5}))
    with pytest.raises(InputError, match="the decoder d2f fits none of the models"):
        check_settings([tiny_ar], DecoderSettings("d2f", {}))
    check_settings([tiny_ar, tiny_d2f], DecoderSettings(None, {"tau_conf": 0.5}))
    check_settings([tiny_ar, tiny_d2f], DecoderSettings("d2f", {"temperature": 1.0}))


def test_a_length_beyond_the_context_is_noticed(tiny_ar, capsys):
    options = serve_flags.parse(["--model", tiny_ar.path, "--max-model-len", "99999"])
    (served,) = load_models.load_models(options, DecoderSettings(None, {}))
    assert served.context_length == tiny_ar.context_length
    holds = f"has a context of {tiny_ar.context_length}, which holds"
    assert holds in capsys.readouterr().err
    asyncio.run(served.engine.close())


def test_one_request_may_not_hold_up_all_others(tiny_d2f, tiny_ar):
    for model in (tiny_d2f, tiny_ar):
        most = load_models.most_slots(model, 100)
        (served,) = load_models.load_models(
            serve_flags.parse(["--model", model.path, "--max-model-len", "100"]),
            DecoderSettings(None, {}),
        )
        engine = served.engine._engine
        assert engine.request_slots == most < engine.pool.slots
        asyncio.run(served.engine.close())
    most = load_models.most_slots(tiny_d2f, None)

    def slots(decoder: Decoder) -> int:
        return decoder.begin([5], tiny_d2f.contract).slots

    length = tiny_d2f.context_length - 1  # of the longest response
    # What decoders do unless they are told to do more is let in.
    for kind in served_decoders(tiny_d2f):
        assert slots(kind(max_new_tokens=length)) <= most
    assert slots(FreeDave(drafts=8, max_new_tokens=length)) > most
    assert slots(D2F(lossless=8, max_new_tokens=length)) > most


def served_decoders(model: DiffusionModel) -> Iterable[type[Decoder]]:
    return fitting(model.contract, D2F, None).values()


@contextmanager
def command(*arguments: str) -> Iterator[tuple[subprocess.Popen, httpx.Client, list[str]]]:
    """The command in a process, a client of it, and the lines it wrote."""
    process = subprocess.Popen(
        [sys.executable, "-m", "decode.serve", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: [lines.append(line) for line in process.stderr])
    reader.start()
    try:
        wait_until(lambda: process.poll() is not None or any("serving" in one for one in lines))
        url = next(line for line in lines if "serving" in line).split()[-1]
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            yield process, client, lines
    finally:
        process.kill()
        process.wait()
        reader.join()


@pytest.mark.slow
def test_a_signal_lets_what_runs_finish_and_refuses_what_comes():
    with command("--model", "tiny-ar", "--log-format", "json") as (process, client, lines):
        body = {**LONG, "stream": True, "events": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            found = response.iter_lines()
            next(found)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: any("stopping" in line for line in lines))
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "stopping"
            assert client.get("/ready").status_code == 503
            rest = [line for line in found if line]
            assert rest[-1] == "data: [DONE]" and len(rest) >= 499
        assert process.wait(PATIENCE) == 0
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    assert {entry["status"] for entry in entries} == {200, 503}


@pytest.mark.slow
@pytest.mark.parametrize("second", [True, False])
def test_what_does_not_finish_in_time_is_cancelled(second):
    """Or at once, by a second signal."""
    seconds = "600" if second else "0"
    with command("--model", "tiny-ar", "--drain-seconds", seconds) as (process, client, lines):
        body = {**LONG, "stream": True, "prompt": [[9]] * 16}
        with client.stream("POST", "/v1/completions", json=body) as response:
            found = response.iter_lines()
            next(found)
            process.send_signal(signal.SIGINT)
            wait_until(lambda: any("stopping" in line for line in lines))
            if second:
                process.send_signal(signal.SIGINT)
            rest = [line for line in found if line]
            assert json.loads(rest[-1][6:])["error"]["code"] == "stopping"
            assert process.wait(PATIENCE) == 0
    assert not any("Traceback" in line for line in lines)
