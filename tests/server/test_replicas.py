"""Several replicas: what is refused before Ray is started, and two of them on a real Ray."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest
from serving import CHAT, PATIENCE, Served, command, pieces, sse, stock, wait_until

import decode.cli
import decode.serve
from d2f.errors import InputError
from decode.server.ray_app import application

TEXT = {"model": "tiny-d2f", "prompt": "Use 3 and 4 to make 12.", "max_tokens": 16}
LONG = {**TEXT, "max_tokens": 120, "ignore_eos": True, "decoder": "static"}

BAD = [
    (["--replicas", "2", "--max-replicas", "3"], "--replicas is a fixed number"),
    (["--min-replicas", "2"], "--min-replicas needs --replicas or --max-replicas"),
    (["--min-replicas", "3", "--max-replicas", "2"], "--min-replicas 3 is more than"),
    (["--replicas", "2", "--device", "cuda:1"], "Ray gives each replica a GPU of its own"),
    (["--replicas", "1000"], "--replicas 1000: there are cores for"),
    (["--replicas", "1", "--ray-address", "127.0.0.1:9"], "no Ray cluster can be used at"),
    (["--replicas", "1", "--decoder", "wedlm"], "the decoder wedlm fits none of the models"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=lambda v: " ".join(v)[:40])
def test_bad_replicas_are_one_line_before_any_is_started(arguments, says, capsys, monkeypatch):
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("it was started"))
    assert decode.serve.main(["--port", "0", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("error: ") and error.count("\n") == 1


def test_without_ray_the_error_names_the_extra(capsys, monkeypatch):
    find = find_spec
    monkeypatch.setattr("d2f.command.find_spec", lambda n: None if n == "ray" else find(n))
    assert decode.serve.main(["--replicas", "2"]) == 2
    assert "pip install 'd2f-toolkit[ray]'" in capsys.readouterr().err


def test_a_configuration_of_ray_is_checked_as_a_command_line():
    assert application({"model": "tiny-d2f", "tau-conf": 0.95, "allowed-host": ["a", "b"]})
    for args, says in (
        ({"max-batch": 0}, "max-batch must be at least 1"),
        ({"replicas": 2}, "num_replicas of the deployment"),
        ({"no-such": True}, "no-such"),
    ):
        with pytest.raises(InputError, match=says):
            application(args)


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[subprocess.Popen, httpx.Client, Path]]:
    words = ["--model", "tiny-d2f", "--replicas", "2", "--max-batch", "4", "--api-key", "secret"]
    words += ["--public", "/ready", "--drain-seconds", "5"]
    with command(*words, Authorization="Bearer secret") as running:
        yield running


def replicas(process: subprocess.Popen) -> list[psutil.Process]:
    under = psutil.Process(process.pid).children(recursive=True)
    return [one for one in under if "ServeReplica" in one.name()]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
class TestOnRay:
    """Ray is started once for all of these; the last test ends it."""

    def test_answers_streams_and_errors_are_those_of_the_plain_server(self, two, tiny_d2f):
        _, client, _ = two
        with Served([stock("tiny-d2f", tiny_d2f)]) as plain:
            for path, body in (
                ("/v1/completions", {**TEXT, "temperature": 1, "seed": 3, "n": 2}),
                ("/v1/chat/completions", CHAT),
            ):
                ours = client.post(path, json=body)
                assert ours.status_code == 200, ours.text
                assert ours.json()["choices"] == plain.ask(body, path)["choices"]
                *streamed, done = sse(client.post(path, json={**body, "stream": True}).text)
                assert done == "[DONE]"
                chunks = [json.loads(line) for line in streamed]
                assert pieces(chunks) == pieces(plain.chunks(body, path))
            for bad in ({**TEXT, "tau_conf": 7}, {**TEXT, "model": "none"}):
                ours = client.post("/v1/completions", json=bad)
                its = plain.post("/v1/completions", bad)
                assert (ours.status_code, ours.json()) == (its.status_code, its.json())
        assert client.get("/ready", headers={"Authorization": ""}).status_code == 200
        assert client.get("/v1/models", headers={"Authorization": ""}).status_code == 401
        assert client.get("/ready", headers={"Host": "elsewhere"}).status_code == 400
        assert "<html" in client.get("/").text
        body = {**LONG, "stream": True, "events": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())  # and leaves, which frees its rows

        def counts() -> str:  # each request is answered by one of the replicas
            return "".join(client.get("/metrics").text for _ in range(6))

        wait_until(lambda: 'd2f_engine_cancelled_total{model="tiny-d2f"} 1.0' in counts(), 0.1)

    def test_a_killed_replica_is_replaced(self, two):
        """Streams that have begun end without their end; requests after it are answered."""
        process, client, _ = two
        victim = replicas(process)[0]
        ends, begun = [], threading.Barrier(5)

        def stream() -> None:
            try:
                body = {**LONG, "stream": True, "events": True}
                with client.stream("POST", "/v1/completions", json=body) as response:
                    lines = response.iter_lines()
                    found = [next(lines)]
                    begun.wait(PATIENCE)
                    found += [line for line in lines if line]
                    ends.append(found[-1])
            except httpx.TransportError as error:  # the connection is cut off
                ends.append(type(error).__name__)

        threads = [threading.Thread(target=stream) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun.wait(PATIENCE)
        victim.kill()
        for thread in threads:
            thread.join(PATIENCE)
        assert len(ends) == 4 and any(end != "data: [DONE]" for end in ends), ends
        wait_until(lambda: victim not in replicas(process) and len(replicas(process)) == 2, 0.2)
        wait_until(lambda: client.get("/ready").status_code == 200, 0.2)
        answers = [client.post("/v1/completions", json=TEXT) for _ in range(8)]
        assert {one.status_code for one in answers} == {200}
        assert len({one.json()["choices"][0]["text"] for one in answers}) == 1

    def test_a_signal_ends_all_of_it_in_seconds(self, two):
        process, _, log = two
        left = psutil.Process(process.pid).children(recursive=True)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - began < 25
        # Ray's processes may write one, behind their names.
        assert "\nTraceback" not in log.read_text()
        _, alive = psutil.wait_procs(left, 20)
        assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
