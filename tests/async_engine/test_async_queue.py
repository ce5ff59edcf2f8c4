"""`AsyncEngine`: who waits, who is refused, and what a model that raises does to them."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from gates import (
    LONG,
    PROMPT,
    alone,
    is_empty,
    read,
    run,
    same,
    turns,
)

import decode
import decode.engine.async_engine
from d2f.errors import EngineClosedError, RequestError


def test_a_full_queue_refuses_at_once(gated, instantly):
    model, gate = gated

    async def main():
        async with decode.AsyncEngine(model, batch_size=2, max_waiting=1) as engine:
            ask = partial(engine.generate, PROMPT, LONG)
            tasks = [asyncio.create_task(read(ask())) for _ in range(3)]
            await turns()
            for _ in range(2):
                with pytest.raises(decode.QueueFullError, match="is full: 1 requests wait") as info:
                    await anext(ask())
                assert info.value.waiting == 1
            gate.let(3)
            while engine.stats.running < 2:
                await asyncio.sleep(0)
            assert (engine.stats.waiting, engine.stats.refused) == (1, 2)
            gate.open()
            found = await asyncio.gather(*tasks)
            found.append(await read(ask()))
            return found, engine

    found, engine = run(main())
    for events in found:
        same(events, alone(model))
    assert (engine.stats.finished, engine.stats.refused) == (4, 2)


def test_who_waits_for_slots_waits(gated, instantly):
    """There is room in the batch, and none in the cache."""
    model, gate = gated

    async def main():
        async with decode.AsyncEngine(model, batch_size=4, slots=50, max_waiting=2) as engine:
            first = engine.generate(PROMPT, LONG)
            gate.let(1)
            await anext(first)
            tasks = [asyncio.create_task(read(engine.generate(PROMPT, LONG))) for _ in range(2)]
            await turns()
            gate.let(2)
            await anext(first)
            await anext(first)  # the second forward may have begun before they came
            assert (engine.stats.running, engine.stats.waiting) == (1, 2)
            with pytest.raises(decode.QueueFullError, match="2 requests wait"):
                await anext(engine.generate(PROMPT, LONG))
            gate.open()
            return [await read(first), *await asyncio.gather(*tasks)]

    rest, *others = run(main())
    assert rest[-1].result.raw_tokens == alone(model).raw_tokens
    for events in others:
        same(events, alone(model))


def test_without_a_queue_there_is_still_room_in_the_batch(gated):
    """Also after all have left in the middle."""
    model, gate = gated
    gate.open()

    async def main():
        async with decode.AsyncEngine(model, batch_size=1, slots=50, max_waiting=0) as engine:
            for _ in range(3):
                async for _ in engine.generate(PROMPT, LONG):
                    break
                while engine.stats.running:
                    await asyncio.sleep(0)
                await read(engine.generate(PROMPT, LONG))
            return engine

    assert run(main()).stats.refused == 0


def test_a_cache_that_was_full_has_room_again_when_all_have_left(gated, instantly):
    """Both in one look into the inbox, so that no forward follows."""
    model, gate = gated

    async def main():
        async with decode.AsyncEngine(model, batch_size=2, slots=50, max_waiting=0) as engine:
            first = engine.generate(PROMPT, LONG)
            gate.let(1)
            await anext(first)
            second = asyncio.create_task(read(engine.generate(PROMPT, LONG)))
            await turns()
            gate.let(2)
            await anext(first)
            await anext(first)
            second.cancel()
            await turns()
            await first.aclose()
            gate.open()
            while engine.stats.cancelled < 2:
                await asyncio.sleep(0)
            return await read(engine.generate(PROMPT, LONG))

    same(run(main()), alone(model))


@pytest.mark.parametrize("early", [False, True])
def test_what_the_model_raises_ends_those_that_run_and_the_rest_goes_on(gated, instantly, early):
    model, gate = gated

    async def main():
        async with decode.AsyncEngine(model, batch_size=2) as engine:
            engine._engine.early = early
            first = engine.generate(PROMPT, LONG)
            gate.let(2 if early else 1)
            await anext(first)
            tasks = [asyncio.create_task(read(engine.generate(PROMPT, LONG))) for _ in range(4)]
            await turns()
            gate.error = MemoryError("too large")
            gate.let(1)
            rest = await read(first)
            assert gate.activations() is None  # though the error is held, and its traceback
            gate.error = None
            gate.open()
            return rest, await asyncio.gather(*tasks), engine

    (*before, last), others, engine = run(main())
    # The event of the forward before one that was started early is not lost with it.
    assert [event.forward for event in before] == ([2] if early else [])
    assert type(last.error) is RequestError
    assert "MemoryError: too large" in str(last.error)
    assert isinstance(last.error.__cause__, MemoryError)
    failed = [events for events in others if events[-1].error is not None]
    assert len(failed) <= 1  # who was in that forward
    for events in others:
        if events not in failed:
            same(events, alone(model))
    assert engine.stats.failed == 1 + len(failed) and is_empty(engine)


def test_a_model_that_raises_twice_in_a_row_refuses_those_that_wait(gated, instantly):
    model, gate = gated

    async def main():
        async with decode.AsyncEngine(model, batch_size=1) as engine:
            tasks = [asyncio.create_task(read(engine.generate(PROMPT, LONG))) for _ in range(5)]
            await turns()
            gate.error = MemoryError("too large")
            gate.let(2)  # no more: each of the five would need one
            found = await asyncio.gather(*tasks)
            gate.error = None
            gate.open()
            return found, await read(engine.generate(PROMPT, LONG)), engine

    failed, works, engine = run(main())
    assert all("MemoryError: too large" in str(events[-1].error) for events in failed)
    same(works, alone(model))
    assert (engine.stats.failed, engine.stats.finished) == (5, 1) and is_empty(engine)
    assert engine.stats.forwards == 2 + works[-1].result.forwards


def test_a_device_that_is_gone_closes_the_engine(gated, instantly):
    """After an error that nothing can be done about, cleaning up raises too."""
    model, gate = gated

    async def main():
        engine = decode.AsyncEngine(model, batch_size=1)

        def clear(*arguments):
            raise OSError("device lost")

        engine._engine.cache.clear = clear
        tasks = [asyncio.create_task(read(engine.generate(PROMPT, LONG))) for _ in range(3)]
        await turns()
        gate.error = MemoryError("too large")
        gate.let(1)
        for task in tasks:
            with pytest.raises(EngineClosedError, match="has stopped: OSError: device lost"):
                await task
        with pytest.raises(EngineClosedError, match="has stopped: OSError") as info:
            await anext(engine.generate(PROMPT, LONG))
        assert isinstance(info.value.__cause__, OSError)
        await engine.close()
        assert (engine.stats.failed, engine.stats.running, engine.stats.waiting) == (3, 0, 0)

    run(main())
