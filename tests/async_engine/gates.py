"""What the tests of `AsyncEngine` share: requests, and a model that runs when it is let."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine

import pytest
import torch
from tiny import fresh_model

import decode
import decode.engine.async_engine
from d2f.errors import EngineClosedError

PATIENCE = 240.0  # seconds after which a test has failed
LONG = decode.Static(block_size=4, max_new_tokens=40)  # 40 forwards
DECODERS = (
    decode.D2F(4, tau_conf=0.3, max_new_tokens=9),
    decode.D2F(3, tau_conf=0.2, max_new_tokens=12, temperature=1.0, seed=3),
    decode.Wino(6, max_new_tokens=8, tau1=0.1, tau2=0.3),
    decode.FreeDave(4, max_new_tokens=8, drafts=3),
)
PROMPT = [9, 10, 11]


class Failing(decode.Static):
    """Its session raises at its third forward."""

    def begin(self, prompt, contract):
        session = super().begin(prompt, contract)
        left, accept = iter(range(2)), session.accept

        def failing(predictions):
            next(left)  # StopIteration
            accept(predictions)

        session.accept = failing
        return session


class Gate:
    """Lets a model's forwards through one by one, until it is opened for all."""

    def __init__(self, model):
        self.real, self.passes = model.decode_rows, threading.Semaphore(0)
        self.error: Exception | None = None  # raised in place of a forward
        self.activations: weakref.ref | None = None  # what that forward had in memory

    def forward(self, *arguments):
        self.passes.acquire()
        if self.error is not None:
            activations = torch.zeros(1)
            self.activations = weakref.ref(activations)
            raise self.error
        return self.real(*arguments)

    def let(self, forwards: int = 1) -> None:
        self.passes.release(forwards)

    def open(self) -> None:
        self.passes.release(10**6)


def run(main: Coroutine):
    """What it returns; who waits for ever is an error."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


async def read(events) -> list[decode.Event]:
    return [event async for event in events]


def same(events: list[decode.Event], alone: decode.Result) -> None:
    """They are whole, and of a request that gave what it gives alone."""
    result = events[-1].result
    assert result.error is None
    assert [event.forward for event in events] == list(range(1, alone.forwards + 1))
    assert (result.raw_tokens, result.calls) == (alone.raw_tokens, alone.calls)
    assert (result.text, result.finish_reason) == (alone.text, alone.finish_reason)


def alone(model, decoder=LONG, prompt=PROMPT) -> decode.Result:
    """Of the model without its gate."""
    twin = fresh_model(model.family) if "decode_rows" in vars(model) else model
    return decode.generate(twin, [prompt], decoder)[0]


def is_empty(engine: decode.AsyncEngine) -> bool:
    """Whether the engine, which nobody uses any more, has all its slots again."""
    inner = engine._engine
    return not (inner.pool._used or inner.running or inner.waiting)


async def turns(count: int = 5) -> None:
    """Let the other tasks of the loop go as far as they can without the engine's thread."""
    for _ in range(count):
        await asyncio.sleep(0)


class Preparing:
    """Holds up `checked`, by which a request is prepared, until it may go on."""

    def __init__(self, monkeypatch):
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.real = decode.engine.async_engine.checked
        monkeypatch.setattr(decode.engine.async_engine, "checked", self.checked)

    def checked(self, *arguments, **options):
        self.begun.set()
        assert self.go_on.wait(PATIENCE / 4)
        return self.real(*arguments, **options)


async def refused(engine) -> None:
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        await anext(engine.generate(PROMPT, LONG))
