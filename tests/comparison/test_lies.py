"""Endpoints that lie, stall or send nonsense: each costs its own requests, never the run, and is
never credited for it."""

import json
import re
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from d2f.errors import InputError
from decode.compare.__main__ import main
from decode.compare.client import Answer, check_endpoint, ignored_limit
from decode.compare.report import ComparisonReport
from tests.comparison.endpoint import answering, endpoint
from tests.comparison.test_served import QUICK, ask

GOOD = '{"index": 0, "text": "w", "finish_reason": "stop"}'


def sending(choice=GOOD, usage='{"completion_tokens": 2}'):
    """A behaviour that sends this JSON as its choice and its usage."""

    def behave(handler, body, number):
        values = f'{{"choices": [{choice}], "usage": {usage}}}'
        if not body.get("stream"):
            handler.send(200, values)
            return
        handler.begin_stream()
        handler.line("data: " + values)
        handler.line("data: [DONE]")

    return behave


def packed(handler, body, number):
    handler.send_response(200)
    handler.send_header("content-encoding", "gzip")
    handler.end_headers()
    handler.wfile.write(b"not gzip at all")


def endless(handler, body, number):
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x" * 2**16)


def slow_refusal(handler, body, number):
    handler.send_response(500)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b"no ")
        time.sleep(0.05)


DEEP = "[" * 50_000
LIES = {
    "text that is a number": (sending('{"text": 3}'), "text that is no string"),
    "text that is a list": (sending('{"text": ["w"]}'), "text that is no string"),
    "half a surrogate pair": (sending(GOOD.replace("w", r"\ud800")), "not Unicode"),
    "deep JSON": (sending(DEEP), "malformed JSON"),
    "a number of 5000 digits": (sending(usage="1" * 5000), "malformed JSON"),
    "a count that is true": (sending(usage='{"completion_tokens": true}'), "whole number"),
    "a count below zero": (sending(usage='{"completion_tokens": -3}'), "whole number"),
    "a count that is text": (sending(usage='{"completion_tokens": "9"}'), "whole number"),
    "a body that is no gzip": (packed, "'gzip', which was not asked for"),
    "a body without an end": (endless, "an answer of more than 94208 bytes"),
    "an error that never ends": (slow_refusal, r"no answer within 1 s|HTTP 500: no no"),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_fails_its_own_request_alone(lie, stream):
    behave, said = LIES[lie]
    good = answering()

    def one_lies(handler, body, number):
        (behave if body["prompt"] == [1] else good)(handler, body, number)

    with endpoint(one_lies) as server:
        run = ask(server.url, [[0], [1], [2]], stream=stream, retries=0)
    assert re.search(said, run.answers[1].error), run.answers[1].error
    assert [a.text for a in run.answers] == ["w1 w2", "", "w1 w2"]


def test_what_a_server_sends_is_quoted_without_its_control_characters():
    def behave(handler, body, number):
        handler.send(400, "\x1b[2J [/red] \u202e")

    with endpoint(behave) as server:
        answer = ask(server.url, [[1]]).answers[0]
    assert answer.error == r"HTTP 400: \x1b[2J [/red] \u202e"


def replayed(handler, body, number):
    """Sends back what the prompt holds, which no server of the library would."""
    handler.begin_stream()
    handler.wfile.write(bytes(body["prompt"]))


@pytest.fixture(scope="module")
def replaying():
    with endpoint(replayed) as server:
        yield server


LINES = st.sampled_from(
    [b"data: ", b"data: [DONE]\n", b"\n", b"\r\n", b": hi\n", b"{", b"}", b'"choices"', b":", b"[",
     b"]", GOOD.encode(), b'"usage"', b"null", b"NaN", b"1e999", b'"\\ud800"', b"\xff"]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(sent=st.lists(st.one_of(LINES, st.binary(max_size=5)), min_size=1).map(b"".join))
def test_whatever_is_sent_is_an_answer_or_a_failure(replaying, sent):
    answer = ask(replaying.url, [list(sent)], retries=0).answers[0]
    assert (answer.error is None) == (answer.finished is not None)
    answer.text.encode()


def drip(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (drip, "no answer within 0.3 s"),
        (lambda h: h.send(200, "x" * 2**21), "an answer of more than 1048576 bytes"),
        (lambda h: h.send(200, DEEP), "malformed JSON"),
        (lambda h: h.send(200, '{"data": [{"id": 3}]}'), "expected a list of models, got"),
        (lambda h: h.send(200, '{"data": 3}'), "expected a list of models, got"),
        (lambda h: h.send(200, "[1]"), "expected a list of models, got"),
        (lambda h: h.send(200, r'{"data": [{"id": "\ud800\n"}]}'), r"serves \\ud800"),
        (lambda h: packed(h, {}, 0), "not asked for"),
        (lambda h: h.send(500, "\x1b[2J"), r"HTTP 500: \\x1b\[2J"),
    ],
)
def test_a_list_of_models_that_is_none(models, said):
    with endpoint(answering(), models) as server:
        with pytest.raises(InputError, match=said) as caught:
            check_endpoint(server.url, "served", {}, QUICK)
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("own", "tokens", "ignored"),
    [(None, 10, False), (7, 7, False), (8, 7, True), (None, 28, False), (None, 29, True),
     (3, 10**6, True)],
)  # fmt: skip
def test_who_ignores_max_tokens(own, tokens, ignored):
    """More than it says may be: a broken character of one token is encoded again as three."""
    said = ignored_limit(Answer(0, own_tokens=own), tokens, 7)
    assert (said is not None) == ignored
    assert said is None or said.startswith("ignored max_tokens: ")


# The whole command


def compare(folder, *behaviours):
    """(status, report) of a comparison of endpoints, named after what they are."""
    entries, servers = [], []
    try:
        for name, behaviour in behaviours:
            servers.append(endpoint(behaviour))
            url = servers[-1].__enter__().url
            entries.append({"name": name, "kind": "endpoint", "url": url, "model": "served",
                            "tokenizer": "tiny-ar"})  # fmt: skip
        values = {
            "output": str(folder / "out"), "entries": entries, "tasks": ["story"], "problems": 4,
            "accuracy_problems": 0, "repetitions": 2, "warmup": 1, "retries": 0,
        }  # fmt: skip
        (folder / "c.yaml").write_text(yaml.safe_dump(values))
        status = main(["--config", str(folder / "c.yaml")])
        path = folder / "out" / "report.json"
        return status, ComparisonReport.load(path) if path.exists() else None
    finally:
        for server in servers:
            server.__exit__(None, None, None)


def test_one_that_ignores_max_tokens_is_credited_nothing(tmp_path, capsys):
    million = answering(lambda body: "w " * 3000)
    status, report = compare(tmp_path, ("liar", million), ("honest", answering()))
    said = capsys.readouterr().err
    assert status == 2 and "entry liar has failed: not one of 1 requests was answered" in said
    assert "ignored max_tokens: says 3001 tokens, asked for 64" in said
    assert not [r for r in report.records if r.entry == "liar"] and report.about["cut_short"]


@pytest.mark.parametrize("first", ["honest", "liar"])
def test_one_with_failures_is_never_ranked(tmp_path, capsys, first):
    """Whether it is the baseline or not; a failure is quick, so its figures would be the best."""
    good = answering(lambda body: "3+4=7\n#### 7", pause=0.05)

    def fails_sometimes(handler, body, number):
        if number in (2, 3):
            handler.send(400, "[/red] no | more \x1b[2J")
            return
        answering(lambda body: "3+4=7\n#### 7 and so on")(handler, body, number)

    both = [("honest", good), ("liar", fails_sometimes)]
    status, report = compare(tmp_path, *(both if first == "honest" else both[::-1]))
    said = capsys.readouterr()
    assert status == 1
    assert "error: story: 2 of 8 requests of liar failed, it is not ranked, e.g. HTTP" in said.err
    assert [f.entry for f in report.failures] == ["liar"]
    assert {row.entry for row in report.ranked} == {"honest"}
    rows = {row.entry: row for row in report.speeds}
    assert rows["liar"].throughput > rows["honest"].throughput and rows["liar"].failed == 2
    assert report.speedup(rows["liar"]) is None
    text = (tmp_path / "out" / "report.md").read_text()
    assert "**liar is not ranked**: 2 of its 8 requests failed, e.g. HTTP 400: [/red] no" in text
    assert "**honest** is fastest" in text and "overtakes" not in text and "faster than" not in text
    assert "(not ranked) |" in text
    assert (tmp_path / "out" / "throughput.png").stat().st_size > 1000


def test_no_answer_has_more_tokens_than_were_asked_for(tmp_path):
    """Too few more to be sure that the limit was ignored, and it says no count of its own."""
    long = sending(json.dumps({"text": "w " * 80, "finish_reason": "stop"}), "null")
    status, report = compare(tmp_path, ("liar", long))
    assert status == 0
    assert {a.tokens for record in report.records for a in record.answers} == {64}
