"""What the command's clock counts: decoding, and not what is done between its events."""

from __future__ import annotations

import pytest

import decode
from decode import loop
from decode.loop import Stopwatch
from decode.step import Event


def result(seconds: float) -> decode.Result:
    return decode.Result(
        tokens=[1], raw_tokens=[1], text=None, forwards=1, calls=[(1, 0)], seconds=seconds,
        finish_reason="length", prompt_tokens=1, counts={},
    )  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""

    class Clock:
        now = 100.0

        def perf_counter(self) -> float:
            return self.now

    made = Clock()
    monkeypatch.setattr(loop, "time", made)
    return made


def test_showing_and_pausing_are_not_counted(clock):
    """Two requests in turn, two forwards of 1 s each; the caller takes 10 s an event."""

    def decoding():
        for request in (0, 1):
            entered = clock.now
            for forward in (1, 2):
                clock.now += 1
                ended = forward == 2
                yield Event(
                    request, forward, [], [], result(clock.now - entered) if ended else None
                )

    watch, own = Stopwatch(), []
    for event, seconds in watch.over(decoding()):
        own.append((event.request, event.forward, seconds))
        clock.now += 10
    assert watch.seconds == 4
    assert [entry[:2] for entry in own] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    # A request enters within the generator, after the caller's last pause: the second one's own
    # seconds hold none of the first one's.
    assert [entry[2] for entry in own] == [0.0, 2.0, 0.0, 2.0]


def test_of_requests_that_run_together_each_loses_the_pauses_while_it_ran(clock):
    def decoding():
        began = clock.now
        clock.now += 1
        yield Event(0, 1, [], [], None)
        yield Event(1, 1, [], [], result(clock.now - began - 10))
        clock.now += 1
        yield Event(0, 2, [], [], result(clock.now - began))

    watch, own = Stopwatch(), {}
    for event, seconds in watch.over(decoding()):
        if event.result is not None:
            own[event.request] = seconds
        clock.now += 10
    assert watch.seconds == 2
    assert own == {0: 2.0, 1: 1.0}
