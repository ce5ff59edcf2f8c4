"""Steps in pieces: a cut is where the rows before it need nothing of the rows behind it, and what
is fed in pieces decodes to the tokens of what is fed whole, whatever else happens."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from every_decoder import alone, decoders, exact_model, kinds
from hypothesis import given, settings
from hypothesis import strategies as st
from test_failures import POISON, poisoned  # noqa: F401
from tiny import random_model

import decode
from d2f.errors import InputError, NonFiniteLogitsError
from decode.engine import cuda_graphs, pieces
from decode.engine.engine import Engine
from decode.engine.pieces import Feed, allowed_cuts, share
from decode.engine.request import Request
from decode.step import Predictions, Step, feed

SLOTS = 7


@st.composite
def steps(draw):
    """Any arrays: slots that are written twice, spans of any slots, reads in any order."""
    count = draw(st.integers(1, 6))
    slot = st.integers(0, SLOTS - 1)
    span = st.tuples(slot, slot).map(lambda pair: (min(pair), max(pair) + draw(st.integers(0, 1))))
    rows = st.lists(st.lists(span, min_size=2, max_size=2), min_size=count, max_size=count)
    return Step(
        tokens=np.array(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))),
        positions=np.arange(count),
        slots=np.array(draw(st.lists(slot, min_size=count, max_size=count))),
        spans=np.array(draw(rows)).reshape(count, 2, 2),
        read=np.array(draw(st.lists(st.integers(0, count - 1), max_size=4)), dtype=np.int64),
        cached=0,
    )


def fed(step: Step, cache: list[list]) -> list:
    """What the rows of a step give, two layers deep, with hashes for arithmetic; `cache` holds the
    slots of each layer and is written."""
    hidden = list(zip(step.tokens.tolist(), step.positions.tolist(), strict=True))
    for layer in cache:
        for slot, value in zip(step.slots, hidden, strict=True):
            layer[slot] = hash(value)
        hidden = [
            (own, tuple(tuple(layer[start:end]) for start, end in spans))
            for own, spans in zip(hidden, step.spans, strict=True)
        ]
    return [hash(hidden[row]) for row in step.read]


def empty_cache() -> list[list]:
    return [[("old", layer, slot) for slot in range(SLOTS)] for layer in range(2)]


@settings(max_examples=300)
@given(steps())
def test_the_cuts_are_those_that_the_rule_names(step):
    written = step.slots.tolist()
    last = {slot: row for row, slot in enumerate(written)}
    expected = []
    for cut in range(1, len(written) + 1):
        seen = {s for spans in step.spans[:cut] for start, end in spans for s in range(start, end)}
        late = {slot for slot, row in last.items() if row >= cut}
        before = step.read < cut
        in_order = not (before[1:] & ~before[:-1]).any()
        if not (seen | set(written[:cut])) & late and in_order:
            expected.append(cut)
    assert allowed_cuts(step).tolist() == expected
    assert expected[-1] == len(written)


@settings(max_examples=300)
@given(steps(), st.data())
def test_what_is_cut_computes_what_the_whole_computes(step, data):
    whole, cut = empty_cache(), empty_cache()
    want = fed(step, whole)
    feeding, got = Feed(step), []
    while feeding.fed < len(step.tokens):
        left = [c for c in feeding.cuts.tolist() if c > feeding.fed]
        part = feeding.piece(data.draw(st.sampled_from(left)))
        got += fed(part, cut)
        feeding.take(Predictions(part.read, part.read))
    assert got == want
    assert cut == whole


def test_the_cuts_of_each_mask():
    """The case that decode/engine/pieces.py draws."""
    x, wanted = np.zeros(6, dtype=np.int64), np.array([4])
    for ends, cuts in [
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]),
        ([4, 4, 4, 4, 6, 6], [4, 6]),
        ([6] * 6, [6]),
    ]:
        step = feed(x, 0, np.array(ends), wanted, cached=0, logit_shift=0)
        assert allowed_cuts(step).tolist() == cuts


def causal_step(count: int) -> Step:
    ends = np.arange(1, count + 1)
    return feed(
        np.zeros(count, dtype=np.int64), 0, ends, np.array([count]), cached=0, logit_shift=1
    )


def test_the_pieces_of_one_forward_hold_to_the_bound_together():
    """First come first served; what still has room goes along, and the rest of a piece's step is
    before those that came later."""
    feeds = [Feed(causal_step(count), first=True) for count in (25, 8, 4)]
    after = Feed(causal_step(3))  # a step of a request that runs: always whole
    given_rows = []
    while any(feed.fed < len(feed.step.tokens) for feed in feeds):
        left = [feed for feed in feeds if feed.fed < len(feed.step.tokens)]
        stops = share([*left, after], 10)
        assert stops[-1] == 3
        row = dict.fromkeys(map(id, feeds), 0)
        for feed_, stop in zip(left, stops, strict=False):
            if stop:
                part = feed_.piece(stop)
                row[id(feed_)] = len(part.tokens)
                feed_.take(Predictions(part.read, part.read))
        given_rows.append(list(row.values()))
    assert given_rows == [[10, 0, 0], [10, 0, 0], [5, 5, 0], [0, 3, 4]]


def test_a_step_that_cannot_be_cut_goes_along_and_only_one_in_a_forward():
    whole = [feed(np.zeros(30, dtype=np.int64), 0, np.full(30, 30), np.array([29]), cached=0,
                  logit_shift=0) for _ in range(2)]  # fmt: skip
    feeds, small = [Feed(step, first=True) for step in whole], Feed(causal_step(2))
    assert share([*feeds, small], 10) == [30, 0, 2]
    # What was fed asks anew, behind the one that waits: nobody is passed over for good.
    feeds[0] = Feed(whole[0])
    assert share([*feeds, small], 10) == [0, 30, 2]
    assert share([*feeds, small], None) == [30, 30, 2]


class Plan:
    """A request, when it comes, and when it is cancelled, if it is."""

    def __init__(self, prompt, decoder, comes, cancelled):
        self.prompt, self.decoder = prompt, decoder
        self.comes, self.cancelled = comes, cancelled


def plans(kind: str, prompts: st.SearchStrategy) -> st.SearchStrategy:
    cancelled = st.one_of(st.none(), st.none(), st.integers(0, 12))
    one = st.builds(Plan, prompts, decoders(kind), st.integers(0, 6), cancelled)
    return st.lists(one, min_size=1, max_size=5)


def play(engine: Engine, model, plans: list[Plan]) -> list[Request]:
    """Each request submitted and cancelled at its time; events and calls agree."""
    requests = [Request(i, p.prompt, p.decoder, model.contract, None) for i, p in enumerate(plans)]
    events = {i: [] for i in range(len(plans))}
    for now in range(2000):
        for plan, request in zip(plans, requests, strict=True):
            if plan.comes == now:
                engine.submit(request)
            if plan.cancelled == now and now >= plan.comes and not request.done:
                assert engine.cancel(request)
        for event in engine.advance():
            events[event.request].append(event)
        coming = any(plan.comes > now for plan in plans)
        if not (coming or engine.running or engine.waiting):
            break
    else:
        raise AssertionError("the engine does not come to an end")
    for request in requests:
        if request.result is not None:
            own = events[request.index]
            assert [event.forward for event in own] == list(range(1, len(own) + 1))
            assert len(request.result.calls) == request.result.forwards == len(own)
    return requests


def check(kind: str, plans: list[Plan], requests: list[Request], rows: int | None) -> None:
    """What was not cancelled in time gave what it gives alone, and fed each row once."""
    for plan, request in zip(plans, requests, strict=True):
        if request.result is None:
            assert plan.cancelled is not None
            continue
        want = alone(kind, tuple(plan.prompt), plan.decoder)
        assert request.result.error is None
        assert request.result.raw_tokens == want.raw_tokens
        assert request.result.counts == want.counts
        calls = request.result.calls
        if not request.result.reused_rows:
            assert sum(fed for fed, _ in calls) == sum(fed for fed, _ in want.calls)
        if rows is None and not request.result.reused_rows:
            assert calls == want.calls


ids = st.lists(st.integers(4, 200), min_size=1, max_size=24)


@settings(max_examples=120)
@given(kinds, st.data(), st.integers(1, 14), st.integers(1, 4), st.booleans(), st.booleans())
def test_tokens_do_not_depend_on_the_pieces(kind, data, rows, batch_size, static, early):
    model, chosen = exact_model(kind), data.draw(plans(kind, ids))
    engine = Engine(model, batch_size=batch_size, slots=200, static=static, prefill_rows=rows)
    engine.early = early
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "SIZES", (5, 8, 16, 24))  # a whole prompt may fit none
        requests = play(engine, model, chosen)
    check(kind, chosen, requests, rows)
    assert not engine.pool._used


@settings(max_examples=40)
@given(kinds, st.data(), st.integers(1, 40), st.integers(2, 5), st.booleans(), st.booleans())
def test_many_prompts_are_not_one_forward_and_none_is_cut(
    kind, data, most, batch_size, static, early
):
    """Tokens and calls of each are what they are alone."""
    model, chosen = exact_model(kind), data.draw(plans(kind, ids))
    engine = Engine(model, batch_size=batch_size, slots=200, static=static)
    engine.early = early
    real, together = Engine._count, []

    def count(self, steps):
        first = [r.feed for r in self.running if r.feed and r.feed.first and r.feed.stop]
        together.append([feed for feed in first if any(feed.step is step for step in steps)])
        real(self, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "WHOLE_ROWS", most)
        patch.setattr(Engine, "_count", count)
        requests = play(engine, model, chosen)
    check(kind, chosen, requests, None)
    for feeds in together:
        assert len(feeds) <= 1 or sum(len(feed.step.tokens) for feed in feeds) <= most


def test_prompts_that_wait_for_room_are_fed_first_in_the_next_forward(monkeypatch):
    monkeypatch.setattr(pieces, "WHOLE_ROWS", 10)
    feeds = [Feed(causal_step(count), first=True) for count in (7, 6, 3, 25)]
    small = Feed(causal_step(2))
    assert share([*feeds, small], None) == [7, 0, 3, 0, 2]
    later = Feed(causal_step(4), first=True)
    assert share([later, feeds[1], feeds[3]], None) == [4, 6, 0]
    assert share([later, feeds[3]], None) == [0, 25], "by itself, as it fits nowhere"


@pytest.mark.parametrize("kind", ["causal", "wedlm", "sdar"])
def test_no_forward_has_more_rows_of_prompts_than_asked(kind):
    """Beside them there is a step of each of the others, and no forward goes by without one that
    runs."""
    model = exact_model(kind)
    decoder = decode.Block(max_new_tokens=40) if kind == "sdar" else decode.Autoregressive(40)
    most = 8 if kind == "sdar" else 1  # rows of a later step: the finished block and the next
    engine, rows = Engine(model, batch_size=4, slots=300, prefill_rows=8), []
    lengths = (3, 60, 41, 7)
    requests = [Request(i, [9] * n, decoder, model.contract, None) for i, n in enumerate(lengths)]
    for request in requests:
        engine.submit(request)
    while len(requests[3].calls) < 2:
        before = [len(request.calls) for request in requests]
        engine.advance()
        grown = [r.calls[-1][0] for r, n in zip(requests, before, strict=True) if len(r.calls) > n]
        rows.append(sum(grown))
        assert len(requests[0].calls) == engine.forwards
    assert max(rows) <= 8 + 3 * most
    assert len(rows) >= sum(lengths) // 8
    assert sum(rows[:-1]) > sum(lengths)


def test_the_rows_of_a_prompt_fed_in_pieces_are_counted():
    model = exact_model("causal")
    engine = Engine(model, batch_size=1, slots=40, prefill_rows=4)
    request = Request(0, list(range(9, 19)), decode.Autoregressive(3), model.contract, None)
    engine.submit(request)
    events = list(engine.run())
    assert request.result.calls == [(4, 0), (4, 4), (2, 8), (1, 10), (1, 11)]
    assert [len(event.revealed) for event in events] == [0, 0, 1, 1, 1]
    assert engine.forwards == request.result.forwards == 5


@settings(max_examples=30)
@given(
    st.lists(st.tuples(ids, st.booleans(), st.sampled_from([0, 1])), min_size=2, max_size=4),
    st.integers(1, 9), st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_prompt_that_is_not_finite_fails_alone_in_pieces_too(
    poisoned, prompts, rows, static, early  # noqa: F811
):  # fmt: skip
    """Its rows meet those of the others before anybody reads them: what another's piece has lost to
    them is fed again."""
    made = [
        decode.D2F(4, tau_conf=0.3, max_new_tokens=9),
        decode.Block(4, max_new_tokens=8, tau=0.3, align="absolute", temperature=0.5),
    ]
    engine = Engine(poisoned, batch_size=4, slots=300, static=static, prefill_rows=rows)
    engine.early = early
    requests = []
    for i, (prompt, bad, which) in enumerate(prompts):
        tokens = [token if token != POISON else 9 for token in prompt]
        requests.append(
            Request(i, [POISON, *tokens] if bad else tokens, made[which], poisoned.contract, None)
        )
        engine.submit(requests[-1])
    list(engine.run())
    for request, (prompt, bad, which) in zip(requests, prompts, strict=True):
        if bad:
            assert isinstance(request.result.error, NonFiniteLogitsError)
            continue
        tokens = [token if token != POISON else 9 for token in prompt]
        want = decode.generate(poisoned, [tokens], made[which])[0]
        assert request.result.error is None
        assert request.result.raw_tokens == want.raw_tokens
    assert not engine.pool._used


@settings(max_examples=20)
@given(steps(), st.data())
def test_queried_tokens_and_scores_come_joined_in_order(step, data):
    queried = np.arange(len(step.read)) + 10
    asked = Step(*(vars(step)[n] for n in ("tokens", "positions", "slots", "spans", "read")), 0,
                 queried, True)  # fmt: skip
    feeding, found = Feed(asked), None
    while found is None:
        left = [c for c in feeding.cuts.tolist() if c > feeding.fed]
        part = feeding.piece(data.draw(st.sampled_from(left)))
        own = part.tokens[part.read] if len(part.read) else part.read
        assert part.uncertainty
        value = part.queried_tokens.astype(np.float32)
        found = feeding.take(Predictions(own, value, value, value, value + 1, value + 2))
    assert found.token.tolist() == step.tokens[step.read].tolist()
    assert found.queried_probability.tolist() == queried.tolist()
    assert found.entropy.tolist() == (queried + 1).tolist()
    assert found.margin.tolist() == (queried + 2).tolist()


@pytest.mark.parametrize("rows", [0, -1, 2.5, True, "many"])
def test_a_bound_that_is_none_is_refused(rows):
    with pytest.raises(InputError, match="prefill_rows must be a whole number of at least 1"):
        Engine(random_model("causal"), batch_size=1, slots=9, prefill_rows=rows)


def test_a_forward_that_the_model_raised_in_is_done_again_with_the_same_pieces(monkeypatch):
    model = copy.copy(exact_model("causal"))
    decoder, prompt = decode.Autoregressive(6, temperature=1.0), list(range(20, 33))
    want = alone("causal", tuple(prompt), decoder)
    real, calls = model.decode_rows, []

    def failing(*arguments):
        calls.append(None)
        if len(calls) % 2:
            raise torch.OutOfMemoryError("made up")
        return real(*arguments)

    monkeypatch.setattr(model, "decode_rows", failing)
    engine = Engine(model, batch_size=1, slots=40, prefill_rows=5)
    request = Request(0, prompt, decoder, model.contract, None)
    engine.submit(request)
    while not request.done:
        try:
            engine.advance()
        except torch.OutOfMemoryError:
            continue
    assert request.result.raw_tokens == want.raw_tokens
    assert [fed for fed, _ in request.result.calls[:3]] == [5, 5, 3]
