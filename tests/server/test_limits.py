"""Clients that leave, do not read, do not send, or are too many; and what streams do meanwhile."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client import generate_latest
from serving import JSON, Served, listening, pieces, refused, sse, stock, wait_until
from tiny import Gate, fresh_model, random_model

import decode
from decode.server import app, generation, run
from decode.server.answers import StreamedAnswer
from decode.server.app import create_app
from decode.server.models import ServedModel
from decode.server.options import Options

LONG = {"model": "m", "prompt": [9, 10, 11], "max_tokens": 40, "decoder": "static"}
SHORT = {"model": "m", "prompt": [9], "max_tokens": 3}


@pytest.fixture
def gated() -> Iterator[tuple]:
    model = fresh_model("llada")
    gate = Gate(model)
    yield model, gate
    gate.open()


@contextmanager
def real(model, settings: Options | None = None, **engine) -> Iterator[tuple]:
    """Serve one model on a socket; yield a client, the engine, and the server's state."""
    served = Served([stock("m", model, **engine)], settings)
    with listening(served.app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client, served.models[0].engine, served.app.state.server


def connect(url: object) -> socket.socket:
    """Open a connection that takes little unread."""
    place = urlsplit(str(url))
    connection = socket.socket()
    connection.settimeout(30)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((place.hostname, place.port))
    return connection


def send_raw(client: httpx.Client, body: bytes, length: int | None = None) -> socket.socket:
    """Begin a request for a completion; return its connection. length: what the header says."""
    connection = connect(client.base_url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(body)}\r\n"
    connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    return connection


def answer(connection: socket.socket) -> bytes:
    """Read all that comes until the other end closes."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def counted(state, text: str) -> bool:
    """Tell whether a count has that value; each is counted just after its answer."""
    return text in generate_latest(state.metrics.registry).decode()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_cancels_all_its_choices(gated, streamed):
    """And another's answer is what it would have been."""
    model, gate = gated
    body = {**LONG, "n": 3, "temperature": 1.0, "stream": streamed, "events": streamed}
    other = {**LONG, "max_tokens": 9}
    with real(model) as (client, engine, state):
        connection = send_raw(client, json.dumps(body).encode())
        wait_until(lambda: gate.let() or engine.stats.running == 3)
        found = b""
        while streamed and b"forward" not in found:
            found += connection.recv(65536)
        connection.close()
        gate.let(4)
        wait_until(lambda: engine.stats.cancelled == 3)
        assert (engine.stats.running, engine.stats.waiting, engine.stats.slots_used) == (0, 0, 0)
        wait_until(lambda: state.in_flight == 0)
        gate.open()
        left = client.post("/v1/completions", json=other).json()
        wait_until(lambda: counted(state, 'outcome="cancelled"} 1.0'))
    with Served([stock("m", random_model("llada"))]) as alone:
        assert alone.ask(other)["choices"] == left["choices"]


async def ask(server, body: dict, send, *, leaves: Sequence = ()) -> None:
    """Ask the application message by message, as a client that leaves once there is something in
    `leaves`."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "raw_path": b"/v1/completions", "http_version": "1.1", "scheme": "http",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
    }  # fmt: skip

    async def receive() -> dict:
        while not messages and not leaves:
            await asyncio.sleep(0.005)
        return messages.pop() if messages else {"type": "http.disconnect"}

    await asyncio.wait_for(server(scope, receive, send), 30)


def test_one_prompt_is_prepared_at_a_time_and_those_who_left_are_skipped(monkeypatch):
    """One that has begun is not: it comes to its end before the next begins."""
    served, seen, running, begun = stock("m", random_model("llada")), [], [], []
    encode = generation.encode

    def slow(*what, **how) -> list[int]:
        begun.append(1)
        running.append(1)
        assert len(running) == 1
        time.sleep(0.1)
        running.clear()
        return encode(*what, **how)

    async def send(message: dict) -> None:
        seen.append(message)

    async def main() -> None:
        app = create_app([served])
        busy = threading.Event()
        served.preparing.submit(busy.wait, 30)
        await ask(app, SHORT, send, leaves=[1])
        assert counted(app.state.server, 'status="499"} 1.0') and not begun
        busy.set()
        monkeypatch.setattr(generation, "encode", slow)
        await asyncio.gather(*(ask(app, SHORT, send, leaves=leaves) for leaves in (begun, ())))
        await served.engine.close()

    asyncio.run(main())
    assert len(begun) == 2 and [one["status"] for one in seen if "status" in one] == [200]


@pytest.mark.parametrize("bounded", [True, False])
def test_a_client_that_does_not_read_is_cancelled(bounded):
    """By --send-timeout, or at once where more than --max-unsent bytes of forwards wait."""
    model = fresh_model("causal")
    gate = Gate(model)
    limits = {"send_timeout": 600, "max_unsent": 300_000} if bounded else {"send_timeout": 0.3}
    body = {
        "model": "m", "prompt": [[9, 10, 11]] * 32, "max_tokens": 200, "ignore_eos": True,
        "stream": True, "events": True,
    }  # fmt: skip
    with real(model, Options(**limits), batch_size=33) as (client, engine, state):
        with send_raw(client, json.dumps(body).encode()):
            # Forward by forward: otherwise all may be decoded before the time is over.
            wait_until(lambda: gate.let() or state.in_flight == 1)
            wait_until(lambda: gate.let() or state.in_flight == 0)
            gate.open()
            wait_until(lambda: engine.stats.running == 0 and engine.stats.slots_used == 0)
            assert engine.stats.cancelled > 0
            assert client.post("/v1/completions", json=SHORT).status_code == 200
        wait_until(lambda: counted(state, 'outcome="cancelled"} 1.0'))


def test_a_client_that_reads_just_as_it_is_given_up_is_sent_no_end(monkeypatch):
    """Forwards are missing: nothing may look like a whole answer."""
    streams, sent = [], []

    class Noted(StreamedAnswer):
        def __init__(self, *what) -> None:
            super().__init__(*what)
            streams.append(self)

    monkeypatch.setattr(app, "StreamedAnswer", Noted)
    served = stock("m", random_model("llada"))

    async def send(message: dict) -> None:
        sent.append(message)
        while message.get("body") and not streams[0].dropped:
            await asyncio.sleep(0)

    async def main() -> None:
        app = create_app([served], Options(max_unsent=2000))
        await ask(app, {**LONG, "stream": True, "events": True}, send)
        await served.engine.close()

    asyncio.run(main())
    assert streams[0].dropped and len(sent) == 2 and sent[1]["more_body"]


async def ask_slowly(served: ServedModel, body: dict, gate: Gate) -> list[dict]:
    """Return what a client is sent that takes the first chunk once its answer has ended: until it
    is offered that chunk two forwards are computed and no more, so that all other text waits."""
    sent = []

    async def send(message: dict) -> None:
        sent.append(message.get("body", b""))
        if len(sent) == 2:
            gate.open()
            while not served.engine.stats.finished + served.engine.stats.failed:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)

    gate.let(2)  # the first token may be part of a character: its text comes with the second
    await ask(create_app([served]), body, send)
    await served.engine.close()
    found = sse(b"".join(sent).decode())
    return [json.loads(line) for line in found if line != "[DONE]"]


def test_text_that_waits_for_a_slow_client_is_joined(gated):
    model, gate = gated
    decoder = decode.Static(max_new_tokens=40, block_size=1)
    (alone,) = decode.generate(random_model("llada"), LONG["prompt"], decoder)
    body = {**LONG, "block_size": 1, "stream": True}
    chunks = asyncio.run(ask_slowly(stock("m", model), body, gate))
    assert pieces(chunks) == alone.text
    assert alone.forwards == 40 and len(chunks) == 2


def broken_model(fails):
    """Make a model whose forwards raise once `fails` says so of their tokens."""
    model = fresh_model("llada")
    rows = model.decode_rows

    def broken(tokens, *more):
        if fails(tokens.tolist()):
            raise RuntimeError("no such row")
        return rows(tokens, *more)

    model.decode_rows = broken
    return model


def test_text_that_waits_where_the_answer_fails_is_sent_before_the_error():
    """And nothing says that it is finished."""
    left = iter([False] * 20)
    model = broken_model(lambda _: next(left, True))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**LONG, "block_size": 1, "stream": True, "stream_options": options}
    *chunks, error = asyncio.run(ask_slowly(stock("m", model), body, Gate(model)))
    assert "no such row" in error["error"]["message"]
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert len(chunks) == 2 and len(pieces(chunks)) > 1
    assert chunks[-1]["usage"]["completion_tokens"] == 20


def test_a_choice_that_fails_is_a_500_of_its_request_alone():
    with Served([stock("m", broken_model(lambda tokens: 13 in tokens))]) as served:
        bad = {**LONG, "prompt": [13]}
        assert "no such row" in refused(served.post("/v1/completions", bad), 500, code="failed")
        streamed = served.post("/v1/completions", {**bad, "stream": True})
        assert json.loads(sse(streamed.text)[-1])["error"]["type"] == "server_error"
        served.ask(LONG)
        assert counted(served.app.state.server, 'outcome="failed"} 2.0')


def test_streams_come_piece_by_piece_and_are_kept_alive(gated, monkeypatch):
    monkeypatch.setattr(StreamedAnswer, "DEFAULT_PING_INTERVAL", 0.05)
    model, gate = gated
    with real(model) as (client, _, _state):
        body = {**LONG, "stream": True, "events": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.iter_lines()
            assert next(line for line in lines if line) == ": ping"
            for forward in range(1, 5):
                gate.let(1)
                line = next(line for line in lines if line.startswith("data"))
                assert json.loads(line[6:])["d2f"]["forward"] == forward
            gate.open()
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_body_that_is_slow_large_or_cut_off_is_refused():
    with real(random_model("llada"), Options(body_timeout=0.3)) as (client, _, state):
        found = answer(send_raw(client, b'{"model', length=100))  # until it is closed
        assert found.startswith(b"HTTP/1.1 408 ") and b"did not come within 0.3 s" in found
        found = answer(send_raw(client, b"", length=10**8))
        # 1 MB, as the context of 512 is short: --max-body may say more.
        assert found.startswith(b"HTTP/1.1 413 ") and b"more than 1000000 bytes" in found
        sent = []

        def parts() -> Iterator[bytes]:
            for _ in range(800):
                sent.append(1 << 16)
                yield b" " * (1 << 16)

        with suppress(httpx.TransportError):  # it was still sending when the server closed
            refused(client.post("/v1/completions", content=parts(), headers=JSON), 413)
        assert sum(sent) < 40_000_000
        send_raw(client, b"{", length=9).close()
        wait_until(lambda: counted(state, 'status="499"} 1.0'))
        assert client.post("/v1/completions", json=SHORT).is_success
        wait_until(lambda: state.in_flight == 0)


def test_a_large_body_is_parsed_beside_the_loop(monkeypatch, served):
    threads, read = [], app.read_fields
    monkeypatch.setattr(
        app, "read_fields", lambda *what: threads.append(threading.get_ident()) or read(*what)
    )
    for length in (50, 50, 50_000):
        served.post("/tokenize", {"model": "tiny-d2f", "prompt": "a " * length})
    one, same, other = threads
    assert one == same != other


def test_a_text_that_cannot_fit_is_not_tokenized(monkeypatch, served):
    monkeypatch.setattr(generation, "encode", lambda *_: pytest.fail("it was tokenized"))
    for path, body in (
        ("/v1/completions", {"prompt": "a " * 50_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 50_000}]}),
        ("/tokenize", {"prompt": "a " * 50_000}),
    ):
        response = served.post(path, {"model": "tiny-d2f", **body})
        field = "messages" if "messages" in body else "prompt"
        said = refused(response, 400, field, "context_length_exceeded")
        assert "100000 characters: the context of tiny-d2f is 512" in said


@pytest.mark.parametrize("streamed", [True, False])
def test_a_request_that_takes_too_long_ends(gated, streamed):
    model, gate = gated
    with real(model, Options(request_timeout=0.3)) as (client, engine, state):
        gate.let(1)
        body = {**LONG, "stream": streamed, "events": streamed}
        response = client.post("/v1/completions", json=body)
        if streamed:
            assert json.loads(sse(response.text)[-1])["error"]["code"] == "timeout"
        else:
            assert "took too long" in refused(response, 504, code="timeout")
        gate.open()
        wait_until(lambda: engine.stats.cancelled == 1)
        wait_until(lambda: counted(state, 'outcome="timeout"} 1.0'))


def test_who_finds_the_queue_full_is_refused_whole(gated):
    """All choices of a request have a place, or none."""
    model, gate = gated
    with real(model, batch_size=2, max_waiting=1) as (client, engine, state):

        async def main() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as many:

                def post(**more):
                    return asyncio.create_task(many.post("/v1/completions", json=LONG | more))

                running = [post(), post()]
                while engine.stats.running < 2:  # the second may have missed the first forward
                    gate.let(1)
                    await asyncio.sleep(0.05)
                full = await post(n=2, temperature=1)
                assert engine.stats.waiting == 0
                running.append(post())
                while engine.stats.waiting < 1:
                    await asyncio.sleep(0.01)
                streamed = await post(stream=True)
                gate.open()
                return [full, streamed, *await asyncio.gather(*running)]

        full, streamed, *others = asyncio.run(main())
        for response in (full, streamed):
            assert "queue is full" in refused(response, 429, code="queue_full")
            assert response.headers["retry-after"] == "1"
        assert len({response.json()["choices"][0]["text"] for response in others}) == 1
        wait_until(lambda: counted(state, 'outcome="refused"} 2.0'))
        assert engine.stats.refused == 3  # choices


def test_idle_connections_are_closed_and_limited(monkeypatch):
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(run.Connection, "most", 3)
    with listening(create_app([stock("m", random_model("llada"))]), http=run.Connection) as url:
        idle = [connect(url) for _ in range(3)]
        idle[1].sendall(b"GET /health HTT")
        # As many as there may be: the one that has waited longest makes room.
        assert httpx.get(f"{url}/health").status_code == 200
        with suppress(ConnectionResetError):
            assert answer(idle[0]) == b""
        for connection in idle[1:]:
            assert answer(connection) == b""
        assert run.Connection.idle == {}


def test_the_limit_of_open_files_is_raised():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        most = run.raise_file_limit()
        assert most == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], 2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
