"""Who may ask: keys, names of the server, other sites; what the log says of it."""

from __future__ import annotations

import json
import logging
import os
import threading

import pytest
from serving import Served, refused, stock, wait_until
from tiny import random_model

from decode.server import middleware
from decode.server.middleware import LOGGER, set_up_logs
from decode.server.options import Options

TEXT = {"model": "m", "prompt": [9, 10, 11], "max_tokens": 4}
KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def locked():
    settings = Options(api_key=KEYS, public="/health", allowed_host=("localhost", "[::1]"))
    with Served([stock("m", random_model("llada"))], settings) as served:
        yield served


@pytest.fixture
def lines(capfd):
    """Set up the log in a format, and return a function that gives its lines."""

    def start(form):
        set_up_logs(form)

        def written() -> list[str]:
            LOGGER.handlers[0].flush()
            return capfd.readouterr().err.splitlines()

        return written

    yield start
    for name in (LOGGER.name, "uvicorn", "asyncio"):
        logging.getLogger(name).handlers = []
    LOGGER.propagate = True


def test_a_key_is_needed_where_there_are_some(locked):
    for key in KEYS:
        answer = locked.post("/v1/completions", TEXT, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    for given in ("", "Bearer", "Bearer first", "Basic first-key", "Bearer first-key second-key",
                  "first-key", "Bearer \xe9"):  # fmt: skip
        for path in ("/v1/completions", "/tokenize", "/detokenize", "/v1/chat/completions"):
            response = locked.client.post(
                path, json=TEXT, headers=[(b"authorization", given.encode("latin-1"))]
            )
            message = refused(response, 401, code="invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert not any(key in message for key in KEYS)
        for path in ("/v1/models", "/metrics", "/ready", "/version", "/tokenizer_info", "/nothing",
                     "/openapi.json"):  # fmt: skip
            assert locked.client.get(path).status_code == 401
    for path in ("/", "/health", "/examples"):
        assert locked.client.get(path).status_code == 200


def test_a_server_is_asked_by_its_own_names(locked):
    """Another site's name may be made to lead here."""
    own = ("localhost", "localhost:8000", "[::1]:80", "LocalHost", "localhost.:80")
    for host in (*own, "evil.example", "localhost.evil.example:80", ""):
        response = locked.client.get("/health", headers={"host": host})
        assert response.status_code == (200 if host in own else 400), host
    refused(locked.client.get("/", headers={"host": "evil.example"}), 400, code="host_not_allowed")


def test_other_sites_may_not_ask_unless_they_are_named(locked):
    """Neither read, nor have a browser send JSON."""
    asks = {
        "origin": "https://other.example", "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization",
    }  # fmt: skip
    response = locked.client.options("/v1/completions", headers=asks)
    assert "access-control-allow-origin" not in response.headers
    assert response.status_code in (401, 405)
    settings = Options(cors_origin=("https://other.example",), api_key=KEYS)
    with Served([stock("m", random_model("llada"))], settings) as served:
        response = served.client.options("/v1/completions", headers=asks)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://other.example"
        other = served.client.options("/v1/completions", headers=asks | {"origin": "https://a.b"})
        assert "access-control-allow-origin" not in other.headers
        got = served.client.get("/health", headers={"origin": "https://other.example"})
        assert got.headers["access-control-expose-headers"] == "x-request-id"


def test_the_page_may_load_from_its_own_server_alone(locked):
    for path in ("/", "/v1/models", "/page/none"):
        found = locked.client.get(path).headers
        assert found["content-security-policy"].startswith("default-src 'self'; ")
        assert "unsafe" not in found["content-security-policy"]
        assert found["x-content-type-options"] == "nosniff"


def test_an_id_is_the_clients_own_where_it_is_short_and_printable(locked):
    def id_of(given: bytes) -> str:
        response = locked.client.get("/health", headers=[(b"x-request-id", given)])
        return response.headers["x-request-id"]

    assert id_of(b"my-id:7") == "my-id:7"
    for given in (b"", b"a b", b"\xe9", b"a" * 129, b"\t\x01"):
        assert id_of(given) != given.decode("latin-1") and len(id_of(given)) == 32
    key = {"authorization": f"Bearer {KEYS[0]}", "x-request-id": "mine"}
    assert locked.post("/v1/completions", TEXT, headers=key).json()["id"] == "cmpl-mine"


def test_the_log_has_a_line_a_request_without_prompts_and_keys(locked, lines):
    written = lines("json")
    secret = {**TEXT, "prompt": "a secret"}
    for values in (secret, {**secret, "model": "none"}, {**secret, "n": 0}):
        key = {"authorization": f"Bearer {KEYS[0]}", "x-request-id": "mine"}
        locked.post("/v1/completions", values, headers=key)
    locked.post("/v1/completions", secret, headers={"authorization": "Bearer wrong-key"})
    found = written()
    assert len(found) == 4
    entries = [json.loads(line) for line in found]
    assert [entry["status"] for entry in entries] == [200, 404, 400, 401]
    first = entries[0]
    assert (first["id"], first["path"], first["method"]) == ("mine", "/v1/completions", "POST")
    assert (first["model"], first["decoder"], first["outcome"]) == ("m", "static", "finished")
    assert first["tokens"] <= 4 and first["forwards"] >= 1 and first["seconds"] >= 0
    assert first["prompt_tokens"] > 1 and first["level"] == "info" and first["time"].endswith("Z")
    whole = "\n".join(found)
    assert "secret" not in whole and "-key" not in whole


def test_prompts_are_logged_where_that_is_asked_for(lines):
    written = lines("text")
    with Served([stock("m", random_model("llada"))], Options(log_prompts=True)) as served:
        served.ask({**TEXT, "prompt": "line\nbreak \x1b[31m"})
        served.client.get("/a status=200 b", headers={"x-request-id": "mine"})
    one, other = written()
    assert "prompts=" in one and "break" in one and "\x1b" not in one
    assert "status=200" in one and 'decoder="static"' in one
    assert 'path="/a status=200 b"' in other and " status=404" in other


def test_a_log_that_nobody_reads_holds_up_nobody(monkeypatch):
    """What finds the queue full is dropped, and counted."""
    written, read = [], threading.Event()
    monkeypatch.setattr(middleware, "MOST_LINES", 3)
    monkeypatch.setattr(os, "write", lambda _, line: read.wait(30) and written.append(line))
    log = middleware.LogQueue("text")
    for number in range(9):
        log.handle(logging.makeLogRecord({"msg": f"line {number}", "levelname": "INFO"}))
        if number == 0:
            wait_until(log.queue.empty)  # it is being written
    read.set()
    log.flush()
    text = b"".join(written).decode()
    assert "line 3" in text and "line 4" not in text
    assert "5 lines of the log were lost" in text


def test_an_error_of_the_server_is_logged_and_not_told(lines, monkeypatch):
    written = lines("json")
    with Served([stock("m", random_model("llada"))]) as served:

        def broken(*arguments):
            raise KeyError("a path of the machine")

        monkeypatch.setattr("decode.server.app.choose_decoder", broken)
        message = refused(served.post("/v1/completions", TEXT), 500)
        assert "machine" not in message
        monkeypatch.undo()
        assert served.client.get("/health").status_code == 200
    whole = json.loads(written()[0])
    assert whole["level"] == "error" and "a path of the machine" in whole["trace"]
