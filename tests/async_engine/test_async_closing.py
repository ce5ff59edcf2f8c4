"""`AsyncEngine`: it is closed, left, forgotten, or overtaken by the interpreter's end."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys

import pytest
from gates import (
    LONG,
    PATIENCE,
    PROMPT,
    Preparing,
    alone,
    read,
    refused,
    run,
    same,
    turns,
)
from tiny import random_model

import decode
import decode.engine.async_engine
from d2f.errors import EngineClosedError


def test_close_finishes_what_runs_and_waits(gated, instantly):
    model, gate = gated

    async def main():
        engine = decode.AsyncEngine(model, batch_size=2)
        tasks = [asyncio.create_task(read(engine.generate(PROMPT, LONG))) for _ in range(5)]
        await turns()
        closing = asyncio.create_task(engine.close())
        await turns()
        await refused(engine)
        gate.open()
        await closing
        assert not engine._thread._thread.is_alive()
        await refused(engine)
        await engine.close()
        return await asyncio.gather(*tasks), engine

    found, engine = run(main())
    for events in found:
        same(events, alone(model))
    assert (engine.stats.finished, engine.stats.refused) == (5, 2)


def test_close_cancels_where_asked(gated, instantly):
    """Also what it was asked to finish before."""
    model, gate = gated

    async def main():
        engine = decode.AsyncEngine(model, batch_size=2)
        first = engine.generate(PROMPT, LONG)
        gate.let(1)
        await anext(first)
        tasks = [asyncio.create_task(read(engine.generate(PROMPT, LONG))) for _ in range(3)]
        await turns()
        finishing = asyncio.create_task(engine.close())
        await turns()
        closing = asyncio.create_task(engine.close(finish=False))
        await turns()
        gate.let(2)  # the forward under way, and one that may have begun after it
        await closing
        await finishing
        assert not engine._thread._thread.is_alive()
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            await read(first)
        for task in tasks:
            with pytest.raises(EngineClosedError, match="the engine is closed"):
                await task
        assert await read(first) == []
        await refused(engine)
        assert (engine.stats.cancelled, engine.stats.running, engine.stats.waiting) == (4, 0, 0)

    run(main())


@pytest.mark.parametrize("finish", [True, False])
def test_closing_while_a_prompt_is_prepared(monkeypatch, finish):
    """It has its place: it is finished, or told."""
    model, preparing = random_model("llada"), Preparing(monkeypatch)

    async def main():
        engine = decode.AsyncEngine(model)
        task = asyncio.create_task(read(engine.generate(PROMPT, LONG)))
        await asyncio.to_thread(preparing.begun.wait, PATIENCE / 4)
        closing = asyncio.create_task(engine.close(finish=finish))
        if not finish:
            await closing
        await turns()
        preparing.go_on.set()
        if finish:
            same(await task, alone(model))
        else:
            with pytest.raises(EngineClosedError, match="the engine is closed"):
                await task
        await closing
        assert engine.stats.waiting == 0

    run(main())


def test_an_exception_inside_async_with_cancels(gated):
    model, gate = gated

    async def main():
        with pytest.raises(KeyError):
            async with decode.AsyncEngine(model) as engine:
                events = engine.generate(PROMPT, LONG)
                gate.let(1)
                await anext(events)
                gate.let(2)
                raise KeyError
        assert engine.stats.cancelled == 1
        assert not engine._thread._thread.is_alive()

    run(main())


def test_an_engine_that_is_forgotten_ends_its_thread():
    engine = decode.AsyncEngine(random_model("llada"))
    thread = engine._thread._thread
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


UNCLOSED = """
import asyncio, sys
sys.path.insert(0, "tests")
from tiny import random_model
import decode

engine = decode.AsyncEngine(random_model("llada"))
events = engine.generate([9, 10], decode.Static(block_size=4, max_new_tokens=200))

async def main():
    print((await anext(events)).forward)

asyncio.run(main())
"""


def test_the_interpreter_ends_without_close():
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=PATIENCE
    )
    # What transformers prints where torchao is installed, when it is imported, is not the engine's.
    ours = [line for line in done.stderr.splitlines() if not re.search("torchao|_pytree", line)]
    assert (done.returncode, done.stdout, ours) == (0, "1\n", [])
