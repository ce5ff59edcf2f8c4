"""What the front makes of replicas that die, are none, or say nothing. They are made up here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from serving import sse

from decode.server.models import Settings
from decode.server.ray_app import TOLD, Call, create_front

DIED = ActorDiedError()
NONE = DeploymentUnavailableError(DeploymentID("Replica"))
BODY = {"model": "m", "prompt": "a"}


def head(kind: str) -> dict[str, Any]:
    start = {"type": "http.response.start", "status": 200}
    return start | {"headers": [(b"content-type", kind.encode())]}


def body(text: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


TOLD_OF_IT = {"type": TOLD, "fields": {"tokens": 1}}
WHOLE = [[TOLD_OF_IT, head("application/json"), body(b"{}", False)]]
BEGUN = [[head("text/event-stream"), body(b"data: 1\n\n", True)]]
STREAM = [*BEGUN, [TOLD_OF_IT, body(b"data: [DONE]\n\n", False)]]


class Made:
    """A handle whose calls give these, one after the other: lists of messages, and errors."""

    def __init__(self, *answers: Sequence[Any], told: Any = NONE):
        self.answers, self.told = list(answers), told
        self.calls: list[Call] = []
        self.cancelled = 0

    def options(self, **_: Any) -> Made:
        return self

    def remote(self, call: Call) -> Replies:
        self.calls.append(call)
        return Replies(self, self.answers.pop(0))

    def broadcast(self, method: str) -> Made:
        return self

    async def results_async(self, **_: Any) -> list[Any]:
        if isinstance(self.told, BaseException):
            raise self.told
        return self.told


class Replies:
    def __init__(self, made: Made, items: Sequence[Any]):
        self._made, self._items = made, list(items)

    def __aiter__(self) -> Replies:
        return self

    async def __anext__(self) -> list[dict[str, Any]]:
        if not self._items:
            raise StopAsyncIteration
        item = self._items.pop(0)
        if item is None:  # it says nothing more
            await asyncio.sleep(60)
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self._made.cancelled += 1


def client(made: Any, **settings: Any) -> TestClient:
    front = create_front(made, Settings(**settings))
    return TestClient(front, base_url="http://localhost", raise_server_exceptions=False)


@pytest.mark.parametrize("error", [DIED, ActorUnavailableError("", b"1" * 16)])
def test_what_a_dead_replica_did_not_answer_another_one_does(error):
    for answer in (WHOLE, STREAM):
        made = Made([error], answer)
        response = client(made).post("/v1/completions", json=BODY)
        assert response.status_code == 200 and response.text.endswith(("{}", "data: [DONE]\n\n"))
        one, other = made.calls
        assert one == other and json.loads(one.body) == BODY


def test_a_request_that_no_replica_survives_is_not_given_to_all():
    made = Made([DIED], [DIED], WHOLE)
    response = client(made).post("/v1/completions", json=BODY)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "replica_ended" and len(made.answers) == 1


def test_a_stream_that_has_begun_ends_with_the_error():
    made = Made([*BEGUN, DIED], STREAM)
    first, last = sse(client(made).post("/v1/completions", json=BODY).text)
    assert first == "1" and json.loads(last)["error"]["code"] == "replica_ended"
    assert len(made.answers) == 1


@pytest.mark.parametrize(
    ("error", "code"), [(BackPressureError(5, 5), "queue_full"), (NONE, "not_ready")]
)
def test_without_a_replica_a_request_is_refused(error, code):
    response = client(Made([error])).post("/v1/completions", json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (503, code)


def test_a_replica_that_says_nothing_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("decode.server.ray_app.GRACE_SECONDS", 0)
    made = Made([None])
    response = client(made, request_seconds=0.1).post("/v1/completions", json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert made.cancelled == 1


@pytest.mark.parametrize("error", [NONE, DIED, TimeoutError()])
def test_how_the_server_is_without_a_replica(error):
    alone = client(Made(told=error))
    assert alone.get("/health").status_code == 200
    assert alone.get("/ready").json()["error"]["code"] == "not_ready"
    text = alone.get("/metrics").text
    assert "d2f_replicas 0.0" in text and 'route="/ready",status="503"} 1.0' in text
    assert client(Made(told=[False, DIED, True])).get("/ready").status_code == 200


def test_a_replica_is_not_told_the_key_nor_another_id():
    made = Made(WHOLE)
    keys = {"Authorization": "Bearer secret", "X-Request-Id": "mine"}
    client(made, api_keys=("secret",)).post("/v1/completions", json=BODY, headers=keys)
    headers = made.calls[0].scope["headers"]
    assert (b"x-request-id", b"mine") in headers and "secret" not in str(headers)
    assert client(made, api_keys=("secret",)).post("/v1/completions", json=BODY).status_code == 401


def test_a_body_that_is_too_large_is_not_handed_on():
    made = Made(WHOLE)
    assert client(made, max_body=4).post("/v1/completions", json=BODY).status_code == 413
    assert not made.calls
