"""One bad request alone: whatever fails or is cancelled, and whenever, the other requests give what
each gives alone, and no slot is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import fresh_model, random_model

import decode
import decode.engine.engine
from d2f.errors import InputError, NonFiniteLogitsError, RequestError
from decode.engine.engine import Engine
from decode.engine.request import Request

POISON = 7  # a token whose embedding is NaN, and which is never chosen
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
    model = fresh_model("llada")
    with torch.no_grad():
        model.backbone.model.embed_tokens.weight[POISON] = torch.nan

    def rule_out(module, inputs, logits):
        ruled = logits.clone()
        ruled[..., POISON] = -torch.inf
        return ruled

    model.backbone.lm_head.register_forward_hook(rule_out)
    return model


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
