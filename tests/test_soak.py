"""The soak notices what it is there for, and a sound server passes it."""

import asyncio
import json

import httpx
import pytest

from benchmarks.soak import __main__ as command
from benchmarks.soak.plan import plan
from benchmarks.soak.questions import Question
from benchmarks.soak.verdict import WARM_UP, growth, verdict
from decode.step import Result

TEXT = ["one two three", "four five six"]
QUESTIONS = [
    Question("completions", {"model": "m", "prompt": [5, 6], "max_tokens": 9, "n": 2}, [[5, 6]]),
    Question("chat/completions", {"model": "m", "messages": [], "max_tokens": 9}, [[]]),
]


def result(text):
    return Result([1, 2, 3], [1, 2, 3], text, 3, [(1, 0)] * 3, 0.1, "length", prompt_tokens=2)


EXPECTED = [[result(text) for text in TEXT], [result(TEXT[0])]]
IDLE = "".join(
    f'd2f_engine_{name}{{model="m"}} 0\n' for name in ("running", "waiting", "slots_used")
)


class Server:
    """Answers the requests of `plan` as it should, but for what a test plants."""

    def __init__(self, planned):
        self.refused = {one.content: one.status for one in planned if one.question is None}
        self.metrics = IDLE
        self.full = 3  # times that its queue is full at first
        self.sent = 0

    def answer(self, path, body):
        """Text of each choice."""
        return TEXT if path == "/v1/completions" else TEXT[:1]

    def lines(self, chunks):
        return [*chunks, "[DONE]"]

    def __call__(self, request):
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.metrics)
        content = request.content.decode()
        if content in self.refused:
            status = self.refused[content]
            return httpx.Response(status, json={"error": {"message": "no", "type": "t"}})
        if self.full:
            self.full -= 1
            return httpx.Response(429, headers={"retry-after": "0"})
        self.sent += 1
        body = json.loads(content)
        texts = self.answer(request.url.path, body)
        usage = {"prompt_tokens": 2, "completion_tokens": 3 * len(texts)}
        usage["d2f"] = {"forwards": 3 * len(texts)}
        pieces = [
            {"index": i, "text": part, "finish_reason": "length" if part == text[-4:] else None}
            for i, text in enumerate(texts)
            for part in (text[:-4], text[-4:])
        ]
        if body.get("stream"):
            chunks = [json.dumps({"choices": [piece]}) for piece in pieces]
            chunks.append(json.dumps({"choices": [], "usage": usage}))
            return httpx.Response(200, text="".join(f"data: {s}\n\n" for s in self.lines(chunks)))
        whole = [
            {"index": i, "text": text, "finish_reason": "length"} for i, text in enumerate(texts)
        ]
        return httpx.Response(200, json={"choices": whole, "usage": usage})


def soaked(server_class, count=60, **more):
    """The report of a soak of a server with planted faults."""
    planned = plan(QUESTIONS, count, 0)
    server = server_class(planned)
    for name, value in more.items():
        setattr(server, name, value)

    async def run():
        transport = httpx.MockTransport(server)
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            return await command.drive(client, planned, 8)

    outcomes, _, leaked = asyncio.run(run())
    report = verdict(planned, outcomes, QUESTIONS, EXPECTED)
    return report | {"leaked": leaked, "memory": growth([], count)}


def test_a_server_that_is_right_passes():
    report = soaked(Server)
    assert command.failed(report) == []
    assert report["refused_for_a_full_queue"] == 3
    assert {"answered", "left", "refused"} == set(report["ends"])
    assert sum(report["ends"].values()) == 60


def test_a_wrong_token_is_noticed():
    class Wrong(Server):
        def answer(self, path, body):
            texts = super().answer(path, body)
            return [texts[0].replace("two", "too"), *texts[1:]] if self.sent == 20 else texts

    report = soaked(Wrong)
    assert command.failed(report) == ["wrong"]
    assert report["wrong"]["count"] == 1
    assert "too three" in report["wrong"]["first"][0]


def test_a_choice_that_is_missing_or_ends_otherwise_is_noticed():
    class Fewer(Server):
        def answer(self, path, body):
            return super().answer(path, body)[:1]

    assert command.failed(soaked(Fewer)) == ["wrong"]
    shorter = [[*EXPECTED[0]], [Result(**vars(EXPECTED[1][0]) | {"finish_reason": "end"})]]
    outcomes = [o for o in (verdict_of(shorter)) if o]
    assert outcomes and "ended by length" in outcomes[0]


def verdict_of(expected):
    """What is wrong in a sound server's answers if others were expected."""
    planned = plan(QUESTIONS, 30, 0)

    async def run():
        transport = httpx.MockTransport(Server(planned))
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            return (await command.drive(client, planned, 4))[0]

    return verdict(planned, asyncio.run(run()), QUESTIONS, expected)["wrong"]["first"]


def drop(request, server):
    raise httpx.ReadError("the connection broke")


def internal(request, server):
    return httpx.Response(500, json={"error": {"message": "no"}})


@pytest.mark.parametrize("fault", [drop, internal])
def test_a_lost_request_is_noticed(fault):
    class Losing(Server):
        def __call__(self, request):
            if self.sent == 10 and request.method == "POST":
                self.sent += 1
                return fault(request, self)
            return super().__call__(request)

    report = soaked(Losing)
    assert command.failed(report) == ["lost"]
    assert report["lost"]["count"] == 1


def test_a_stream_without_its_end_is_lost():
    class Cut(Server):
        def lines(self, chunks):
            return chunks

    report = soaked(Cut)
    assert command.failed(report) == ["lost"]
    assert "without [DONE]" in report["lost"]["first"][0]


def test_a_malformed_request_with_another_status_is_noticed():
    class Careless(Server):
        def __init__(self, planned):
            super().__init__(planned)
            self.refused = dict.fromkeys(self.refused, 422)

    assert command.failed(soaked(Careless)) == ["lost"]


def test_a_request_whose_end_nobody_noted_is_lost():
    report = verdict(plan(QUESTIONS, 4, 0), [], QUESTIONS, EXPECTED)
    assert report["lost"]["count"] == 4


@pytest.mark.parametrize("name", ["running", "waiting", "slots_used"])
def test_what_is_still_held_at_the_end_is_noticed(name, monkeypatch):
    monkeypatch.setattr("benchmarks.soak.watch.PATIENCE", 0.0)
    held = IDLE.replace(f'{name}{{model="m"}} 0', f'{name}{{model="m"}} 8')
    report = soaked(Server, metrics=held)
    assert command.failed(report) == ["leaked"]
    assert list(report["leaked"].values()) == [8]


@pytest.mark.parametrize(("bytes_a_request", "level"), [(0, True), (200, True), (9000, False)])
def test_memory_that_grows_is_noticed(bytes_a_request, level):
    """What is allocated in the warm-up is no growth."""
    samples = [
        (n, 500_000_000 + min(n, 3000) * 10**5 + n * bytes_a_request) for n in range(0, 10_000, 50)
    ]
    assert growth(samples, 10_000)["level"] is level
    assert growth(samples[: int(WARM_UP * len(samples))], 10_000)["level"] is None


def test_the_requests_follow_from_the_seed_alone():
    first = plan(QUESTIONS, 400, 3)
    assert first == plan(QUESTIONS, 400, 3) != plan(QUESTIONS, 400, 4)
    assert 0.15 < sum(one.leave is not None for one in first) / 400 < 0.25
    assert {one.status for one in first} == {200, 400, 404}


@pytest.mark.slow
def test_a_small_soak_of_the_server(tmp_path, capsys):
    file = tmp_path / "soak.json"
    status = command.main(["--requests", "60", "--distinct", "12", "--json", str(file)])
    assert status == 0, capsys.readouterr()
    report = json.loads(file.read_text())
    assert sum(report["ends"].values()) == 60
    assert report["choices"] > 30
    assert report["leaked"] == {}
