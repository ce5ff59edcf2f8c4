"""What is sent of a stream, and what waits: for clients that read, that are slow, or never read."""

from __future__ import annotations

import asyncio
import json
import socket
from urllib.parse import urlsplit

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import CHAT, Gate, pieces, sse, stock, wait_until
from test_leaving_and_limits import LONG, real
from tiny import fresh_model, random_model

import decode
from decode.server import stream as streaming
from decode.server.app import create_app
from decode.server.models import ServedModel, Settings
from decode.server.stream import Unsent

HEADERS = [(b"content-type", b"application/json"), (b"host", b"localhost")]


def scope(path: str) -> dict:
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": HEADERS, "http_version": "1.1", "scheme": "http",
    }  # fmt: skip


async def ask(app, body: dict, send) -> None:
    """The application's answer to a request, message by message, from a client that stays."""
    came = False

    async def receive() -> dict:
        nonlocal came
        if came:
            await asyncio.Event().wait()
        came = True
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    await app(scope("/v1/completions"), receive, send)


async def ask_slowly(monkeypatch, served: ServedModel, body: dict, gate: Gate) -> str:
    """What a client is sent that takes the first chunk once its answer has ended: until it has been
    offered that chunk two forwards are computed and no more, so that all the others' text waits."""
    reads, sent = asyncio.Event(), []

    class Noted(Unsent):
        def end(self, error) -> None:
            super().end(error)
            reads.set()

    monkeypatch.setattr(streaming, "Unsent", Noted)

    async def send(message: dict) -> None:
        sent.append(message.get("body", b""))
        if sent[-1]:
            gate.open()
            await reads.wait()

    gate.let(2)  # the first token may be part of a character: its text comes with the second
    await ask(create_app([served]), body, send)
    await served.engine.close()
    return b"".join(sent).decode()


def test_text_that_waits_for_a_slow_client_is_joined(monkeypatch):
    """He who takes the first chunk once all is decoded is sent the rest at once, and all of it."""
    model = fresh_model("llada")
    (alone,) = decode.generate(
        model, LONG["prompt"], decode.Static(max_new_tokens=40, block_size=1)
    )
    gate = Gate(model)
    body = {**LONG, "block_size": 1, "stream": True}
    *chunks, done = sse(asyncio.run(ask_slowly(monkeypatch, stock("m", model), body, gate)))
    assert done == "[DONE]"
    assert pieces([json.loads(chunk) for chunk in chunks]) == alone.text
    assert alone.forwards == 40 and len(chunks) == 2


def test_text_that_waits_where_its_answer_fails_has_no_end_of_an_answer(monkeypatch):
    """A slow client is told what a fast one is: the text, then the error, and nothing finished."""
    model, forwards = fresh_model("llada"), []
    rows = model.decode_rows

    def broken(*arguments):
        forwards.append(None)
        if len(forwards) > 20:
            raise RuntimeError("no such row")
        return rows(*arguments)

    model.decode_rows = broken
    gate = Gate(model)
    body = {**LONG, "block_size": 1, "stream": True, "stream_options": {"include_usage": True}}
    body["stream_options"]["continuous_usage_stats"] = True
    answer = asyncio.run(ask_slowly(monkeypatch, stock("m", model), body, gate))
    *chunks, error = map(json.loads, sse(answer))
    assert "no such row" in error["error"]["message"]
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert len(chunks) == 2 and len(pieces(chunks)) > 1
    assert chunks[-1]["usage"]["completion_tokens"] == 20


def test_what_waits_for_a_client_that_does_not_read_is_bounded(monkeypatch):
    """Descriptions of forwards cannot be joined: he is cut off, long before --send-timeout."""
    waiting, most = [], 300_000

    class Noted(Unsent):
        def take(self, *event) -> None:
            super().take(*event)
            if self.held_up:
                waiting.append(self.size)

    monkeypatch.setattr(streaming, "Unsent", Noted)
    body = {
        "model": "m", "prompt": [[9, 10, 11]] * 16, "max_tokens": 200, "ignore_eos": True,
        "stream": True, "events": True,
    }  # fmt: skip
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    short = {"model": "m", "prompt": [9], "max_tokens": 3}
    settings = Settings(send_seconds=600, most_unsent=most)
    with real(random_model("causal"), settings, batch_size=17) as (client, engine, state):
        place = urlsplit(str(client.base_url))
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((place.hostname, place.port))
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
            wait_until(lambda: waiting)
            assert client.post("/v1/completions", json=short).status_code == 200
            wait_until(lambda: state.in_flight == 0)
        wait_until(lambda: engine.stats.cancelled == 16 and engine.stats.slots_used == 0)
    assert most / 2 < max(waiting) <= most


def test_a_client_that_reads_as_it_is_given_up_is_sent_no_end(monkeypatch):
    """What was dropped is missing: nothing may look like a whole answer."""
    dropped, sent = [], []

    class Noted(Unsent):
        def __init__(self, *what) -> None:
            super().__init__(*what[:-1], lambda: (dropped.append(None), what[-1]()))

    monkeypatch.setattr(streaming, "Unsent", Noted)
    served = stock("m", random_model("llada"))

    async def send(message: dict) -> None:
        sent.append(message)
        while "body" in message and not dropped:
            await asyncio.sleep(0)

    async def main() -> None:
        app = create_app([served], Settings(most_unsent=2000))
        await ask(app, {**LONG, "stream": True, "events": True}, send)
        await served.engine.close()

    asyncio.run(main())
    assert dropped and len(sent) == 2
    assert sent[1]["more_body"] and sent[1]["body"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
def test_answers_are_what_the_types_of_openai_write(served, path, stream, logprobs):
    """To the byte: fields, their order, and which of them are left out."""
    chat = "chat" in path
    body = CHAT if chat else {"model": "tiny-d2f", "prompt": "Use 3 and 4.", "echo": True}
    if logprobs:
        body = body | ({"logprobs": True} if chat else {"logprobs": 1, "echo": False})
    if stream:
        options = {"include_usage": True, "continuous_usage_stats": logprobs}
        body = body | {"stream": True, "stream_options": options}
    text = served.post(path, {**body, "max_tokens": 16}).text
    found = sse(text)[:-1] if stream else [text]
    assert found
    kind = (ChatCompletionChunk if stream else ChatCompletion) if chat else Completion
    for one in found:
        # As their client reads it: the type of a completion's chunk knows no end that is null.
        read = kind.construct(**json.loads(one))
        written = read.model_dump(mode="json", exclude_unset=True)
        assert json.dumps(written, separators=(",", ":"), ensure_ascii=stream) == one


def test_a_stream_in_which_nothing_happens_is_kept_alive(monkeypatch):
    monkeypatch.setattr(streaming, "PING_SECONDS", 0.01)
    model = fresh_model("llada")
    gate = Gate(model)
    try:
        with real(model) as (client, _, _):
            asked = {**LONG, "stream": True}
            with client.stream("POST", "/v1/completions", json=asked) as response:
                lines = response.iter_lines()
                assert next(line for line in lines if line) == ": ping"
                gate.open()
                assert [line for line in lines if line][-1] == "data: [DONE]"
    finally:
        gate.open()
