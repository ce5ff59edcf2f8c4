"""Fixtures of the tests of `AsyncEngine`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from gates import (
    PATIENCE,
    Gate,
)
from tiny import fresh_model

import decode
import decode.engine.async_engine


@pytest.fixture
def gated() -> Iterator[tuple]:
    """A model and the gate of its forwards, which is open after the test."""
    model = fresh_model("llada")
    gate = Gate(model)
    model.decode_rows = gate.forward
    late = threading.Timer(PATIENCE / 2, gate.open)  # so that a test that fails comes to its end
    late.start()
    yield model, gate
    late.cancel()
    gate.error = None
    gate.open()


@pytest.fixture
def instantly(monkeypatch):
    """Requests are prepared in the loop's own thread, so that `turns` queue them."""

    async def call(function, *arguments):
        return function(*arguments)

    to_thread = asyncio.to_thread
    monkeypatch.setattr(
        decode.engine.async_engine.asyncio,
        "to_thread",
        lambda f, *a: to_thread(f, *a) if f.__name__ == "join" else call(f, *a),
    )
