"""Lossless sessions whose width the engine chooses: the tokens stay, whatever it chooses and
whatever it believes a forward costs; what it chooses is what its figures say."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from every_decoder import exact_model
from hypothesis import example, given, settings
from hypothesis import strategies as st

import decode
from d2f.errors import InputError
from decode.decoders.wedlm import WIDTHS
from decode.engine.engine import Engine
from decode.engine.learned import Learned, Yields
from decode.engine.request import Request
from decode.engine.row_budget import STRETCH, Gain, Hull, RowBudget
from decode.step import Predictions

N = 12
# A decoder of width "auto", and the plain one whose tokens it gives.
PAIRS = {
    "wedlm": [
        (decode.WeDLM("auto", 0.6, max_new_tokens=N, verify="ar"), decode.Autoregressive(N)),
        (decode.WeDLM("auto", 3.0, max_new_tokens=N, verify="ar"), decode.Autoregressive(N)),
        (
            decode.WeDLM("auto", 3.0, max_new_tokens=N, verify="ar", refill="repository"),
            decode.Autoregressive(N),
        ),
    ],
    "llada": [
        (decode.FreeDave(4, N, drafts="auto"), decode.Static(4, N)),
        (decode.FreeDave(None, N, drafts="auto", cache="dual"), decode.Static(None, N, "dual")),
        (
            decode.D2F(4, tau_conf=0.2, max_new_tokens=N, lossless="auto"),
            decode.D2F(4, tau_conf=0.2, max_new_tokens=N),
        ),
    ],
    "dream student": [
        (decode.FreeDave(4, N, drafts="auto", eager=True), decode.Static(4, N)),
        (
            decode.D2F(3, tau_add=0.0, tau_conf=0.1, max_new_tokens=N, lossless="auto"),
            decode.D2F(3, tau_add=0.0, tau_conf=0.1, max_new_tokens=N),
        ),
    ],
}
prompts = st.lists(st.integers(2, 80), min_size=1, max_size=8)


@st.composite
def loads(draw):
    """A model, its requests (prompt, pair, forwards before it arrives) and a batch size."""
    kind = draw(st.sampled_from(sorted(PAIRS)))
    request = st.tuples(prompts, st.sampled_from(PAIRS[kind]), st.integers(0, 9))
    return kind, draw(st.lists(request, min_size=1, max_size=5)), draw(st.integers(1, 5))


class AnyWidths(RowBudget):
    """Chooses at random in every forward."""

    def __init__(self, model, draws):
        super().__init__(model)
        self.draws = draws

    def assign(self, running):
        self._count = -1  # never as it was
        super().assign(running)

    def _choose(self, sessions, rows, others):
        return [int(self.draws.integers(len(session.widths))) for session in sessions]


class AnyCosts(RowBudget):
    """Believes made-up times."""

    def __init__(self, model, draws):
        super().__init__(model)
        self.learned = Learned()
        self.draws = draws

        self.learned.note_forward = lambda rows, reads, requests, *_: self.learned.curve.note(
            rows, reads, requests, self._time(rows)
        )

    def _time(self, rows):
        return float(self.draws.lognormal(sigma=2.0)) * rows ** float(self.draws.random())


@settings(max_examples=60)
@given(loads(), st.sampled_from([AnyWidths, AnyCosts]), st.integers(0, 99))
def test_the_tokens_are_those_alone_and_without_speculation(load, kind_of_budget, seed):
    kind, asked, batch_size = load
    model = exact_model(kind)
    requests = [
        (at, Request(i, prompt, auto, model.contract, None))
        for i, (prompt, (auto, _), at) in enumerate(asked)
    ]
    slots = sum(request.session.slots for _, request in requests)
    engine = Engine(model, batch_size=batch_size, slots=slots)
    engine.budget = kind_of_budget(model, np.random.default_rng(seed))
    now = 0
    while not all(request.done for _, request in requests):
        for at, request in requests:
            if at == now:
                engine.submit(request)
        engine.advance()
        now += 1
    for (prompt, (_, plain), _), (_, request) in zip(asked, requests, strict=True):
        expected = decode.generate(model, [prompt], plain)[0]
        assert request.result.raw_tokens == expected.raw_tokens
        assert request.result.tokens == expected.tokens
        assert request.result.forwards <= expected.forwards


def test_a_width_of_one_feeds_what_autoregressive_decoding_feeds():
    model = exact_model("wedlm")
    request = Request(0, [5, 6, 7], PAIRS["wedlm"][0][0], model.contract, None)
    engine = Engine(model, batch_size=1, slots=request.session.slots)
    engine.budget.assign = lambda running: None  # as a session begins: width 1
    engine.submit(request)
    while not request.done:
        engine.advance()
    assert (
        request.result.calls
        == decode.generate(model, [[5, 6, 7]], decode.Autoregressive(N))[0].calls
    )


@given(prompts, st.data())
def test_a_step_without_speculation_is_the_windows_in_less_time(prompt, data):
    model = exact_model("wedlm")
    session = PAIRS["wedlm"][1][0].begin(prompt, model.contract)
    draws = np.random.default_rng(data.draw(st.integers(0, 99)))
    while session.proceed():
        session.width = int(draws.choice([1, 1, 1, 2, 4]))
        before = dict(session.counts)
        plain = session.feed_window(session.known - 1)
        counted, session.counts = session.counts, before
        step = session.feed_step()
        assert session.counts == counted
        for name, array in vars(plain).items():
            np.testing.assert_array_equal(getattr(step, name), array)
            assert np.asarray(getattr(step, name)).dtype == np.asarray(array).dtype
        n = len(step.read)
        entropy = draws.random(n).astype(np.float32) if step.uncertainty else None
        tokens, sure = draws.integers(2, 4, size=n), draws.random(n).astype(np.float32)
        session.accept(Predictions(tokens, sure, entropy=entropy))


def test_what_one_request_alone_and_what_many_are_given():
    """The table of `decode.engine.row_budget`."""
    tokens, rows = np.array([1.0, 2.5]), np.array([1.0, 4.0])
    for count, expected in ((1, 1), (16, 1), (64, 0)):
        assert chosen(count, tokens, rows, lambda r: (10 + r / 2) / 1000) == [expected] * count


def chosen(count, tokens, rows, seconds, *, other_rows=0, others=0, ran=0, reads=None):
    """What a budget with these figures gives `count` equal sessions. seconds: of rows, and where
    `reads` are given, by width, of these too. ran: the width that they had, 0 for new ones."""
    model = exact_model("wedlm")
    sessions = [
        decode.WeDLM("auto", max_new_tokens=N, verify="ar").begin([5], model.contract)
        for _ in range(count)
    ]
    budget = RowBudget(model)
    budget.learned = Learned()
    budget.learned.curve.seconds = lambda r, requests: seconds(*r[: 1 if reads is None else 2])
    both = np.stack([rows, rows if reads is None else reads])
    with patch.object(Yields, "expected", lambda self: (tokens, both)):
        for session in sessions:
            session.widths = tuple(range(1, len(rows) + 1))
            budget._gains[session] = type(
                "Fixed", (), {"yields": budget.learned.yields(session), "factor": 1.0, "width": ran}
            )()
        return budget._choose(sessions, np.array([other_rows, other_rows]), others)


@settings(max_examples=80)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0.5, 6)), min_size=1, max_size=3),
    st.floats(0, 50),
    st.floats(0, 3),
    st.integers(0, 40),
)
@example(count=2, further=[(1.0, 3.0), (1.0, 3.0)], flat=4.0, slope=1.0, other_rows=0)
@example(count=2, further=[(0.99, 3.0), (1.0, 3.0)], flat=4.0, slope=1.0, other_rows=0)
def test_no_uniform_width_is_better_than_the_choice(count, further, flat, slope, other_rows):
    tokens = np.cumsum([1.0, *(more for more, _ in further)])
    rows = np.cumsum([1.0, *(more for _, more in further)])

    def seconds(r):
        return (1.0 + np.maximum(r, flat) * slope) / 1000

    def rate(widths):
        at = list(widths)
        return tokens[at].sum() / seconds(other_rows + rows[at].sum())

    found = rate(chosen(count, tokens, rows, seconds, other_rows=other_rows))
    uniform = max(rate([at] * count) for at in range(len(rows)))
    best = max(rate(w) for w in combinations_with_replacement(range(len(rows)), count))
    assert found >= uniform * (1 - 1e-9)
    assert found <= best * (1 + 1e-9)


def test_rows_that_are_not_read_are_not_taken_to_cost_what_read_ones_do():
    """In responses of width 1 most rows are prompts'; of width 4 most are read."""
    tokens, rows = np.array([1.0, 2.4]), np.array([3.0, 7.0])

    def seconds(fed, read):
        return (fed + 9 * read) / 1000

    assert chosen(8, tokens, rows, lambda fed: fed / 1000) == [1] * 8
    assert chosen(8, tokens, rows, seconds, reads=np.array([1.0, 4.0])) == [0] * 8


def test_a_hull_leaves_out_what_no_load_would_choose():
    rows = np.array([[1.0, 2.0, 3.0, 4.0, 8.0], [1.0, 1.0, 2.0, 2.0, 4.0]])
    hull = Hull(np.array([1.0, 1.2, 3.0, 2.9, 3.5]), rows)
    assert hull.at.tolist() == [0, 2, 4]
    assert hull.more_tokens.tolist() == [2.0, 0.5]
    assert hull.more_rows.tolist() == [[2.0, 5.0], [1.0, 2.0]]


def test_the_engine_notes_first_steps_and_lengths():
    model = exact_model("wedlm")
    request = Request(0, [5, 6, 7], PAIRS["wedlm"][0][0], model.contract, None)
    engine = Engine(model, batch_size=1, slots=request.session.slots)
    engine.budget.learned = Learned()
    engine.submit(request)
    engine.advance()
    session = request.session
    yields = engine.budget.learned.yields(session)
    at = WIDTHS.index(session.width)
    assert yields.starts.sum() == yields.starts[at] == 1
    assert yields.begun[:, at].tolist() == [min(session.width, N), min(session.width, N) + 1]
    assert (yields.prompt, yields.first) == (3, len(session.revealed))
    while not request.done:
        engine.advance()
    assert yields.length == len(request.result.raw_tokens)


def test_what_only_the_first_forward_of_a_size_does_is_not_counted_as_its_time(monkeypatch):
    """A forward takes a second, and ten where something has to be made for its number of rows."""
    model, clock, made, noted = exact_model("wedlm"), [0.0], set(), []
    rows_of = model.decode_rows

    def make(rows):
        clock[0] += 0.0 if rows in made else 9.0
        made.add(rows)

    def decode_rows(*given):
        clock[0] += 1.0
        return rows_of(*given)

    engine = SimpleNamespace(perf_counter=lambda: clock[0])
    monkeypatch.setattr("decode.engine.engine.time", engine)
    monkeypatch.setattr(model, "prepare_rows", make)
    monkeypatch.setattr(model, "decode_rows", decode_rows)
    monkeypatch.setattr(Learned, "note_forward", lambda *given: noted.append(given[4]))
    decode.generate(model, [[5, 6, 7], [8]], PAIRS["wedlm"][0][0])
    assert len(made) > 1 and clock[0] == 9.0 * len(made) + len(noted)
    assert set(noted) == {1.0}


def seen_of(widths, *, ended):
    """By width the forwards that are counted of a session that ran in these."""
    gain = Gain(Yields(WIDTHS))
    for width in widths:
        gain.note(width, tokens=2, rows=width, reads=width)
    if ended:
        gain.end()
    yields = gain.yields
    assert set(yields.tokens[yields.seen > 0]) <= {2.0}
    seen = zip(yields.widths, yields.seen, yields.rows.T, strict=True)
    return {int(w): n for w, n, rows in seen if n and rows.tolist() == [w, w]}


def test_a_width_is_judged_by_whole_responses_or_long_stretches():
    """The beginning of a response may bring twice what its end does, at any width."""
    assert seen_of([8] * 5, ended=False) == {}
    assert seen_of([8] * 5, ended=True) == {8: 5}
    assert seen_of([8] * 5 + [4] * 7, ended=True) == {}
    assert seen_of([8] * 5 + [4] * STRETCH, ended=False) == {4: STRETCH}
    assert seen_of([8] * (STRETCH + 3), ended=True) == {8: STRETCH + 3}


def test_a_request_that_gains_less_than_others_expects_less():
    yields = Yields(WIDTHS)
    yields.note(1, 1000, 1000, 1000, 1000)
    yields.note(8, 900, 3600, 9000, 9000)
    usual, poor = Gain(yields), Gain(yields)
    for _ in range(STRETCH):
        usual.note(8, 4, 10, 10)
        poor.note(8, 1, 10, 10)
    assert usual.factor == pytest.approx(1.0, abs=0.05) and poor.factor < 0.4


@pytest.mark.parametrize("better, expected", [(1.01, [0, 0]), (1.5, [1, 1])])
def test_widths_stay_where_others_are_hardly_better(better, expected):
    """Two requests that ran without speculation; with it, as many rows bring that much more."""
    tokens, rows = np.array([1.0, better]), np.array([1.0, 1.0 + 1e-9])
    assert chosen(2, tokens, rows, lambda r: r / 1000, ran=1) == expected


def test_who_takes_anothers_place_gets_its_width_without_a_choice():
    model = exact_model("wedlm")
    auto = PAIRS["wedlm"][1][0]
    first, second = (Request(i, [5, 6], auto, model.contract, None) for i in range(2))
    budget = RowBudget(model)
    budget.learned = Learned()
    budget.assign([first])
    budget.forget(first)
    anew = patch.object(RowBudget, "_choose", side_effect=AssertionError("chosen anew"))
    with anew, patch.object(Yields, "trial", return_value=None):
        budget.assign([second])
    assert second.session.width == first.session.width > 1


@pytest.mark.parametrize("left, anew", [(7, False), (6, True)])
def test_widths_are_chosen_anew_where_more_than_an_eighth_have_left(left, anew):
    model = exact_model("wedlm")
    auto = PAIRS["wedlm"][1][0]
    requests = [Request(i, [5, 6], auto, model.contract, None) for i in range(8)]
    budget = RowBudget(model)
    budget.learned = Learned()
    budget.assign(requests)
    with patch.object(RowBudget, "_choose", side_effect=RowBudget._choose, autospec=True) as choose:
        budget.assign(requests[:left])
    assert bool(choose.call_count) == anew


def test_widths_are_chosen_the_more_seldom_the_longer_they_stay():
    """A choice takes time, not little of it beside a small model's forward."""
    model, made = exact_model("wedlm"), []
    requests = [Request(i, [5, 6], PAIRS["wedlm"][1][0], model.contract, None) for i in range(4)]
    budget = RowBudget(model)
    budget.learned = Learned()

    def choose(sessions, rows, others):
        made.append(forward)
        return [0 if forward < 200 else 2] * len(sessions)

    budget._choose = choose
    for forward in range(300):  # noqa: B007 (read in `choose`)
        budget.assign(requests)
    assert made == [0, 16, 48, 112, 176, 240, 256, 288]  # another at 240


def test_auto_speculates_alone_and_learns_from_it():
    """A model whose masks are always right, and one row costs as much as many."""
    model = exact_model("wedlm")
    budget = RowBudget(model)
    budget.learned = Learned()
    request = Request(0, [5, 6], PAIRS["wedlm"][1][0], model.contract, None)
    budget.assign([request])
    assert request.session.width > 1


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: decode.WeDLM("auto"), "window auto needs verify ar"),
        (lambda: decode.WeDLM("wide", verify="ar"), "window must be"),
        (lambda: decode.FreeDave(drafts="many"), "drafts must be"),
        (lambda: decode.D2F(lossless="AUTO"), "lossless must be"),
        (lambda: decode.D2F(lossless="auto", temperature=1.0), "lossless needs temperature 0"),
    ],
)
def test_what_auto_goes_with(make, said):
    with pytest.raises(InputError, match=said):
        make()


def test_replace_keeps_auto():
    assert replace(decode.FreeDave(drafts="auto"), block_size=4).drafts == "auto"
