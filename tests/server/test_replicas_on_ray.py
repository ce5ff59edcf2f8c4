"""Two replicas on a real Ray, started once for all of this file by the command itself."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from serving import Served, sse, stock
from test_leaving_and_limits import raw
from test_replica import spoil

import d2f
from d2f.models import resolve

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

ROOT = Path(__file__).parent.parent.parent
STARTING, PATIENCE = 240.0, 120.0  # seconds after which a test has failed
LONG = {"model": "m", "prompt": "Use 3 and 4 to make 12.", "max_tokens": 400, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 16}
EVENTS = {**LONG, "stream": True, "events": True}  # a chunk with each forward


@dataclass
class Command:
    """The command in a process, a client of it, the lines it wrote, and the adapter it serves."""

    process: subprocess.Popen
    client: httpx.Client
    lines: list[str]
    adapter: Path

    def processes(self) -> list[psutil.Process]:
        """Its replicas."""
        under = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in under if "ServeReplica" in one.name()]

    def count(self, name: str) -> float:
        """Of all replicas together."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def wait(self, condition) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "".join(self.lines[-5:])
            time.sleep(0.05)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Iterator[Command]:
    adapter = tmp_path_factory.mktemp("replicas") / "adapter"
    shutil.copytree(f"{resolve('tiny-d2f')}/adapter", adapter)
    words = ["--model", "m=tiny-teacher", "--adapter", adapter, "--replicas", "2", "--port", "0"]
    words += ["--max-batch", "4", "--max-waiting", "8", "--api-key", "secret", "--public", "/ready"]
    words += ["--reuse-prefixes"]
    process = subprocess.Popen(
        [sys.executable, "-m", "decode.serve", *words, "--drain-seconds", "5"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: [lines.append(line) for line in process.stderr])
    reader.start()
    try:
        end = time.monotonic() + STARTING
        while not any("serving on" in line for line in lines):
            assert process.poll() is None and time.monotonic() < end, "".join(lines)
            time.sleep(0.1)
        url = next(line for line in lines if "serving on" in line).split()[-1]
        key = {"Authorization": "Bearer secret"}
        with httpx.Client(base_url=url, timeout=PATIENCE, headers=key) as client:
            yield Command(process, client, lines, adapter)
    finally:
        process.terminate()
        process.wait(PATIENCE)
        reader.join()


def taken_apart(value) -> tuple[object, list[float]]:
    """An answer's JSON with a placeholder for each number that is not whole, and these numbers."""
    numbers: list[float] = []

    def without(part):
        if isinstance(part, dict):
            return {key: without(one) for key, one in part.items()}
        if isinstance(part, list):
            return [without(one) for one in part]
        if isinstance(part, float):
            numbers.append(part)
            return "number"
        return part

    return without(value), numbers


def check_same(one, other) -> None:
    """Two choices, logprobs up to rounding: a replica may read a kept prompt, on another thread."""
    (ours, numbers), (its, known) = taken_apart(one), taken_apart(other)
    assert ours == its
    assert numbers == pytest.approx(known, rel=1e-5, abs=1e-5)


def test_answers_and_streams_are_those_of_the_plain_server(two):
    model = d2f.load("tiny-teacher", adapter=two.adapter, device="cpu")
    model.merge_adapter()
    with Served([stock("m", model)]) as plain:
        chat = {"model": "m", "messages": [{"role": "user", "content": LONG["prompt"]}]}
        for path, values in (
            ("/v1/completions", {**SHORT, "logprobs": 1}),
            (
                "/v1/completions",
                {**SHORT, "prompt": ["1+2=", [9, 10]], "temperature": 1, "seed": 3},
            ),
            ("/v1/chat/completions", chat),
        ):
            ours = two.client.post(path, json=values)
            assert ours.status_code == 200, ours.text
            check_same(ours.json()["choices"], plain.ask(values, path)["choices"])
            streamed = sse(two.client.post(path, json={**values, "stream": True}).text)
            assert streamed.pop() == "[DONE]"
            for one, other in zip(streamed, plain.chunks(values, path), strict=True):
                check_same(json.loads(one)["choices"], other["choices"])
        for bad in ({**SHORT, "tau_conf": 7}, {**SHORT, "model": "none"}, {"model": "m"}):
            ours, its = (
                two.client.post("/v1/completions", json=bad),
                plain.post("/v1/completions", bad),
            )
            assert (ours.status_code, ours.json()) == (its.status_code, its.json())
        kept = {"id", "max_model_len", "d2f"}
        ours, its = two.client.get("/v1/models").json()["data"], plain.client.get("/v1/models")
        for one, other in zip(ours, its.json()["data"], strict=True):
            assert {k: one[k] for k in kept} == {k: other[k] for k in kept}


def test_the_front_has_the_checks_and_the_pages(two):
    assert two.client.get("/ready", headers={"Authorization": ""}).json() == {"status": "ready"}
    for path in ("/v1/completions", "/v1/models", "/metrics"):
        refused = two.client.request(
            "POST" if "compl" in path else "GET", path, headers={"Authorization": ""}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert two.client.get("/health", headers={"Host": "elsewhere"}).status_code == 400
    assert two.client.get("/no-such").status_code == 404
    assert "<html" in two.client.get("/").text
    found = two.client.post("/v1/completions", json=SHORT, headers={"x-request-id": "mine"})
    assert found.headers["x-request-id"] == "mine" and found.json()["id"] == "cmpl-mine"
    assert found.headers.get_list("content-type") == ["application/json"]
    two.wait(lambda: any("id=mine " in line for line in two.lines))
    (line,) = [line for line in two.lines if "id=mine " in line]
    assert " outcome=finished " in line and " tokens=16 " in line and "error" not in line
    assert two.count("d2f_replicas") == 2


def test_prompts_that_begin_alike_go_to_the_replica_that_has_their_rows(two):
    """D2F's prompt is one block, so alike is equal here."""
    for prompt in ("Mei has 15 marbles. She gives away 8.", "Ivan starts with 25 rolls."):
        asked = [
            two.client.post("/v1/completions", json={**SHORT, "prompt": prompt}) for _ in range(6)
        ]
        costs = [one.json()["usage"] for one in asked]
        reused = [one["d2f"]["reused_rows"] for one in costs]
        assert reused == [0] + [costs[0]["prompt_tokens"] - 1] * 5  # Dream reads its last row


def test_ray_listens_to_this_machine_alone_and_its_replicas_share_the_cores(two):
    """But for one port of each replica, which Ray guards with a token."""
    ours = {two.process.pid, *(p.pid for p in psutil.Process(two.process.pid).children(True))}
    outside = [
        one
        for one in psutil.net_connections("tcp")
        if one.status == "LISTEN"
        and one.pid in ours
        and one.laddr.ip not in ("127.0.0.1", "::ffff:127.0.0.1")
    ]
    assert {one.pid for one in outside} <= {one.pid for one in two.processes()}
    for process in two.processes():
        assert process.nice() == psutil.Process().nice()
        assert process.environ()["RAY_AUTH_MODE"] == "token"
        assert process.environ()["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows(two, stream):
    before = two.count("d2f_engine_cancelled_total")
    body = json.dumps({**LONG, "n": 2, "temperature": 1, "decoder": "static", "stream": stream})
    connection = raw(
        two.client, "POST /v1/completions HTTP/1.1", f"Content-Length: {len(body)}",
        "Authorization: Bearer secret", body=body.encode(),
    )  # fmt: skip
    two.wait(lambda: two.count("d2f_engine_running") == 2)
    connection.close()
    two.wait(lambda: two.count("d2f_engine_cancelled_total") == before + 2)
    assert two.count("d2f_engine_running") == 0


def test_who_finds_the_queues_full_is_refused(two):
    """Each replica has room for 4 and 8 that wait."""

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            base_url=two.client.base_url, headers=two.client.headers, timeout=PATIENCE
        ) as client:
            values = {**LONG, "max_tokens": 60}
            asked = [client.post("/v1/completions", json=values) for _ in range(32)]
            return await asyncio.gather(*asked)

    answers = asyncio.run(main())
    refused = [one for one in answers if one.status_code != 200]
    assert 0 < len(refused) < 32
    for one in refused:
        assert (one.status_code, one.json()["error"]["code"]) == (429, "queue_full")
        assert one.headers["retry-after"] == "1"
    assert len({one.json()["choices"][0]["text"] for one in answers if one not in refused}) == 1


class Asking:
    """Clients that ask one short request after the other until the end of ``with``."""

    def __init__(self, two: Command, clients: int = 3):
        self._client, self.answers, self._over = two.client, [], False
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(clients)]

    def _ask(self, index: int) -> None:
        while not self._over:
            values = {**SHORT, "stream": index % 2 == 0}
            self.answers.append(self._client.post("/v1/completions", json=values))

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *what: object) -> None:
        self._over = True
        for thread in self._threads:
            thread.join(PATIENCE)

    def check(self) -> None:
        """All were answered to their end."""
        assert len(self.answers) > 3
        for one in self.answers:
            assert one.status_code == 200, one.text
            assert '"usage"' in one.text or one.text.endswith("data: [DONE]\n\n"), one.text


def test_a_killed_replica_is_replaced_and_only_streams_that_have_begun_end(two):
    """With an error. What it had not answered yet is answered by the other one."""
    victim, other = two.processes()
    with Asking(two) as asking:
        begun: list[int] = []
        ends: list[str] = []

        def stream(index: int) -> None:
            with two.client.stream("POST", "/v1/completions", json=EVENTS) as response:
                lines = response.iter_lines()
                text = next(lines)
                begun.append(index)
                ends.append(sse("\n".join([text, *lines]))[-1])

        streams = [threading.Thread(target=stream, args=(i,)) for i in range(6)]
        for one in streams:
            one.start()
        two.wait(lambda: len(begun) >= 3)
        victim.kill()
        for one in streams:
            one.join(PATIENCE)
        two.wait(lambda: two.count("d2f_replicas") == 2 and len(two.processes()) == 2)
    assert other in two.processes() and victim not in two.processes()
    failed = [json.loads(end)["error"] for end in ends if end != "[DONE]"]
    assert len(ends) == 6 and {one["code"] for one in failed} <= {"replica_ended"}
    asked = [one for one in asking.answers if "replica_ended" not in one.text]
    assert len(asking.answers) - len(asked) <= 3  # those that had begun at that moment
    asking.answers = asked
    asking.check()


def test_a_new_adapter_is_loaded_without_a_lost_request(two):
    """SIGHUP; the replicas go on, and so do requests that run."""
    processes = two.processes()
    weights = (two.adapter / "adapter_model.safetensors").read_bytes()
    before = two.client.post("/v1/completions", json=SHORT).json()["choices"]

    def reloaded(says: str) -> None:
        count = sum(says in line for line in two.lines)
        two.process.send_signal(signal.SIGHUP)
        two.wait(lambda: sum(says in line for line in two.lines) > count)

    with Asking(two) as asking:
        spoil(two.adapter)
        reloaded("2 replicas have loaded the models anew")
        after = [two.client.post("/v1/completions", json=SHORT).json() for _ in range(6)]
    asking.check()
    assert all(one["choices"] == after[0]["choices"] != before for one in after)
    (two.adapter / "adapter_model.safetensors").write_bytes(b"nothing")
    reloaded("the former models stay")
    assert two.client.post("/v1/completions", json=SHORT).json()["choices"] == after[0]["choices"]
    (two.adapter / "adapter_model.safetensors").write_bytes(weights)
    reloaded("2 replicas have loaded the models anew")
    assert two.client.post("/v1/completions", json=SHORT).json()["choices"] == before
    assert two.processes() == processes


def test_a_signal_ends_all_of_it(two):
    """The last test: what runs has its seconds, then an error, and no process is left."""
    left = psutil.Process(two.process.pid).children(recursive=True)
    with two.client.stream(
        "POST", "/v1/completions", json={**EVENTS, "decoder": "static"}
    ) as response:
        lines = response.iter_lines()
        next(lines)
        two.process.send_signal(signal.SIGTERM)
        two.wait(lambda: any("stopping" in line for line in two.lines))
        refused = two.client.post("/v1/completions", json=SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        *_, last = [line for line in lines if line]
        assert last == "data: [DONE]" or json.loads(last[6:])["error"]["code"] == "stopping"
    assert two.process.wait(PATIENCE) == 0
    written = "".join(two.lines)
    assert "Traceback" not in written, written
    _, alive = psutil.wait_procs(left, 20)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
