"""Steps in pieces and copied prompts: a cut is where the rows before it need nothing of the rows
behind it, and what is copied is what feeding it would leave."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from every_decoder import Visit, alone, exact_model, play
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import POISON

import decode
from d2f.errors import NonFiniteLogitsError
from decode.decoders.session import feed
from decode.engine.engine import Engine
from decode.engine.pieces import Feed, allowed_cuts, share
from decode.engine.prefixes import Prefixes
from decode.engine.request import Request
from decode.step import Predictions, Step

SLOTS = 7


@st.composite
def steps(draw):
    """Any arrays: slots that are written twice, spans of any slots, reads in any order. Or tidy
    ones, of which most can be cut: rows write slot after slot and see little of what follows."""
    count, tidy = draw(st.integers(1, 6)), draw(st.booleans())
    slot = st.integers(0, SLOTS - 1)
    slots, spans = list(range(count)), []
    if not tidy:
        slots = draw(st.lists(slot, min_size=count, max_size=count))
    for row in range(count):
        end = min(row + 1 + draw(st.sampled_from([0, 0, 1, 2])), count) if tidy else SLOTS
        a, b, c, d = (draw(st.integers(0, end)) for _ in range(4))
        spans.append([sorted((a, b)), sorted((c, d))])
    reads = draw(st.integers(0, 4))
    read = draw(st.lists(st.integers(0, count - 1), min_size=reads, max_size=reads))
    return Step(
        tokens=np.array(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))),
        positions=np.arange(count),
        slots=np.array(slots),
        spans=np.array(spans),
        read=np.array(sorted(read) if draw(st.booleans()) else read, dtype=np.int64),
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


class Lists:
    """A cache of `fed`: slots of two layers, those of three requests."""

    def __init__(self):
        self.layers = [[("old", layer, slot) for slot in range(3 * SLOTS)] for layer in range(2)]

    def copy(self, source, target):
        for layer in self.layers:
            values = [layer[slot] for slot in source.tolist()]
            for slot, value in zip(target.tolist(), values, strict=True):
                layer[slot] = value


def in_pieces(feeding: Feed, data, compute) -> list:
    """What a step gives that is fed in pieces as drawn."""
    got = []
    while feeding.fed < len(feeding.step.tokens):
        left = [c for c in feeding.cuts.tolist() if c > feeding.begin]
        part = feeding.piece(data.draw(st.sampled_from(left)))
        got += compute(part)
        feeding.take(Predictions(part.read, part.read))
    return got


@settings(max_examples=100)
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


@settings(max_examples=100)
@given(steps(), st.data())
def test_what_is_cut_computes_what_the_whole_computes(step, data):
    whole, cut = Lists().layers, Lists().layers
    want = fed(step, whole)
    assert in_pieces(Feed(step), data, lambda part: fed(part, cut)) == want
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
    causal = feed(x, 0, np.arange(6) + 1, np.array([1, 3]), cached=0, logit_shift=0)
    assert allowed_cuts(causal).tolist() == [1, 2, 3, 4, 5, 6]
    # The second row that is read comes before the first: both are read in one forward.
    backwards = replace(causal, read=np.array([3, 1]))
    assert allowed_cuts(backwards).tolist() == [1, 4, 5, 6]


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


@settings(max_examples=150)
@given(st.data(), steps(), st.lists(steps(), max_size=2))
def test_what_is_copied_is_what_feeding_it_would_leave(data, first, later):
    """Also after the source went on, with steps that write any of its slots."""
    cache = Lists()
    prefixes = Prefixes(cache)
    fed(first, cache.layers)
    prefixes.add(0, Feed(first, first=True))
    for step in later:
        # Rows that are fed again as they were, and others.
        again = data.draw(st.lists(st.integers(0, len(first.tokens) - 1), max_size=2, unique=True))
        if again and data.draw(st.booleans()):
            names = ("tokens", "positions", "slots", "spans")
            rows = {n: getattr(first, n)[again] for n in names}
            step = Step(**rows, read=step.read[:0], cached=0)
        prefixes.note(0, step)
        fed(step, cache.layers)
    step = data.draw(related(first))
    feeding, base = Feed(step, first=True), SLOTS
    prefixes.fill(base, feeding)

    def at(part: Step) -> Step:
        return replace(part, slots=part.slots + base, spans=part.spans + base)

    got = in_pieces(feeding, data, lambda part: fed(at(part), cache.layers))
    plain = Lists().layers
    assert got == fed(at(step), plain)
    for layer, want in zip(cache.layers, plain, strict=True):
        slots = (step.slots + base).tolist()
        assert [layer[slot] for slot in slots] == [want[slot] for slot in slots]


COMMON = list(range(40, 60))
FIRST, SECOND = [*COMMON[:13], 8, 9], [*COMMON[:13], 11, 12, 13]


def one_after_the_other(kind: str, prompts: list[list[int]], decoder, **options) -> list[Request]:
    options = {"slots": 300, "batch_size": 4, "reuse_prefixes": True} | options
    engine = Engine(exact_model(kind), **options)
    planned = [Visit(prompt, decoder, comes=50 * i) for i, prompt in enumerate(prompts)]
    requests = play(engine, exact_model(kind), planned)
    if engine.prefixes is not None:
        assert engine.prefixes.reused_rows == sum(r.result.reused_rows for r in requests)
    return requests


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
    reused = [request.result.reused_rows for request in (first, second, third)]
    assert reused == [0, alike, equal]
    assert third.result.raw_tokens == first.result.raw_tokens
    whole = alone(kind, tuple(SECOND), decoder)
    assert second.result.calls[0] == (whole.calls[0][0] - alike, alike)
    assert second.result.raw_tokens == whole.raw_tokens


def test_rows_that_a_request_has_fed_again_with_other_tokens_are_no_source_any_more():
    """The window after the prompt, of which the masks are filled."""
    model, decoder = exact_model("wedlm"), decode.WeDLM(4, max_new_tokens=6)
    engine = Engine(model, batch_size=1, slots=100, reuse_prefixes=True)
    engine.submit(Request(0, FIRST, decoder, model.contract, None))
    engine.advance()
    (source,) = engine.prefixes._sources.values()
    assert source.final == len(FIRST) + 4
    list(engine.run())
    assert source.final == len(FIRST)


def test_the_oldest_is_given_up_first_where_slots_are_wanted():
    """A cache of three requests: the fourth takes the place of the first, which is then not there;
    what a request wants itself is given up last."""
    a, b, c, d = ([start, *COMMON[1:12]] for start in (8, 9, 10, 11))
    decoder = decode.Autoregressive(3)
    requests = one_after_the_other("causal", [a, b, c, d, b, a], decoder, slots=3 * 15)
    assert [request.result.reused_rows for request in requests] == [0, 0, 0, 0, 11, 0]


def test_a_request_that_waits_for_its_turn_takes_what_was_fed_meanwhile():
    model, decoder = exact_model("causal"), decode.Autoregressive(4)
    engine = Engine(model, batch_size=4, slots=300, prefill_rows=5, reuse_prefixes=True)
    requests = play(engine, model, [Visit(COMMON, decoder) for _ in range(3)])
    assert [request.result.reused_rows for request in requests] == [0, 19, 19]
    want = alone("causal", tuple(COMMON), decoder)
    assert all(request.result.raw_tokens == want.raw_tokens for request in requests)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [None, 4])
def test_a_request_that_failed_or_was_cancelled_is_no_source(static, rows):
    """Blocks of 4 from position 0: the first two of both prompts are the same and finite, the third
    of one is not."""
    model = exact_model("llada")
    decoder = decode.Block(4, max_new_tokens=8, tau=0.3, align="absolute")
    bad, good = [*range(40, 48), POISON, 9], [*range(40, 48), 10, 9]
    want = alone("llada", tuple(good), decoder)
    options = {"static": static, "prefill_rows": rows, "reuse_prefixes": True}
    engine = Engine(model, batch_size=2, slots=100, **options)
    planned = [Visit(bad, decoder), Visit(good, decoder, leaves=2), Visit(good, decoder, comes=9)]
    requests = play(engine, model, planned)
    assert isinstance(requests[0].result.error, NonFiniteLogitsError)
    assert requests[2].result.reused_rows == 0
    assert requests[2].result.raw_tokens == want.raw_tokens
