"""Rows of prompts that begin alike are copied instead of fed: never what feeding them would not
compute, and no token changes with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from every_decoder import KINDS, alone, decoders, exact_model, kinds
from hypothesis import given, settings
from hypothesis import strategies as st
from test_failures import POISON, poisoned  # noqa: F401
from test_prefill_pieces import SLOTS, Plan, check, fed, plans, play, steps
from tiny import fresh_model

import decode
from d2f.errors import InputError, NonFiniteLogitsError
from decode.engine import cuda_graphs
from decode.engine.engine import Engine
from decode.engine.pieces import Feed
from decode.engine.prefixes import Prefixes
from decode.engine.request import Request
from decode.step import Predictions, Step

COMMON = list(range(40, 60))


class Lists:
    """A cache of `test_prefill_pieces.fed`: slots of two layers, those of three requests."""

    def __init__(self):
        self.layers = [[("old", layer, slot) for slot in range(3 * SLOTS)] for layer in range(2)]

    def copy(self, source, target):
        for layer in self.layers:
            values = [layer[slot] for slot in source.tolist()]
            for slot, value in zip(target.tolist(), values, strict=True):
                layer[slot] = value


def at(step: Step, base: int) -> Step:
    return replace(step, slots=step.slots + base, spans=step.spans + base)


@st.composite
def related(draw, first: Step):
    """A first step like another: its rows up to one, and those of a third from there on."""
    other = draw(steps())
    cut = draw(st.integers(0, len(first.tokens)))
    rows = {
        name: np.concatenate((getattr(first, name)[:cut], getattr(other, name)[cut:]))
        for name in ("tokens", "positions", "slots", "spans")
    }
    count = len(rows["tokens"])
    if not count:
        return other
    read = draw(st.lists(st.integers(0, count - 1), max_size=3))
    return Step(**rows, read=np.array(read, dtype=np.int64), cached=0)


@settings(max_examples=400)
@given(st.data(), steps(), st.lists(steps(), max_size=2))
def test_what_is_copied_is_what_feeding_it_would_leave(data, first, later):
    """Also after the source went on, with steps that write any of its slots."""
    cache = Lists()
    prefixes = Prefixes(cache, on=True)
    fed(first, cache.layers)
    prefixes.add(0, Feed(first, first=True))
    for step in later:
        # Rows that are fed again as they were, and others.
        again = data.draw(st.lists(st.integers(0, len(first.tokens) - 1), max_size=2, unique=True))
        if again and data.draw(st.booleans()):
            names = ("tokens", "positions", "slots", "spans")
            step = Step(
                **{n: getattr(first, n)[again] for n in names}, read=step.read[:0], cached=0
            )
        prefixes.note(0, step)
        fed(step, cache.layers)
    step = data.draw(related(first))
    feed, base = Feed(step, first=True), SLOTS
    prefixes.fill(base, feed)
    got = []
    while feed.fed < len(step.tokens):
        left = [c for c in feed.cuts.tolist() if c > feed.begin]
        part = feed.piece(data.draw(st.sampled_from(left)))
        got += fed(at(part, base), cache.layers)
        feed.take(Predictions(part.read, part.read))
    plain = Lists().layers
    assert got == fed(at(step, base), plain)
    for layer, want in zip(cache.layers, plain, strict=True):
        assert [layer[slot + base] for slot in step.slots] == [
            want[slot + base] for slot in step.slots
        ]


beginnings = st.builds(
    lambda n, rest: COMMON[:n] + rest,
    st.integers(0, len(COMMON)),
    st.lists(st.integers(4, 9), max_size=5),
).filter(bool)


@settings(max_examples=120)
@given(
    kinds, st.data(), st.none() | st.integers(1, 14), st.integers(1, 4), st.integers(35, 200),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_tokens_do_not_depend_on_what_is_reused(kind, data, rows, batch, slots, static, early):
    """Prompts that begin alike, as they come and are cancelled; few slots push out what is kept."""
    model, chosen = exact_model(kind), data.draw(plans(kind, beginnings))
    need = [p.decoder.begin(p.prompt, model.contract).slots for p in chosen]
    engine = Engine(
        model, batch_size=batch, slots=max(slots, *need), static=static, prefill_rows=rows,
        reuse_prefixes=True,
    )  # fmt: skip
    engine.early = early
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "SIZES", (5, 8, 16, 24))
        requests = play(engine, model, chosen)
    check(kind, chosen, requests, rows)
    for plan, request in zip(chosen, requests, strict=True):
        if request.result is not None:
            whole = sum(fed for fed, _ in alone(kind, tuple(plan.prompt), plan.decoder).calls)
            calls = request.result.calls
            assert sum(fed for fed, _ in calls) + request.result.reused_rows == whole
    kept = [base for base, source in engine.prefixes._sources.items() if source.ended]
    assert sorted(engine.pool._used) == sorted(kept)  # no slot is lost, all kept can be given up
    while (base := engine.prefixes.evict()) is not None:
        engine.pool.free(base)
    assert not engine.pool._used


def one_after_the_other(kind: str, prompts: list[list[int]], decoder, **options) -> list[Request]:
    model = exact_model(kind)
    options = {"slots": 300, "batch_size": 4, "reuse_prefixes": True} | options
    engine = Engine(model, **options)
    requests = [Request(i, p, decoder, model.contract, None) for i, p in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
        while not request.done:
            engine.advance()
    assert engine.prefixes.reused_rows == sum(r.result.reused_rows for r in requests)
    return requests


FIRST, SECOND = [*COMMON[:13], 5, 6], [*COMMON[:13], 7, 8, 9]


@pytest.mark.parametrize(
    ("kind", "decoder", "alike", "equal"),
    [
        ("causal", decode.Autoregressive(6), 13, 14),
        ("wedlm", decode.WeDLM(4, max_new_tokens=6), 13, 15),
        ("sdar", decode.Block(max_new_tokens=6), 12, 12),
        ("llada student", decode.D2F(4, max_new_tokens=6), 0, 15),
        ("dream student", decode.D2F(4, max_new_tokens=6), 0, 14),
        ("llada", decode.D2F(4, max_new_tokens=6), 0, 15),
        ("llada", decode.Static(max_new_tokens=6), 0, 0),
        ("dream", decode.Threshold(4, 6), 0, 0),
    ],
)
def test_what_each_mask_allows(kind, decoder, alike, equal):
    """Prompts of 15 and 16 with 13 tokens in common, then the first once more. The row that is
    read (Dream's last of the prompt, an autoregressive one's) is fed all the same."""
    first, second, third = one_after_the_other(kind, [FIRST, SECOND, FIRST], decoder)
    assert first.result.reused_rows == 0
    assert second.result.reused_rows == alike
    assert third.result.reused_rows == equal
    assert third.result.raw_tokens == first.result.raw_tokens
    whole = alone(kind, tuple(SECOND), decoder)
    assert second.result.calls[0][0] == whole.calls[0][0] - alike
    assert second.result.calls[0][1] == alike
    assert second.result.raw_tokens == whole.raw_tokens


def test_rows_that_a_request_has_fed_again_with_other_tokens_are_no_source_any_more():
    """The window after the prompt, of which the masks are filled."""
    model, decoder = exact_model("wedlm"), decode.WeDLM(4, max_new_tokens=6)
    engine = Engine(model, batch_size=1, slots=100, reuse_prefixes=True)
    request = Request(0, FIRST, decoder, model.contract, None)
    engine.submit(request)
    engine.advance()
    (source,) = engine.prefixes._sources.values()
    assert source.final == len(FIRST) + 4
    list(engine.run())
    assert source.final == len(FIRST)


def test_it_is_off_where_nobody_asked():
    requests = one_after_the_other(
        "causal", [FIRST, FIRST], decode.Autoregressive(3), reuse_prefixes=False
    )
    assert [request.result.reused_rows for request in requests] == [0, 0]
    assert requests[1].result.calls == requests[0].result.calls


def test_the_oldest_is_given_up_first_where_slots_are_wanted():
    """A cache of three requests: the fourth takes the place of the first, which is then not there;
    what a request wants itself is given up last."""
    a, b, c, d = ([start, *COMMON[1:12]] for start in (5, 6, 7, 8))
    decoder = decode.Autoregressive(3)
    asked = [a, b, c, d, b, a]
    requests = one_after_the_other("causal", asked, decoder, slots=3 * 15)
    assert [request.result.reused_rows for request in requests] == [0, 0, 0, 0, 11, 0]


def test_a_request_that_waits_for_its_turn_takes_what_was_fed_meanwhile():
    model, decoder = exact_model("causal"), decode.Autoregressive(4)
    engine = Engine(model, batch_size=4, slots=300, prefill_rows=5, reuse_prefixes=True)
    requests = [Request(i, COMMON, decoder, model.contract, None) for i in range(3)]
    for request in requests:
        engine.submit(request)
    list(engine.run())
    assert [request.result.reused_rows for request in requests] == [0, 19, 19]
    want = alone("causal", tuple(COMMON), decoder)
    assert all(request.result.raw_tokens == want.raw_tokens for request in requests)


def test_a_request_that_was_cancelled_is_no_source():
    model, decoder = exact_model("causal"), decode.Autoregressive(9)
    engine = Engine(model, batch_size=2, slots=300, reuse_prefixes=True)
    first, second = (Request(i, FIRST, decoder, model.contract, None) for i in range(2))
    engine.submit(first)
    engine.advance()
    engine.advance()
    assert engine.cancel(first)
    engine.submit(second)
    list(engine.run())
    assert second.result.reused_rows == 0
    assert second.result.raw_tokens == alone("causal", tuple(FIRST), decoder).raw_tokens


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [None, 4])
def test_a_request_that_failed_is_no_source(poisoned, static, rows):  # noqa: F811
    """Blocks of 4 from position 0: the first two of both prompts are the same and finite, the third
    of one is not."""
    decoder = decode.Block(4, max_new_tokens=8, tau=0.3, align="absolute")
    bad, good = [*range(40, 48), POISON, 9], [*range(40, 48), 10, 9]
    want = decode.generate(poisoned, [good], decoder)[0]
    engine = Engine(
        poisoned, batch_size=2, slots=100, static=static, prefill_rows=rows, reuse_prefixes=True
    )
    made = [Request(i, p, decoder, poisoned.contract, None) for i, p in enumerate([bad, good])]
    for request in made:
        engine.submit(request)
        engine.advance()
    list(engine.run())
    assert isinstance(made[0].result.error, NonFiniteLogitsError)
    assert made[1].result.reused_rows == 0
    assert made[1].result.raw_tokens == want.raw_tokens


def test_copied_rows_that_are_not_finite_are_fed_instead():
    """Should what was copied ever be spoilt, the request does not fail for it."""
    model, decoder = fresh_model("causal"), decode.Autoregressive(4)
    want = decode.generate(model, [SECOND], decoder)[0]
    engine = Engine(model, batch_size=2, slots=100, reuse_prefixes=True)
    first, second = (
        Request(i, p, decoder, model.contract, None) for i, p in enumerate([FIRST, SECOND])
    )
    engine.submit(first)
    list(engine.run())
    for keys, _ in engine.cache.layers:
        keys[:, :, first.base + 3] = np.nan
    engine.submit(second)
    list(engine.run())
    assert second.result.error is None
    assert second.result.raw_tokens == want.raw_tokens


@settings(max_examples=40)
@given(kinds, st.data())
def test_decoders_of_one_model_share_what_they_feed_alike(kind, data):
    """What a row computes is a matter of what it is fed, not of who asks."""
    if len(KINDS[kind][1]) < 2:
        return
    made = data.draw(st.lists(decoders(kind), min_size=2, max_size=4, unique=True))
    chosen = [Plan(FIRST, decoder, 3 * i, None) for i, decoder in enumerate(made)]
    engine = Engine(exact_model(kind), batch_size=4, slots=300, reuse_prefixes=True)
    check(kind, chosen, play(engine, exact_model(kind), chosen), None)


def test_an_option_that_is_neither_on_nor_off_is_refused():
    with pytest.raises(InputError, match="reuse_prefixes must be true or false, got 'yes'"):
        Engine(exact_model("causal"), batch_size=1, slots=9, reuse_prefixes="yes")
