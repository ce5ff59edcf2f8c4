"""The client of served entries: what it sends, and that every fault is retried or reported."""

import re
import socket
import time

import pytest

from d2f.errors import InputError
from decode.compare.client import NO_KEY, Client, check_endpoint
from decode.compare.config import Endpoint, Limits
from tests.comparison.endpoint import answering, endpoint

QUICK = Limits(connect=2.0, silence=0.15, request=0.4)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("decode.compare.client.BACKOFF_SECONDS", 0.01)


def ask(url, prompts, concurrency=1, *, stream=True, retries=2, stop=(), **more):
    entry = Endpoint(
        name="e", kind="endpoint", model="served", url=url, tokenizer="t", stream=stream, **more
    )
    client = Client(entry, url, "served", QUICK, retries)
    return client.run(prompts, concurrency, 7, stop)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_the_text_with_its_counts_and_times(stream):
    with endpoint(answering(lambda body: f"w{body['prompt'][0]} end")) as server:
        run = ask(server.url, [[1], [2], [3]], stream=stream)
    assert [a.text for a in run.answers] == ["w1 end", "w2 end", "w3 end"]
    assert [a.own_tokens for a in run.answers] == [3, 3, 3]
    assert all(a.error is None and a.attempts == 1 for a in run.answers)
    for answer in run.answers:
        if stream:
            assert answer.submitted <= answer.prefill <= answer.first <= answer.finished
        else:  # when the first token was there cannot be known
            assert answer.prefill is None and answer.first is None
        assert answer.submitted < answer.finished <= run.seconds


def test_a_request_says_the_rules():
    with endpoint(answering(pause=0.02)) as server:
        ask(server.url, [[5, 6]] * 9, 3, stop=("x",), body={"stop_token_ids": [2]})
    assert server.most == 3, "in flight"
    assert server.bodies == 9 * [
        {
            "model": "served",
            "prompt": [5, 6],
            "temperature": 0.0,
            "max_tokens": 7,
            "stop": ["x"],
            "stop_token_ids": [2],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def hang(handler, body, number):
    time.sleep(0.3)


def drop_at_once(handler, body, number):
    handler.connection.shutdown(socket.SHUT_RDWR)


def end_without_done(handler, body, number):
    handler.begin_stream()
    handler.piece("w1", "stop")


def stop_in_the_middle(handler, body, number):
    handler.begin_stream()
    handler.piece("w1")
    time.sleep(0.3)


def send_something_else(handler, body, number):
    handler.begin_stream()
    handler.line("data: <html>")


def send_an_error(handler, body, number):
    handler.begin_stream()
    handler.line('data: {"error": {"message": "out of memory"}}')


def fail(handler, body, number):
    handler.send(500, "it broke")


def ignore_the_limit(handler, body, number):
    answering(lambda body: "w " * 20)(handler, body | {"max_tokens": 99}, number)


FAULTS = {
    hang: "ReadTimeout",
    drop_at_once: "RemoteProtocolError|ReadError",
    end_without_done: "cut short",
    stop_in_the_middle: "ReadTimeout",
    send_something_else: "expected a completion, got <html>",
    send_an_error: "out of memory",
    fail: "HTTP 500: .*it broke",
    ignore_the_limit: "ignored max_tokens: says 21 tokens, asked for 7",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_retried_and_one_that_stays_fails_its_request_alone(fault):
    good, met = answering(), []

    def behave(handler, body, number):
        once = body["prompt"] == [2] and not met
        met.extend([True] * once)
        (fault if once or body["prompt"] == [1] else good)(handler, body, number)

    with endpoint(behave) as server:
        fine, bad, again = ask(server.url, [[0], [1], [2]], 2, retries=1).answers
    assert re.search(FAULTS[fault], bad.error), bad.error
    assert bad.attempts == 2
    assert (fine.error, fine.attempts, fine.text) == (None, 1, "w1 w2")
    assert (again.error, again.attempts, again.text) == (None, 2, "w1 w2")


def test_a_dropped_connection_is_opened_again_at_once(monkeypatch):
    monkeypatch.setattr("decode.compare.client.BACKOFF_SECONDS", 60)

    def behave(handler, body, number):
        (drop_at_once if number == 0 else answering())(handler, body, number)

    with endpoint(behave) as server:
        run = ask(server.url, [[0]], retries=1)
    assert run.answers[0].error is None and run.answers[0].attempts == 2 and run.seconds < 5


def test_an_answer_that_never_ends_is_given_up():
    def trickle(handler, body, number):
        handler.begin_stream()
        for _ in range(12):
            handler.piece("w")
            time.sleep(0.05)

    with endpoint(trickle) as server:
        answer = ask(server.url, [[1]], retries=0).answers[0]
    assert answer.error == "no answer within 0.4 s"


def test_a_refused_request_is_not_sent_again():
    with endpoint(lambda handler, body, number: handler.send(400, "too long")) as server:
        answer = ask(server.url, [[1]]).answers[0]
    assert answer.attempts == 1 and "HTTP 400" in answer.error and "too long" in answer.error


def test_nothing_listens():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}/v1"
    answer = ask(url, [[1]], retries=1).answers[0]
    assert answer.attempts == 2 and "ConnectError" in answer.error
    with pytest.raises(InputError, match="no endpoint answers there"):
        check_endpoint(url, "served", NO_KEY, QUICK)


def test_an_endpoint_that_serves_another_model_or_none():
    with endpoint(answering()) as server:
        check_endpoint(server.url, "served", NO_KEY, QUICK)
        with pytest.raises(InputError, match=r"not serve 'Serve'; did you mean served\?; it"):
            check_endpoint(server.url, "Serve", NO_KEY, QUICK)
    for status, text in ((200, "<html>"), (200, "[]"), (500, "it broke")):
        with endpoint(answering(), lambda handler: handler.send(status, text)) as server:  # noqa: B023
            with pytest.raises(InputError, match="/models"):
                check_endpoint(server.url, "served", NO_KEY, QUICK)
