"""Clients that leave, do not read, do not send, or are too many; over a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from serving import Gate, Served, listening, sse, stock, wait_until
from test_bad_requests import refused
from tiny import fresh_model, random_model

from decode.server.models import Settings

LONG = {"model": "m", "prompt": [9, 10, 11], "max_tokens": 40, "decoder": "static"}
JSON = {"content-type": "application/json"}


@pytest.fixture
def gated() -> Iterator[tuple]:
    model = fresh_model("llada")
    gate = Gate(model)
    yield model, gate
    gate.open()


@contextmanager
def real(model, settings: Settings | None = None, **engine) -> Iterator[tuple]:
    """A server of one model on a socket, a client of it, and the engine."""
    served = Served([stock("m", model, **engine)], settings)
    with listening(served.app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client, served.models[0].engine, served.app.state.server


def raw(client: httpx.Client, *lines: str, body: bytes = b"") -> socket.socket:
    """A connection on which a request was begun."""
    place = urlsplit(str(client.base_url))
    connection = socket.create_connection((place.hostname, place.port), timeout=30)
    head = "\r\n".join([*lines, "Host: localhost", *(f"{k}: {v}" for k, v in JSON.items())])
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def answer(connection: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def counted(state, outcome: str, count: int) -> bool:
    """Whether so many requests have ended so; each is counted just after its answer."""
    return f'outcome="{outcome}"}} {count}.0' in state.metrics.text().decode()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_all_its_choices(gated, stream):
    """At once, and another's answer is what it would have been."""
    model, gate = gated
    body = {**LONG, "n": 3, "temperature": 1.0, "stream": stream, "events": stream}
    other = {**LONG, "max_tokens": 9}
    with real(model) as (client, engine, state):
        content = json.dumps(body).encode()
        connection = raw(
            client, "POST /v1/completions HTTP/1.1", f"Content-Length: {len(content)}",
            body=content,
        )  # fmt: skip
        wait_until(lambda: gate.let() or engine.stats.running == 3)
        if stream:
            found = b""
            while b"forward" not in found:
                found += connection.recv(65536)
        connection.close()
        gate.let(4)
        wait_until(lambda: engine.stats.cancelled == 3)
        assert (engine.stats.running, engine.stats.waiting, engine.stats.slots_used) == (0, 0, 0)
        wait_until(lambda: state.in_flight == 0)
        gate.open()
        left = client.post("/v1/completions", json=other).json()
        wait_until(lambda: counted(state, "cancelled", 1) and counted(state, "finished", 1))
    with Served([stock("m", random_model("llada"))]) as alone:
        assert alone.ask(other)["choices"] == left["choices"]


def test_a_client_that_does_not_read_is_cancelled():
    """Its stream is longer than what the kernel takes for it."""
    model = fresh_model("causal")
    gate = Gate(model)
    with real(model, Settings(send_seconds=0.3), batch_size=48) as (client, engine, state):
        body = {
            "model": "m", "prompt": [[9, 10, 11]] * 48, "max_tokens": 200, "ignore_eos": True,
            "stream": True, "events": True,
        }  # fmt: skip
        content = json.dumps(body).encode()
        place = urlsplit(str(client.base_url))
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((place.hostname, place.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
        wait_until(lambda: state.in_flight == 1)
        # Forward by forward: else all may be decoded, and finished, before his time is over.
        wait_until(lambda: gate.let() or state.in_flight == 0)
        gate.open()
        # Some may have come to their end before that.
        wait_until(lambda: engine.stats.cancelled + engine.stats.finished == 48)
        assert engine.stats.running == 0 and engine.stats.slots_used == 0
        short = {"model": "m", "prompt": [9], "max_tokens": 3}
        assert client.post("/v1/completions", json=short).status_code == 200
        connection.close()
        wait_until(lambda: counted(state, "cancelled", 1))


def test_half_a_body_is_not_waited_for():
    with real(random_model("llada"), Settings(body_seconds=0.2)) as (client, _, state):
        connection = raw(
            client, "POST /v1/completions HTTP/1.1", "Content-Length: 100", body=b'{"model'
        )
        found = answer(connection)  # until it is closed
        assert found.startswith(b"HTTP/1.1 408 ") and b"did not come within 0.2 s" in found
        wait_until(lambda: state.in_flight == 0)
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 2}).is_success


def test_a_client_that_leaves_in_its_body_is_nobodys_fault():
    with real(random_model("llada")) as (client, _, state):
        raw(client, "POST /v1/completions HTTP/1.1", "Content-Length: 9", body=b"{").close()
        wait_until(lambda: 'status="' in state.metrics.text().decode())
        assert 'status="499"} 1.0' in state.metrics.text().decode()
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 2}).is_success


def test_a_body_of_a_hundred_megabytes_is_not_read():
    with real(random_model("llada")) as (client, _, _state):
        connection = raw(client, "POST /v1/completions HTTP/1.1", "Content-Length: 100000000")
        found = answer(connection)
        assert found.startswith(b"HTTP/1.1 413 ") and b"more than 4000000 bytes" in found
        sent = 0

        def parts() -> Iterator[bytes]:
            nonlocal sent
            for _ in range(1600):
                sent += 1 << 16
                yield b" " * (1 << 16)

        try:
            response = client.post("/v1/completions", content=parts(), headers=JSON)
        except httpx.TransportError:  # it was still sending when the server closed
            pass
        else:
            refused(response, 413)
        assert sent < 50_000_000
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 2}).is_success


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_ends(gated, stream):
    model, gate = gated
    with real(model, Settings(request_seconds=0.3)) as (client, engine, state):
        gate.let(1)
        response = client.post("/v1/completions", json={**LONG, "stream": stream, "events": stream})
        if stream:
            *_, last = sse(response.text)
            assert json.loads(last)["error"]["code"] == "timeout"
        else:
            assert "took too long" in refused(response, 504, code="timeout")
        gate.open()
        wait_until(lambda: engine.stats.cancelled == 1)
        wait_until(lambda: counted(state, "timeout", 1))


def test_who_finds_the_queue_full_is_refused_whole(gated):
    """All choices of a request have a place, or none."""
    model, gate = gated
    with real(model, batch_size=2, max_waiting=1) as (client, engine, state):

        async def main() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as many:
                running = [
                    asyncio.create_task(many.post("/v1/completions", json=LONG)) for _ in range(2)
                ]
                while engine.stats.running < 2:  # the second may have missed the first forward
                    gate.let(1)
                    await asyncio.sleep(0.05)
                full = await many.post("/v1/completions", json={**LONG, "n": 2, "temperature": 1})
                assert engine.stats.waiting == 0
                running.append(asyncio.create_task(many.post("/v1/completions", json=LONG)))
                while engine.stats.waiting < 1:
                    await asyncio.sleep(0.01)
                streamed = await many.post("/v1/completions", json={**LONG, "stream": True})
                gate.open()
                return [full, streamed, *await asyncio.gather(*running)]

        full, streamed, *others = asyncio.run(main())
        for response in (full, streamed):
            assert "queue is full" in refused(response, 429, code="queue_full")
            assert response.headers["retry-after"] == "1"
        assert len({response.json()["choices"][0]["text"] for response in others}) == 1
        wait_until(lambda: counted(state, "refused", 2))
        assert engine.stats.refused == 3  # choices


def test_a_choice_that_fails_is_a_500_of_its_request_alone(gated):
    model, gate = gated
    gate.open()
    real_rows = model.decode_rows

    def broken(tokens, *more):
        if 13 in tokens.tolist():
            raise RuntimeError("no such row")
        return real_rows(tokens, *more)

    model.decode_rows = broken
    with real(model) as (client, _, state):
        bad = {**LONG, "prompt": [13]}
        assert "no such row" in refused(client.post("/v1/completions", json=bad), 500)
        streamed = client.post("/v1/completions", json={**bad, "stream": True})
        assert streamed.status_code == 200
        lines = sse(streamed.text)
        assert json.loads(lines[-1])["error"]["type"] == "server_error"
        assert client.post("/v1/completions", json=LONG).is_success
        wait_until(lambda: counted(state, "failed", 2))


def test_streams_come_piece_by_piece(gated):
    """Each as soon as it is decoded."""
    model, gate = gated
    body = {**LONG, "stream": True, "events": True}
    with real(model) as (client, _, _state):
        gate.let(1)
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.iter_lines()
            for forward in range(1, 5):
                line = next(line for line in lines if line.startswith("data"))
                assert json.loads(line[6:])["d2f"]["forward"] == forward
                gate.let(1)
                time.sleep(0)
            gate.open()
            assert [line for line in lines if line][-1] == "data: [DONE]"
