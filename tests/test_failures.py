"""One bad request alone: whatever fails or is cancelled, and whenever, the other requests give what
each gives alone, and no slot is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import POISON, fresh_model, poisoned_model, random_model

import decode
import decode.engine.engine
from d2f.errors import InputError, NonFiniteLogitsError, RequestError
from decode.engine.engine import Engine
from decode.engine.request import Request

SLOTS = 70
WAYS = ("none", "step", "accept", "blocks", "poison", "too large", "cancel")
DECODERS = (
    decode.D2F(4, tau_conf=0.3, max_new_tokens=9),
    decode.D2F(3, tau_add=0.0, tau_conf=0.2, max_new_tokens=12, temperature=1.0),
    decode.Static(block_size=4, max_new_tokens=8, temperature=0.7),
    decode.Threshold(4, 8, tau=0.4),
    decode.Wino(6, 8, tau1=0.1, tau2=0.3),
    decode.FreeDave(4, 8, drafts=3),
)


@pytest.fixture(scope="module")
def poisoned():
    return poisoned_model()


@dataclass(frozen=True)
class Plan:
    """A request and what happens to it: `way`, at its forward or the engine's advance `when`."""

    prompt: list[int]
    decoder: decode.Decoder
    way: str
    when: int


def spoil(request: Request, plan: Plan) -> None:
    """Make a request's session fail as planned."""
    session, calls = request.session, dict.fromkeys(WAYS, 0)

    def failing(name: str) -> Callable:
        real = getattr(session, name)

        def call(*arguments):
            calls[name] += 1
            if calls[name] == plan.when + 1:
                raise KeyError("boom")
            return real(*arguments)

        return call

    def poisonous():
        calls["step"] += 1
        step = real_step()
        if step is None or calls["step"] != plan.when + 1:
            return step
        tokens = step.tokens.copy()
        tokens[-1] = POISON
        return replace(step, tokens=tokens)

    if plan.way in ("step", "accept", "blocks"):
        setattr(session, plan.way, failing(plan.way))
    elif plan.way == "poison":
        real_step = session.step
        session.step = poisonous
    elif plan.way == "too large":
        type_ = type(session)
        session.__class__ = type("Large", (type_,), {"slots": property(lambda self: SLOTS + 1)})


def spoilt_requests(model, plans: list[Plan]) -> list[Request]:
    requests = [Request(i, p.prompt, p.decoder, model.contract, None) for i, p in enumerate(plans)]
    for request, plan in zip(requests, plans, strict=True):
        spoil(request, plan)
    return requests


def run(engine: Engine, requests: list[Request], plans: list[Plan]) -> dict[int, list]:
    """All events by request; those to cancel are, at their advance."""
    events: dict[int, list] = {i: [] for i in range(len(requests))}
    cancelled: set[int] = set()
    for request in requests:
        engine.submit(request)
    for round_ in range(1000):
        for i, plan in enumerate(plans):
            if plan.way == "cancel" and plan.when == round_ and not requests[i].done:
                assert engine.cancel(requests[i])
                assert not engine.cancel(requests[i])
                cancelled.add(i)
        if not (engine.waiting or engine.running):
            return events
        for event in engine.advance():
            assert len(engine.running) <= engine.batch_size
            assert event.request not in cancelled
            events[event.request].append(event)
    raise AssertionError("the engine does not come to an end")


plans = st.builds(
    Plan,
    st.lists(st.integers(8, 200), min_size=1, max_size=9),
    st.sampled_from(DECODERS),
    st.sampled_from(WAYS),
    st.integers(0, 4),
)


BAD_BESIDE_GOOD = [
    Plan([9, 10], DECODERS[0], "poison", 1),
    Plan([11, 12, 13], DECODERS[0], "none", 0),
]


@settings(max_examples=60)
@example(BAD_BESIDE_GOOD, 2, True, False)
@example([replace(BAD_BESIDE_GOOD[1], way="cancel", when=1), BAD_BESIDE_GOOD[1]], 2, False, True)
@example(BAD_BESIDE_GOOD, 1, True, False)  # one after the other, in the same slots
@given(
    st.lists(plans, min_size=2, max_size=6),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_the_others_give_what_they_give_alone(poisoned, plans, batch_size, static, early):
    """Whole caches are read where rows are padded, so values that are not finite reach all rows."""
    engine = Engine(poisoned, batch_size=batch_size, slots=SLOTS, static=static)
    engine.early = early
    requests = spoilt_requests(poisoned, plans)
    events = run(engine, requests, plans)
    assert not engine.pool._used and not engine.running and not engine.waiting
    for i, (request, plan) in enumerate(zip(requests, plans, strict=True)):
        alone = decode.generate(poisoned, [plan.prompt], plan.decoder)[0]
        own = events[i]
        assert all(event.result is None for event in own[:-1])
        if plan.way == "cancel" and request.result is None:
            assert all(event.result is None for event in own)
            continue
        assert own[-1].result is request.result
        if own[-1].error is None:
            assert request.result.raw_tokens == alone.raw_tokens
            assert request.result.calls == alone.calls
            assert plan.way in ("none", "cancel") or alone.forwards <= plan.when + 1
            continue
        kinds = {"poison": NonFiniteLogitsError, "too large": InputError}
        assert type(own[-1].error) is kinds.get(plan.way, RequestError)
        assert own[-1].result.finish_reason == "error" and own[-1].result.tokens == []
        assert len(own) == own[-1].forward or plan.way == "too large"


MORE = (
    decode.D2F(4, tau_conf=0.3, max_new_tokens=9, lossless=2),
    decode.D2F(3, tau_conf=0.2, max_new_tokens=9, revoke="always", tau_revoke=0.5),
)
CANCELLED = {
    "llada": (*DECODERS, *MORE),
    "dream": (*DECODERS, *MORE, decode.EntropyBounded(4, max_new_tokens=8)),
    "wedlm": (decode.WeDLM(4, max_new_tokens=9), decode.WeDLM(3, max_new_tokens=9, verify="ar")),
    "causal": (
        decode.Autoregressive(max_new_tokens=6),
        decode.Autoregressive(max_new_tokens=9, temperature=1.0),
    ),
}


@dataclass(frozen=True)
class Visit:
    """A request that comes at one advance of the engine, and that many later may be cancelled."""

    prompt: list[int]
    decoder: decode.Decoder
    comes: int
    stays: int | None


def visits(decoders: Sequence[decode.Decoder]) -> st.SearchStrategy[list[Visit]]:
    prompts = st.lists(st.integers(8, 200), min_size=1, max_size=9)
    stays = st.none() | st.integers(0, 9)
    one = st.builds(Visit, prompts, st.sampled_from(decoders), st.integers(0, 12), stays)
    return st.lists(one, min_size=2, max_size=8)


@pytest.mark.parametrize("family", CANCELLED)
@settings(max_examples=30)
@given(data=st.data(), batch_size=st.integers(1, 4), static=st.booleans(), early=st.booleans())
def test_requests_come_and_are_cancelled_at_any_time(family, data, batch_size, static, early):
    """Into slots that others left in the middle of a forward, of families whose rows are read one
    before, and of decoders with scratch slots."""
    model = random_model(family)
    asked = data.draw(visits(CANCELLED[family]))
    engine = Engine(model, batch_size=batch_size, slots=SLOTS, static=static)
    engine.early = early
    requests = [Request(i, v.prompt, v.decoder, model.contract, None) for i, v in enumerate(asked)]
    cancelled: set[int] = set()
    for now in range(1000):
        for i, visit in enumerate(asked):
            if visit.comes == now:
                engine.submit(requests[i])
            if visit.stays is not None and visit.comes + visit.stays == now:
                if engine.cancel(requests[i]):
                    cancelled.add(i)
                assert not engine.cancel(requests[i])
        assert not cancelled & {event.request for event in engine.advance()}
        if now > 21 and not (engine.waiting or engine.running):
            break
    assert not engine.pool._used and not engine.running and not engine.waiting
    for i, (request, visit) in enumerate(zip(requests, asked, strict=True)):
        assert request.done != (i in cancelled)
        if request.done:
            alone = decode.generate(model, [visit.prompt], visit.decoder)[0]
            assert request.result.raw_tokens == alone.raw_tokens
            assert request.result.calls == alone.calls


def test_what_an_early_forward_raises_does_not_take_the_events_with_it(monkeypatch):
    """It comes with the next call, and the one after that does the forward again."""
    model = fresh_model("llada")
    prompts, real, forwards = [[9, 10], [11, 12, 13]], model.decode_rows, []

    def decode_rows(*arguments):
        forwards.append(None)
        if len(forwards) == 2:
            raise MemoryError("too large")
        return real(*arguments)

    alone = [decode.generate(model, [p], DECODERS[0])[0] for p in prompts]
    engine = Engine(model, batch_size=2, slots=SLOTS)
    engine.early = True
    requests = [Request(i, p, DECODERS[0], model.contract, None) for i, p in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    monkeypatch.setattr(model, "decode_rows", decode_rows)
    assert [(event.request, event.forward) for event in engine.advance()] == [(0, 1), (1, 1)]
    with pytest.raises(MemoryError, match="too large"):
        engine.advance()
    list(engine.run())
    assert [request.result.raw_tokens for request in requests] == [r.raw_tokens for r in alone]
    assert [request.result.calls for request in requests] == [r.calls for r in alone]


def test_a_decoder_without_a_first_step_is_an_error(poisoned):
    """It would run for ever without a forward."""

    class Idle(decode.Static):
        def begin(self, prompt, contract):
            session = super().begin(prompt, contract)
            session.step = lambda: None
            return session

    with pytest.raises(RequestError, match="the decoder static has no first step"):
        decode.generate(poisoned, [[9]], Idle(block_size=4, max_new_tokens=8))


@settings(max_examples=15)
@given(st.lists(plans, min_size=2, max_size=4), st.lists(st.booleans(), min_size=60, max_size=60))
def test_what_a_forward_spoilt_is_done_again_alone_with_the_same_draws(plans, spoilt):
    """As where a kernel's tile holds the rows of two requests: both look as if they had failed."""
    model, real = random_model("llada"), decode.engine.engine.split
    left = iter(spoilt)

    def split(table, groups):
        found = real(table, groups)
        together = len(groups) > 1 and next(left, False)
        return [None] * len(found) if together else found

    engine = Engine(model, batch_size=4, slots=4 * SLOTS)
    requests = [Request(i, p.prompt, p.decoder, model.contract, None) for i, p in enumerate(plans)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.engine.engine, "split", split)
        for request in requests:
            engine.submit(request)
        list(engine.run())
    for request, plan in zip(requests, plans, strict=True):
        assert request.result.error is None
        alone = decode.generate(model, [plan.prompt], plan.decoder)[0]
        assert request.result.raw_tokens == alone.raw_tokens


def test_an_error_says_what_failed_and_at_which_forward(poisoned):
    engine = Engine(poisoned, batch_size=3, slots=SLOTS)
    ways = ("step", "poison", "too large")
    decoder = replace(DECODERS[0], seed=7)
    plans = [Plan([9, 10], decoder, way, 1) for way in ways]
    requests = spoilt_requests(poisoned, plans)
    run(engine, requests, plans)
    broken, nan, large = (request.result.error for request in requests)
    assert str(broken) == "failed at forward 2: KeyError: 'boom'"
    assert isinstance(broken.__cause__, KeyError)
    assert str(nan) == "the model gave NaN or infinite logits at forward 3"
    assert str(large) == f"needs {SLOTS + 1} slots of the cache, which has {SLOTS}"
    results = [request.result for request in requests]
    assert [(result.forwards, len(result.calls)) for result in results] == [(2, 2), (3, 3), (0, 0)]
    assert [result.seconds > 0 for result in results] == [True, True, False]
    assert {(result.prompt_tokens, result.seed) for result in results} == {(2, 7)}


BAD_PROMPTS = [("", "is empty"), ([4, 1], "mask id"), ([10**6], "ids must lie in"), ([4] * 250, "")]


@pytest.mark.parametrize(("bad", "message"), BAD_PROMPTS)
def test_a_bad_prompt_or_request_fails_alone_where_asked(poisoned, bad, message):
    decoder = decode.D2F(4, max_new_tokens=12, temperature=1.0)
    good = [[9, 10, 11], [30, 31]]
    alone = [decode.generate(poisoned, [p], decoder)[0] for p in good]
    asked = [good[0], bad, [9, POISON], good[1]]
    results = decode.generate(poisoned, asked, [decoder] * 4, on_error="return")
    assert [r.error is None for r in results] == [True, False, False, True]
    assert [results[i].raw_tokens for i in (0, 3)] == [r.raw_tokens for r in alone]
    assert "prompt 1" in str(results[1].error) and message in str(results[1].error)
    assert isinstance(results[1].error, InputError)
    assert isinstance(results[2].error, NonFiniteLogitsError)
    for result in results[1:3]:
        assert (result.tokens, result.finish_reason) == ([], "error")
        assert result.tokens_per_forward == 0
    assert (results[1].forwards, results[2].forwards) == (0, 1)


def test_on_error_raises_by_default_and_names_the_prompt(poisoned):
    with pytest.raises(InputError, match="prompt 1 is empty"):
        decode.generate(poisoned, [[9], ""], DECODERS[0])
    with pytest.raises(NonFiniteLogitsError, match="prompt 1: the model gave NaN"):
        decode.generate(poisoned, [[9], [POISON]], DECODERS[0])
    with pytest.raises(InputError, match="on_error must be one of raise, return, got 'ignore'"):
        decode.generate(poisoned, [[9]], DECODERS[0], on_error="ignore")
