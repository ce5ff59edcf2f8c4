"""`AsyncEngine`: each request gives what it gives alone, from any loop; who leaves, waits, fails or
closes hurts nobody."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps

import pytest
from tiny import POISON, Gate, fresh_model, poisoned_model, random_model

import decode
from d2f.errors import EngineClosedError, InputError, NonFiniteLogitsError, RequestError
from decode.engine import async_engine
from decode.engine import engine as cache_size
from decode.engine.engine import default_slots

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


@pytest.fixture
def gated():
    """A model and the gate of its forwards, which is open after the test."""
    model = fresh_model("llada")
    gate = Gate(model)
    yield model, gate
    gate.error = None
    gate.open()


@pytest.fixture
def instantly(monkeypatch):
    """Prepare requests in the loop's own thread, so that `turns` queue them."""

    async def call(function, *arguments, **options):
        return function(*arguments, **options)

    real = asyncio.to_thread
    monkeypatch.setattr(
        asyncio,
        "to_thread",
        lambda f, *a, **o: (real if f.__name__ == "join" else call)(f, *a, **o),
    )


def run(main):
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


def asynchronous(test):
    """Run a test in an event loop of its own; one that waits for ever is an error."""

    @wraps(test)
    def run_test(*arguments, **named):
        run(test(*arguments, **named))

    return run_test


async def read(events) -> list[decode.Event]:
    return [event async for event in events]


def ask(engine, prompt=PROMPT, decoder=LONG) -> asyncio.Task:
    return asyncio.create_task(read(engine.generate(prompt, decoder)))


async def turns(count: int = 5) -> None:
    """Let the other tasks of the loop go as far as they can without the engine's thread."""
    for _ in range(count):
        await asyncio.sleep(0)


def alone(model, decoder=LONG, prompt=PROMPT) -> decode.Result:
    """Decode without the gate."""
    twin = fresh_model(model.family) if "decode_rows" in vars(model) else model
    return decode.generate(twin, [prompt], decoder)[0]


def same(events: list[decode.Event], alone: decode.Result) -> None:
    """Check that events are whole, and of a request that gave what it gives alone."""
    result = events[-1].result
    assert result.error is None
    assert [event.forward for event in events] == list(range(1, alone.forwards + 1))
    assert (result.raw_tokens, result.calls) == (alone.raw_tokens, alone.calls)
    assert (result.text, result.finish_reason) == (alone.text, alone.finish_reason)


def is_empty(engine: decode.AsyncEngine) -> bool:
    """Say whether the engine, which nobody uses any more, has all its slots again."""
    inner = engine._engine
    return not (inner.pool._used or inner.running or inner.waiting)


async def refused(engine, said="the engine is closed") -> None:
    with pytest.raises(EngineClosedError, match=said):
        await ask(engine)


# Results.


@asynchronous
async def test_a_panic_of_the_tokenizer_is_an_error_of_its_request(monkeypatch):
    """It comes from Rust, and is no `Exception`: the engine's thread would end."""
    model = fresh_model("llada")
    plain, panic = type(model.tokenizer).decode, type("PanicException", (BaseException,), {})

    def panicking(self, ids, **options):
        raise panic("index out of bounds")

    async with decode.AsyncEngine(model) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(type(model.tokenizer), "decode", panicking)
            failed = await ask(engine, [9, 10])
        assert "the tokenizer failed: index out of bounds" in str(failed[-1].error)
        assert type(model.tokenizer).decode is plain
        same(await ask(engine), alone(model))


@asynchronous
async def test_what_cannot_be_decoded_is_refused_before_it_is_queued():
    with pytest.raises(InputError, match="batch_size must be a whole number of at least"):
        decode.AsyncEngine(random_model("llada"), batch_size=0)
    options = {"batch_size": 2, "slots": 100, "request_slots": 80, "max_waiting": 0}
    options |= {"prefill_rows": 8, "reuse_prefixes": True, "max_rows": 7}
    async with decode.AsyncEngine(random_model("causal"), **options) as engine:
        for prompt, decoder, said in (
            ("", "autoregressive", "the prompt is empty"),
            (PROMPT, "fast", "decoder: got 'fast'"),
            ([4] * 50, decode.Autoregressive(40), "slots of the cache, a request may have 80"),
        ):
            events = engine.generate(prompt, decoder)
            with pytest.raises(InputError, match=said):
                await anext(events)
            assert await read(events) == []
    inner, stats = engine._engine, engine.stats
    assert (inner.batch_size, inner.pool.slots, inner.prefill_rows) == (2, 100, 8)
    assert (inner.max_rows, inner.request_slots) == (7, 80) and inner.prefixes is not None
    assert (stats.forwards, stats.waiting, stats.failed) == (0, 0, 0)


@pytest.mark.parametrize(
    ("prompt", "decoder", "kind", "said"),
    [
        (PROMPT, Failing(block_size=4, max_new_tokens=8), RequestError, "forward 3: StopIteration"),
        ([9, POISON], LONG, NonFiniteLogitsError, "NaN or infinite logits at forward 1"),
    ],
)
@asynchronous
async def test_a_request_fails_alone(prompt, decoder, kind, said):
    model = poisoned_model()
    async with decode.AsyncEngine(model, batch_size=3) as engine:
        jobs = [(PROMPT, LONG), (prompt, decoder), ([12, 13], DECODERS[1])]
        first, bad, third = await asyncio.gather(*(ask(engine, *job) for job in jobs))
    same(first, alone(model))
    same(third, alone(model, DECODERS[1], [12, 13]))
    assert type(bad[-1].error) is kind and said in str(bad[-1].error)
    assert [event.result is None for event in bad] == [True] * (len(bad) - 1) + [False]
    assert (engine.stats.failed, engine.stats.finished) == (1, 2) and is_empty(engine)


def test_event_loops_in_several_threads():
    model = random_model("llada")
    engine = decode.AsyncEngine(model, batch_size=4)

    def main(name: int) -> list:
        jobs = [([9 + name, 20 + i], decoder) for i, decoder in enumerate(DECODERS)]

        async def all_of_them():
            return await asyncio.gather(*(ask(engine, *job) for job in jobs))

        return [*zip(run(all_of_them()), jobs, strict=True)]

    with ThreadPoolExecutor(3) as threads:
        found = [pair for pairs in threads.map(main, range(3)) for pair in pairs]
    run(engine.close())
    for events, (prompt, decoder) in found:
        same(events, alone(model, decoder, prompt))


def test_default_slots_hold_a_batch_and_no_more_than_half_of_the_memory(monkeypatch):
    model = fresh_model("llada")  # 2 layers of 2 heads of 8, keys and values in fp32
    slot = 2 * 2 * 2 * 8 * 4
    assert default_slots(model, 3) == 3 * 256
    monkeypatch.setattr(cache_size, "LONG", 100)
    assert default_slots(model, 3) == 300
    assert default_slots(model, 2) == 256  # of the context
    monkeypatch.setattr(cache_size, "free_bytes", lambda device: 2 * 90 * slot)
    assert default_slots(model, 3) == 90
    decode.AsyncEngine(model, slots=180)
    with pytest.raises(InputError, match=r"^slots: 181 take 0.0 GiB.* expected 180 at most"):
        decode.AsyncEngine(model, slots=181)


def test_events_are_those_of_stream_and_without_views_they_have_no_blocks():
    model = random_model("llada")
    jobs = [(PROMPT, decoder) for decoder in DECODERS]

    async def main(views):
        found = [[] for _ in jobs]
        async with decode.AsyncEngine(model) as engine:
            engine.submit(jobs, lambda place, event: found[place].append(event), views=views)
        await turns()
        return found

    for bare, full, (prompt, decoder) in zip(run(main(False)), run(main(True)), jobs, strict=True):
        expected = list(decode.stream(model, [prompt], decoder))
        shown = [(event.blocks, event.settled) for event in full]
        assert shown == [(event.blocks, event.settled) for event in expected]
        for ours, theirs in zip(full, expected, strict=True):
            assert [r.token for r in ours.revealed] == [r.token for r in theirs.revealed]
        assert [event.blocks for event in bare] == [[]] * len(full)
        assert [event.settled for event in bare] == [event.settled for event in full]


# Leaving.


async def leave_by_break(events, reached):
    async for _ in events():
        reached.set()
        break


async def leave_by_cancelled_task(events, reached):
    async def consume():
        async for _ in events():
            reached.set()

    task = asyncio.create_task(consume())
    await reached.wait()
    await turns()  # it waits for the second event
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_closing(events, reached):
    stream = events()
    await anext(stream)
    reached.set()
    await stream.aclose()
    assert await read(stream) == []


@pytest.mark.parametrize("way", [leave_by_break, leave_by_cancelled_task, leave_by_closing])
@asynchronous
async def test_leaving_the_loop_cancels_and_the_next_request_gets_in(gated, way):
    """One request at a time fits, and the first one would take 40 forwards."""
    model, gate = gated
    async with decode.AsyncEngine(model, batch_size=1, slots=50) as engine:
        reached = asyncio.Event()
        gate.let(1)
        await way(partial(engine.generate, PROMPT, LONG), reached)
        await turns()  # the loop closes an iterator that was dropped
        assert reached.is_set()
        second = ask(engine, [12, 13])
        gate.open()
        events = await second
    same(events, alone(model, LONG, [12, 13]))
    stats = engine.stats
    assert (stats.finished, stats.cancelled, stats.running, stats.waiting) == (1, 1, 0, 0)
    assert stats.forwards <= 40 + 2  # the first event's, and one that was under way
    assert is_empty(engine)


@asynchronous
async def test_those_who_stay_get_what_they_get_alone_and_others_leave_at_random():
    model, draw = random_model("dream"), random.Random(1)
    jobs = []
    for _ in range(40):
        prompt = draw.choices(range(8, 200), k=draw.randint(1, 9))
        jobs.append((prompt, draw.choice(DECODERS), draw.choice([None, None, 0, 1, 2, 5])))
    jobs[3] = [9], "d2f", None

    async def consume(engine, prompt, decoder, most):
        found = []
        async for event in engine.generate(prompt, decoder):
            found.append(event)
            if len(found) == most:
                break
        return found

    async with decode.AsyncEngine(model, batch_size=5, slots=300) as engine:
        tasks = [asyncio.create_task(consume(engine, *job)) for job in jobs]
        for task, (_, _, most) in zip(tasks, jobs, strict=True):
            if most == 0:
                task.cancel()
            await asyncio.sleep(0)
        found = await asyncio.gather(*tasks, return_exceptions=True)
    stayed = [job[:2] for job in jobs if job[2] is None]
    answers = [events for events, job in zip(found, jobs, strict=True) if job[2] is None]
    results = [alone(model, decoder, prompt) for prompt, decoder in stayed]
    for events, result in zip(answers, results, strict=True):
        same(events, result)
    assert len({events[0].request for events in answers}) == len(answers)
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.failed, stats.refused) == (0, 0, 0, 0)
    assert is_empty(engine) and len(answers) <= stats.finished < stats.finished + stats.cancelled
    assert sum(len(result.tokens) for result in results) <= stats.tokens
    assert max(r.forwards for r in results) <= stats.forwards < sum(r.forwards for r in results)


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
        found = await ask(engine)
        await engine.close()
        return found

    same(run(main()), alone(model))
    assert (engine.stats.cancelled, engine.stats.finished) == (1, 1) and is_empty(engine)
    del events


# Waiting.


@asynchronous
async def test_a_full_queue_refuses_at_once(gated, instantly):
    model, gate = gated
    async with decode.AsyncEngine(model, batch_size=2, max_waiting=1) as engine:
        tasks = [ask(engine) for _ in range(3)]
        await turns()
        for _ in range(2):
            with pytest.raises(decode.QueueFullError, match="is full: 1 requests wait") as info:
                await ask(engine)
            assert info.value.waiting == 1
        gate.let(3)
        while engine.stats.running < 2:
            await asyncio.sleep(0)
        assert (engine.stats.waiting, engine.stats.refused) == (1, 2)
        gate.open()
        found = [*await asyncio.gather(*tasks), await ask(engine)]
    for events in found:
        same(events, alone(model))
    assert (engine.stats.finished, engine.stats.refused) == (4, 2)


@asynchronous
async def test_a_request_waits_for_slots(gated, instantly):
    """There is room in the batch, and none in the cache, until all that had some have left."""
    model, gate = gated
    async with decode.AsyncEngine(model, batch_size=4, slots=50, max_waiting=1) as engine:
        first = engine.generate(PROMPT, LONG)
        gate.let(1)
        await anext(first)
        second = ask(engine)
        await turns()
        gate.let(2)
        await anext(first)
        await anext(first)  # the second forward may have begun before it came
        assert (engine.stats.running, engine.stats.waiting) == (1, 1)
        with pytest.raises(decode.QueueFullError, match="1 requests wait"):
            await ask(engine)
        second.cancel()
        await turns()
        await first.aclose()
        gate.open()
        while engine.stats.cancelled < 2:
            await asyncio.sleep(0)
        found = await ask(engine)
    same(found, alone(model))


# Failing.


@asynchronous
async def test_an_error_of_the_model_ends_those_that_run_and_the_rest_goes_on(gated, instantly):
    model, gate = gated
    async with decode.AsyncEngine(model, batch_size=2) as engine:
        first = engine.generate(PROMPT, LONG)
        gate.let(1)
        await anext(first)
        tasks = [ask(engine) for _ in range(4)]
        await turns()
        gate.error = MemoryError("too large")
        gate.let(1)
        (last,) = await read(first)
        assert gate.activations() is None  # though the error is held, and its traceback
        gate.error = None
        gate.open()
        others = await asyncio.gather(*tasks)
    assert type(last.error) is RequestError
    assert "MemoryError: too large" in str(last.error)
    assert isinstance(last.error.__cause__, MemoryError)
    failed = [events for events in others if events[-1].error is not None]
    assert len(failed) <= 1  # who was in that forward
    for events in others:
        if events not in failed:
            same(events, alone(model))
    assert engine.stats.failed == 1 + len(failed) and is_empty(engine)


@asynchronous
async def test_a_device_that_is_gone_closes_the_engine(gated, instantly):
    """After an error that nothing can be done about, cleaning up raises too."""
    model, gate = gated
    engine = decode.AsyncEngine(model, batch_size=1)

    def clear(*arguments):
        raise OSError("device lost")

    engine._engine.cache.clear = clear
    tasks = [ask(engine) for _ in range(3)]
    await turns()
    gate.error = MemoryError("too large")
    gate.let(1)
    for task in tasks:
        with pytest.raises(EngineClosedError, match="has stopped: OSError: device lost"):
            await task
    with pytest.raises(EngineClosedError, match="has stopped: OSError") as info:
        await ask(engine)
    assert isinstance(info.value.__cause__, OSError)
    await engine.close()
    assert (engine.stats.failed, engine.stats.running, engine.stats.waiting) == (3, 0, 0)


# Closing.


@asynchronous
async def test_close_finishes_what_runs_and_waits(gated, instantly):
    model, gate = gated
    engine = decode.AsyncEngine(model, batch_size=2)
    tasks = [ask(engine) for _ in range(5)]
    await turns()
    closing = asyncio.create_task(engine.close())
    await turns()
    await refused(engine)
    gate.open()
    await closing
    assert not engine._thread.is_alive()
    await refused(engine)
    await engine.close()
    found = await asyncio.gather(*tasks)
    for events in found:
        same(events, alone(model))
    assert (engine.stats.finished, engine.stats.refused) == (5, 2)


@asynchronous
async def test_close_cancels_where_asked(gated, instantly):
    """Also what it was asked to finish before."""
    model, gate = gated
    engine = decode.AsyncEngine(model, batch_size=2)
    first = engine.generate(PROMPT, LONG)
    gate.let(1)
    await anext(first)
    tasks = [ask(engine) for _ in range(3)]
    await turns()
    finishing = asyncio.create_task(engine.close())
    await turns()
    closing = asyncio.create_task(engine.close(finish=False))
    await turns()
    gate.let(2)  # the forward under way, and one that may have begun after it
    await closing
    await finishing
    assert not engine._thread.is_alive()
    for left in (read(first), *tasks):
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            await left
    assert await read(first) == []
    await refused(engine)
    assert (engine.stats.cancelled, engine.stats.running, engine.stats.waiting) == (4, 0, 0)


@asynchronous
async def test_an_exception_inside_async_with_cancels(gated):
    model, gate = gated

    with pytest.raises(KeyError):
        async with decode.AsyncEngine(model) as engine:
            events = engine.generate(PROMPT, LONG)
            gate.let(1)
            await anext(events)
            gate.let(2)
            raise KeyError
    assert engine.stats.cancelled == 1
    assert not engine._thread.is_alive()


def test_an_engine_that_is_forgotten_ends_its_thread():
    engine = decode.AsyncEngine(random_model("llada"))
    thread = engine._thread
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_the_interpreters_end_does_not_leave_it_in_a_forward(monkeypatch):
    """Nobody closed it: its thread is gone before torch is."""
    engine = decode.AsyncEngine(random_model("llada"))

    async def main():
        await anext(engine.generate(PROMPT, decode.Static(block_size=4, max_new_tokens=200)))

    run(main())
    monkeypatch.setattr(threading, "enumerate", lambda: [engine._thread])  # not the others'
    async_engine._stop_all()
    assert not engine._thread.is_alive()
