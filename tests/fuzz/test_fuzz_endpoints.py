"""Whatever an endpoint answers, it costs its own request alone, in bounded time, and is credited
no more than was asked for."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from decode.compare.client import Answer, Client, check_endpoint, ignored_limit
from decode.compare.config import Endpoint, Limits
from decode.compare.entries import count_tokens
from decode.compare.report import judge
from tests.comparison.endpoint import answering, endpoint
from tests.fuzz.odd import NUMBERS, TEXT, VALUES, damaged
from tests.fuzz.outcome import attempt, budget
from tests.tiny import tokenizer

MOST = 7  # tokens asked for
LIMITS = Limits(connect=5.0, silence=1.0, request=3.0)  # far above what a busy machine takes
SECONDS = 15.0  # one request may take its limit; the rest is a slow machine

COUNTS = st.integers(0, MOST) | NUMBERS | st.sampled_from([True, "3", None, [], 10**30, 1e300])
ANSWERS = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "text": st.sampled_from(["w", "w1 w2 ", "#### 7", "w " * 500]) | TEXT | VALUES,
                    "index": COUNTS,
                    "finish_reason": st.sampled_from(["stop", "length", None]) | VALUES,
                },
            )
            | VALUES,
            max_size=2,
        )
        | VALUES,
        "usage": st.fixed_dictionaries({}, optional={"completion_tokens": COUNTS}) | VALUES,
        "error": VALUES,
    },
)
GOOD = {"choices": [{"index": 0, "text": "w", "finish_reason": "stop"}]}


def as_text(value: Any) -> str:
    """JSON as a server may write it; deep or with what no library takes, then repr."""
    try:
        return json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        return repr(value)


TEXTS = st.one_of(
    (ANSWERS | VALUES).map(as_text),
    damaged(json.dumps(GOOD | {"usage": {"completion_tokens": 3}})),
    st.sampled_from(["[" * 50_000, '{"a":' * 20_000, "1" * 5000, "", "null", "<html>", "{}}"]),
)  # fmt: skip
LINES = st.one_of(
    TEXTS.map(lambda text: f"data: {text}"),
    st.sampled_from(["data: [DONE]", f"data: {json.dumps(GOOD)}", ": hi", "event: x", "data:"]),
    TEXT,
)  # fmt: skip
HEADERS = st.sampled_from(
    [{}, {}, {}, {"content-length": "3"}, {"content-length": "99999999"}, {"content-length": "-1"},
     {"content-length": "x"}, {"transfer-encoding": "chunked"}, {"content-encoding": "gzip"},
     {"content-encoding": "\xff"}, {"location": "/"}, {"content-type": "text/html"}]
)  # fmt: skip


@st.composite
def replies(draw: st.DrawFn) -> dict[str, Any]:
    """Status, headers and pieces of a body; pause: seconds before each of its pieces."""
    whole = draw(st.booleans())
    pieces = (
        [draw(TEXTS)] if whole else [f"{line}\n\n" for line in draw(st.lists(LINES, max_size=5))]
    )
    data = [piece.encode("utf-8", "surrogatepass") for piece in pieces]
    if draw(st.integers(0, 3)) == 0:
        data.append(draw(st.binary(max_size=8)))
    if not whole and draw(st.booleans()):
        data.append(b"data: [DONE]\n\n")
    status = draw(st.sampled_from([200] * 8 + [100, 204, 302, 400, 404, 429, 500, 503, 999]))
    pause = draw(st.sampled_from([0.0] * 40 + [0.05, 1.5]))
    return {"status": status, "headers": draw(HEADERS), "pieces": data, "pause": pause}


def give(handler: Any, reply: dict[str, Any]) -> None:
    handler.send_response(reply["status"])
    for name, value in reply["headers"].items():
        handler.send_header(name, value)
    handler.end_headers()
    for piece in reply["pieces"]:
        time.sleep(reply["pause"])
        handler.wfile.write(piece)
        handler.wfile.flush()


@pytest.fixture(scope="module")
def server():
    """One of its requests, that of prompt [1], has the odd reply in `odd`."""
    good, state = answering(), SimpleNamespace(odd=None)

    def behave(handler: Any, body: dict[str, Any], number: int) -> None:
        if body["prompt"] == [1]:
            give(handler, state.odd)
        else:
            good(handler, body, number)

    with endpoint(behave, lambda handler: give(handler, state.odd)) as running:
        state.url = running.url
        yield state


class Item:
    def right(self, text: str) -> bool:
        return "#### 7" in text


WORKLOAD: Any = SimpleNamespace(name="w", stop=("###",), max_new_tokens=MOST, items=[Item()] * 3)


def ask(url: str, stream: bool) -> Any:
    entry = Endpoint(
        name="e", kind="endpoint", model="served", url=url, tokenizer="t", stream=stream
    )
    client = Client(entry, url, "served", LIMITS, retries=0)
    return client.run([[0], [1], [2]], 1, max_new_tokens=MOST, stop=())


NO_HTTP = {"status": 100, "headers": {}, "pieces": [b"x" * 20_000 + b"\n"] * 3, "pause": 0.0}


@budget(0.6)
@given(reply=replies(), stream=st.booleans())
@example(reply=NO_HTTP, stream=False)
def test_an_odd_answer_costs_its_own_request_alone(server, reply, stream):
    server.odd = reply
    began = time.monotonic()
    run = attempt(lambda: ask(server.url, stream), seconds=SECONDS)
    assert run is not None and time.monotonic() - began < SECONDS
    assert [run.answers[i].error for i in (0, 2)] == [None, None]
    assert [run.answers[i].text for i in (0, 2)] == ["w1 w2", "w1 w2"]
    odd: Answer = run.answers[1]
    assert (odd.error is None) == (odd.finished is not None)
    for answer, tokens in zip(
        run.answers, count_tokens(tokenizer(), [a.text for a in run.answers]), strict=True
    ):
        answer.error = answer.error or ignored_limit(answer, tokens, MOST)
    record = judge(run, WORKLOAD, tokenizer(), entry="e", concurrency=1, repetition=0)
    judged = record.answers[1]
    assert 0 <= judged.tokens <= MOST and judged.first_tokens <= judged.tokens
    assert judged.error is None or (judged.tokens == 0 and not judged.right)
    json.dumps(vars(judged)).encode()
    assert judged.error is None or (len(judged.error) < 1500 and judged.error.isprintable())


@budget(0.5)
@given(reply=replies())
def test_an_odd_list_of_models_is_refused(server, reply):
    server.odd = reply
    attempt(lambda: check_endpoint(server.url, "served", {}, LIMITS), seconds=SECONDS)


LIES = [
    {"text": ["w"], "finish_reason": "stop"},
    {"text": None, "finish_reason": "stop"},
    {"text": "\ud800", "finish_reason": "stop"},
    {"finish_reason": "stop"},
    3,
    None,
]
COUNTED = [-1, 1.5, "3", True, [], {}, 10**30, MOST + 1]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "answer",
    [{"choices": [lie]} for lie in LIES]
    + [GOOD | {"usage": {"completion_tokens": count}} for count in COUNTED]
    + [{"choices": []}, {"choices": {}}, {}, GOOD | {"error": "no"}],
)
def test_nonsense_is_no_answer(server, answer, stream):
    """Text that is none, counts that are none, and more tokens than were asked for."""
    body = json.dumps(answer)
    pieces = [f"data: {body}\n\n", "data: [DONE]\n\n"] if stream else [body]
    server.odd = {
        "status": 200, "headers": {}, "pause": 0.0, "pieces": [p.encode() for p in pieces],
    }  # fmt: skip
    odd = ask(server.url, stream).answers[1]
    (tokens,) = count_tokens(tokenizer(), [odd.text])
    assert odd.error or ignored_limit(odd, tokens, MOST)
