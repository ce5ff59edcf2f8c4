"""`AsyncEngine`: who leaves, in whatever way and at whatever moment, gives his place back and hurts
nobody."""

from __future__ import annotations

import asyncio
import contextlib
import random
from functools import partial

import pytest
from gates import (
    DECODERS,
    LONG,
    PATIENCE,
    PROMPT,
    Preparing,
    alone,
    is_empty,
    read,
    run,
    same,
    turns,
)
from tiny import random_model

import decode
import decode.engine.async_engine


async def leave_by_break(ask, reached):
    async for _ in ask():
        reached.set()
        break


async def leave_by_exception(ask, reached):
    with contextlib.suppress(KeyError):
        async for _ in ask():
            reached.set()
            raise KeyError


async def leave_by_cancelled_task(ask, reached):
    async def consume():
        async for _ in ask():
            reached.set()

    task = asyncio.create_task(consume())
    await reached.wait()
    await turns()  # it waits for the second event
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_cancelled_body(ask, reached):
    async def consume():
        async for _ in ask():
            reached.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(consume())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_closing(ask, reached):
    events = ask()
    await anext(events)
    reached.set()
    await events.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def leave_by_closing_beside_the_reader(ask, reached):
    events = ask()
    await anext(events)
    reached.set()
    reader = asyncio.create_task(anext(events, None))
    await turns()
    with pytest.raises(RuntimeError, match="have one reader, this is a second one"):
        await anext(events)
    await events.aclose()
    assert await reader is None


WAYS = [
    leave_by_break,
    leave_by_exception,
    leave_by_cancelled_task,
    leave_by_cancelled_body,
    leave_by_closing,
    leave_by_closing_beside_the_reader,
]


@pytest.mark.parametrize("way", WAYS)
def test_leaving_the_loop_cancels_and_the_next_request_gets_in(gated, way):
    """One request at a time fits, and the first one would take 40 forwards."""
    model, gate = gated

    async def main():
        async with decode.AsyncEngine(model, batch_size=1, slots=50) as engine:
            reached = asyncio.Event()
            gate.let(1)
            await way(partial(engine.generate, PROMPT, LONG), reached)
            assert reached.is_set()
            second = asyncio.create_task(read(engine.generate([12, 13], LONG)))
            gate.open()
            events = await second
            return events, engine

    events, engine = run(main())
    same(events, alone(model, LONG, [12, 13]))
    stats = engine.stats
    assert (stats.finished, stats.cancelled, stats.running, stats.waiting) == (1, 1, 0, 0)
    assert stats.forwards <= 40 + 2  # the first event's, and one that was under way
    assert is_empty(engine)


def test_leaving_before_the_first_event_cancels(gated, instantly):
    """While it waits, and while it is prepared."""
    model, gate = gated

    async def main():
        async with decode.AsyncEngine(model, batch_size=1) as engine:
            first = asyncio.create_task(read(engine.generate(PROMPT, LONG)))
            waits = asyncio.create_task(read(engine.generate(PROMPT, LONG)))
            await turns()
            waits.cancel()
            never_read = engine.generate(PROMPT, LONG)
            await never_read.aclose()
            assert await read(never_read) == []
            gate.open()
            return await first, engine

    events, engine = run(main())
    same(events, alone(model))
    assert (engine.stats.cancelled, engine.stats.finished, engine.stats.forwards) == (1, 1, 40)


@pytest.mark.parametrize("closed", [False, True])
def test_leaving_while_the_prompt_is_prepared_gives_the_place_back(monkeypatch, closed):
    model, preparing = random_model("llada"), Preparing(monkeypatch)

    async def main():
        async with decode.AsyncEngine(model, batch_size=1, max_waiting=0) as engine:
            events = engine.generate(PROMPT, LONG)
            task = asyncio.create_task(anext(events, None))
            await asyncio.to_thread(preparing.begun.wait, PATIENCE / 4)
            assert engine.stats.waiting == 1
            with pytest.raises(decode.QueueFullError):
                await anext(engine.generate(PROMPT, LONG))
            if closed:
                await events.aclose()
                preparing.go_on.set()
                assert await task is None
            else:
                task.cancel()
                preparing.go_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await task
        assert (engine.stats.running, engine.stats.waiting, engine.stats.finished) == (0, 0, 0)
        assert engine.stats.cancelled == closed

    run(main())


def test_random_leaving_leaves_the_others_as_they_were():
    model, draw = random_model("llada"), random.Random(1)
    jobs = []
    for _ in range(60):
        prompt = draw.choices(range(8, 200), k=draw.randint(1, 9))
        jobs.append((prompt, draw.choice(DECODERS), draw.choice([None, None, 0, 1, 2, 5])))

    async def consume(engine, prompt, decoder, most):
        found = []
        async for event in engine.generate(prompt, decoder):
            found.append(event)
            if len(found) == most:
                return None
        return found

    async def main():
        async with decode.AsyncEngine(model, batch_size=5, slots=150) as engine:
            tasks = [asyncio.create_task(consume(engine, *job)) for job in jobs]
            for task, (_, _, most) in zip(tasks, jobs, strict=True):
                if most == 0:
                    task.cancel()
                await asyncio.sleep(0)
            return await asyncio.gather(*tasks, return_exceptions=True), engine

    found, engine = run(main())
    for events, (prompt, decoder, most) in zip(found, jobs, strict=True):
        if most is None:
            same(events, alone(model, decoder, prompt))
    assert is_empty(engine)
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.failed) == (0, 0, 0)
    assert stats.finished >= sum(most is None for _, _, most in jobs)


def test_a_loop_that_is_closed_leaves(gated):
    """Its requests are cancelled; those of another loop go on."""
    model, gate = gated
    engine = decode.AsyncEngine(model, batch_size=2)
    left, events = asyncio.new_event_loop(), engine.generate(PROMPT, LONG)
    gate.let(1)
    left.run_until_complete(anext(events))
    left.close()  # and `events` is still held

    async def main():
        gate.open()
        found = await read(engine.generate(PROMPT, LONG))
        await engine.close()
        return found

    same(run(main()), alone(model))
    assert (engine.stats.cancelled, engine.stats.finished) == (1, 1) and is_empty(engine)
    del events
