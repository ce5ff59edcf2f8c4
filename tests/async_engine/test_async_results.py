"""`AsyncEngine`: each request gives what it gives alone, from any loop; bad ones are refused."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from gates import (
    DECODERS,
    LONG,
    PROMPT,
    Failing,
    Preparing,
    alone,
    is_empty,
    read,
    run,
    same,
    turns,
)
from tiny import POISON, fresh_model, poisoned_model, random_model

import decode
import decode.engine.async_engine
from d2f.errors import InputError, NonFiniteLogitsError, RequestError
from decode.engine import engine as cache_size
from decode.engine.engine import default_slots


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_many_at_once_give_what_each_gives_alone(family):
    model, draw = random_model(family), random.Random(family)
    prompts = [draw.choices(range(8, 200), k=draw.randint(1, 9)) for _ in range(24)]
    jobs = [(prompt, draw.choice(DECODERS)) for prompt in prompts]
    jobs[3] = prompts[3], "d2f"

    async def main():
        async with decode.AsyncEngine(model, batch_size=5) as engine:
            found = await asyncio.gather(*(read(engine.generate(*job)) for job in jobs))
        return found, engine

    found, engine = run(main())
    assert len({events[0].request for events in found}) == len(jobs)
    results = [alone(model, decoder, prompt) for prompt, decoder in jobs]
    for events, result in zip(found, results, strict=True):
        same(events, result)
        assert {event.request for event in events} == {events[0].request}
    stats = engine.stats
    assert (stats.finished, stats.cancelled, stats.failed, stats.refused) == (24, 0, 0, 0)
    assert (stats.running, stats.waiting) == (0, 0) and is_empty(engine)
    assert stats.tokens == sum(len(result.tokens) for result in results)
    assert max(r.forwards for r in results) <= stats.forwards < sum(r.forwards for r in results)


BAD = {
    "empty": ("", LONG, "the prompt is empty"),
    "mask id": ([4, 1], LONG, "the prompt contains the mask id"),
    "ids": ([10**6], LONG, "the prompt: ids must lie in"),
    "kind": (7, LONG, "the prompt: expected text, chat messages or ids, got 7"),
    "context": ([4] * 250, LONG, "the prompt has 250 tokens; .* the model's context is 256"),
    "cache": ([4] * 61, LONG, "needs 102 slots of the cache, which has 100"),
    "share": ([4] * 41, LONG, "needs 82 slots of the cache, a request may have 80: expected a sho"),
    "decoder": (PROMPT, "fast", "decoder must be .*, got 'fast'"),
    "messages": ([{"role": 7}], LONG, "the chat template"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_prompt_is_refused_before_it_is_queued(name):
    model, (prompt, decoder, said) = random_model("llada"), BAD[name]

    async def main():
        async with decode.AsyncEngine(model, slots=100, request_slots=80, max_waiting=0) as engine:
            events = engine.generate(prompt, decoder)
            with pytest.raises(InputError, match=said):
                await anext(events)
            assert await read(events) == []
        assert (engine.stats.forwards, engine.stats.waiting, engine.stats.failed) == (0, 0, 0)

    run(main())


def test_options_are_checked():
    model = random_model("llada")
    for bad in ({"batch_size": 0}, {"slots": 0}, {"max_waiting": -1}, {"max_waiting": 1.5}):
        (name,) = bad
        with pytest.raises(InputError, match=f"{name} must be a whole number of at least"):
            decode.AsyncEngine(model, **bad)

    async def main():
        async with decode.AsyncEngine(model) as engine:
            with pytest.raises(InputError, match="raw must be true or false, got 1"):
                await anext(engine.generate("a", LONG, raw=1))
            with pytest.raises(InputError, match="finish must be true or false, got 1"):
                await engine.close(finish=1)

    run(main())


def test_prompts_are_prepared_beside_the_loop(monkeypatch):
    """A chat template may take seconds: the loop goes on meanwhile."""
    model, preparing = random_model("llada"), Preparing(monkeypatch)

    async def main():
        async with decode.AsyncEngine(model) as engine:
            task = asyncio.create_task(read(engine.generate("Use 3 and 4.", DECODERS[0])))
            await turns()
            preparing.go_on.set()  # not reached by a loop that is held up
            return await task

    same(run(main()), alone(model, DECODERS[0], "Use 3 and 4."))


@pytest.mark.parametrize(
    ("prompt", "decoder", "kind", "said"),
    [
        (PROMPT, Failing(block_size=4, max_new_tokens=8), RequestError, "forward 3: StopIteration"),
        ([9, POISON], LONG, NonFiniteLogitsError, "NaN or infinite logits at forward 1"),
    ],
)
def test_a_request_fails_alone(prompt, decoder, kind, said):
    model = poisoned_model()

    async def main():
        async with decode.AsyncEngine(model, batch_size=3) as engine:
            jobs = [(PROMPT, LONG), (prompt, decoder), ([12, 13], DECODERS[1])]
            return await asyncio.gather(*(read(engine.generate(*j)) for j in jobs)), engine

    (first, bad, third), engine = run(main())
    same(first, decode.generate(model, [PROMPT], LONG)[0])
    same(third, decode.generate(model, [[12, 13]], DECODERS[1])[0])
    assert type(bad[-1].error) is kind and said in str(bad[-1].error)
    assert [event.result is None for event in bad] == [True] * (len(bad) - 1) + [False]
    assert (engine.stats.failed, engine.stats.finished) == (1, 2) and is_empty(engine)


def test_event_loops_in_several_threads():
    model, found = random_model("llada"), {}
    engine = decode.AsyncEngine(model, batch_size=4)

    async def main(name: int):
        jobs = [([9 + name, 20 + i], decoder) for i, decoder in enumerate(DECODERS)]
        found[name] = jobs, await asyncio.gather(*(read(engine.generate(*job)) for job in jobs))

    threads = [threading.Thread(target=lambda i=i: run(main(i))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    run(engine.close())
    assert sorted(found) == [0, 1, 2]
    for jobs, answers in found.values():
        for events, (prompt, decoder) in zip(answers, jobs, strict=True):
            same(events, alone(model, decoder, prompt))


def test_who_never_reads_holds_up_nobody():
    model = random_model("llada")

    async def main():
        async with decode.AsyncEngine(model, batch_size=2) as engine:
            never = engine.generate(PROMPT, LONG)
            events = [await anext(never)]
            jobs = [([12 + i], DECODERS[0]) for i in range(6)]
            found = await asyncio.gather(*(read(engine.generate(*job)) for job in jobs))
            await engine.close()
            assert engine.stats.finished == 7
            return jobs, found, events + await read(never)

    jobs, found, late = run(main())
    for events, (prompt, decoder) in zip(found, jobs, strict=True):
        same(events, alone(model, decoder, prompt))
    same(late, alone(model))


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
        async with decode.AsyncEngine(model) as engine:
            streams = await engine.submit_all(jobs, views=views)
            return [[event async for event in stream] for stream in streams]

    for bare, full, (prompt, decoder) in zip(run(main(False)), run(main(True)), jobs, strict=True):
        expected = list(decode.stream(model, [prompt], decoder))
        shown = [(event.blocks, event.settled) for event in full]
        assert shown == [(event.blocks, event.settled) for event in expected]
        for ours, theirs in zip(full, expected, strict=True):
            assert [r.token for r in ours.revealed] == [r.token for r in theirs.revealed]
        assert [event.blocks for event in bare] == [[]] * len(full)
        assert [event.settled for event in bare] == [event.settled for event in full]


def test_options_of_the_engine_reach_it():
    model, decoder = random_model("causal"), decode.Autoregressive(8)
    prompt = list(range(4, 34))

    async def main():
        options = {"prefill_rows": 8, "reuse_prefixes": True, "max_rows": 7}
        async with decode.AsyncEngine(model, batch_size=2, **options) as engine:
            assert engine._engine.max_rows == 7
            return [await read(engine.generate(prompt, decoder)) for _ in range(2)]

    first, second = (events[-1].result for events in run(main()))
    want = alone(model, decoder, prompt)
    assert first.raw_tokens == second.raw_tokens == want.raw_tokens
    assert (first.reused_rows, second.reused_rows) == (0, 29)
    assert [fed for fed, _ in first.calls[:4]] == [8, 8, 8, 6] and second.calls[0] == (1, 29)
    with pytest.raises(TypeError, match="max_row"):
        decode.AsyncEngine(model, max_row=7)
