"""The engine: each request gives what it gives alone, whatever runs, comes, fails or leaves beside
it, and however its rows are fed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from every_decoder import KINDS, Visit, alone, decoders, exact_model, kinds, play, tokens, visits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import POISON, fresh_model, random_model

import decode
import decode.engine.engine
import triton_kernels.span_attention
from d2f.attention import SpanPlan
from d2f.errors import InputError, NonFiniteLogitsError, RequestError
from decode.engine import cuda_graphs
from decode.engine.batch import prediction_table
from decode.engine.engine import Engine
from decode.engine.request import Request

CPU = torch.device("cpu")
COMMON = list(range(40, 60))
PIPELINE = decode.D2F(4, tau_conf=0.3, max_new_tokens=9)
alike = st.builds(  # prompts that begin alike
    lambda n, rest: COMMON[:n] + rest, st.integers(0, 20), st.lists(tokens, max_size=5)
).filter(bool)
OPTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 4),
        "static": st.booleans(),
        "prefill_rows": st.none() | st.integers(1, 14),
        "reuse_prefixes": st.booleans(),
        "max_rows": st.none() | st.integers(1, 30),
    }
)
PLAIN = {"batch_size": 2, "static": True, "prefill_rows": None, "reuse_prefixes": False}
POISONED = [Visit([9, 10], PIPELINE, way="poison", when=1), Visit([11, 12, 13], PIPELINE)]


def check(kind: str, planned: list[Visit], requests: list[Request]) -> None:
    for visit, request in zip(planned, requests, strict=True):
        result = request.result
        if result is None:
            assert visit.leaves is not None
            continue
        if result.error is not None:
            errors = {"poison": NonFiniteLogitsError, "too large": InputError}
            assert type(result.error) is errors.get(visit.way, RequestError)
            assert visit.way and result.finish_reason == "error" and result.tokens == []
            continue
        want = alone(kind, tuple(visit.prompt), visit.decoder)
        assert not visit.way or want.forwards <= visit.when + 1
        assert result.raw_tokens == want.raw_tokens
        if "accepted" not in want.counts:  # how far those speculate is the engine's choice
            assert result.counts == want.counts
            fed = sum(rows for rows, _ in result.calls) + result.reused_rows
            assert fed == sum(rows for rows, _ in want.calls)


@settings(max_examples=50)
@example("llada", POISONED, PLAIN, 200, True)
@example("llada", POISONED, PLAIN | {"batch_size": 1}, 200, False)  # in the same slots
@given(kinds, st.data(), OPTIONS, st.integers(60, 200), st.booleans())
def test_each_request_gives_what_it_gives_alone(kind, data, options, slots, early):
    """Whole caches are read where rows are padded, so values that are not finite reach all rows;
    few slots push out rows that are kept for others."""
    planned = data if isinstance(data, list) else data.draw(visits(kind, alike))
    model, bases, real = exact_model(kind), [], decode.engine.engine.join

    def keep(steps, firsts):
        bases.append(firsts)
        return real(steps, firsts)

    engine = Engine(model, slots=slots, **options)
    engine.early = early
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "SIZES", (5, 8, 16, 24))  # some forwards fit none
        patch.setattr(decode.engine.engine, "join", keep)
        requests = play(engine, model, planned)
    large = [v.decoder.begin(v.prompt, model.contract).slots > slots for v in planned]
    check(
        kind,
        [v for v, bad in zip(planned, large, strict=True) if not bad],
        [r for r, bad in zip(requests, large, strict=True) if not bad],
    )
    assert all(own == sorted(own) for own in bases), "rows lie in the order of their slots"
    while engine.prefixes is not None and (base := engine.prefixes.evict()) is not None:
        engine.pool.free(base)
    assert not engine.pool._used, "no slot is lost"


@pytest.mark.parametrize(
    ("kind", "decoder"),
    [
        ("wedlm", decode.WeDLM(16, 9.0, verify="ar", max_new_tokens=20)),
        ("llada", decode.FreeDave(8, 8, drafts=4)),
        ("llada", decode.D2F(8, max_new_tokens=8, lossless=4)),
    ],
)
def test_a_lossless_request_speculates_within_its_share_of_the_rows(kind, decoder):
    model, rows = exact_model(kind), {}
    for max_rows in (1, 8, 64):
        engine = Engine(model, batch_size=4, slots=1000, max_rows=max_rows)
        requests = play(engine, model, [Visit([9 + i, 10], decoder) for i in range(2)])
        rows[max_rows] = [sum(fed for fed, _ in r.result.calls) for r in requests]
    lone = decode.Autoregressive(20) if kind == "wedlm" else decode.Static(8, 8)
    if decoder.name != "d2f":
        base = [sum(f for f, _ in alone(kind, (9 + i, 10), lone).calls) for i in range(2)]
        assert rows[1] == base, "one row, or state, of each: no speculation at all"
    assert sum(rows[1]) < sum(rows[8]) and (kind != "wedlm" or sum(rows[8]) < sum(rows[64]))


def test_the_tokens_are_the_same_where_the_kernels_are_chosen(monkeypatch):
    """Attention and confidence by Triton, as on a GPU, here in its interpreter."""
    import decode.engine.batch

    model, prompts = random_model("dream"), [[5, 6, 7, 8], [9]]
    warm = {"temperature": 0.9, "top_k": 9, "top_p": 0.8, "seed": 2**40}
    decoders = [decode.D2F(2, tau_conf=0.3, max_new_tokens=4, **made) for made in ({}, warm)]
    plain = decode.generate(model, prompts, decoders)
    used = []

    def by_kernel(logits: torch.Tensor, *given: object) -> torch.Tensor:
        used.append(len(logits))
        return prediction_table(logits, *given, kernel=True)

    plan = partial(SpanPlan, way="kernel")
    monkeypatch.setattr(decode.engine.batch, "SpanPlan", plan)
    monkeypatch.setattr(decode.engine.batch, "prediction_table", by_kernel)
    monkeypatch.setattr(triton_kernels.span_attention, "HEAD_DIMS", (8,))
    by_kernels = decode.generate(model, prompts, decoders)
    assert [r.raw_tokens for r in by_kernels] == [r.raw_tokens for r in plain]
    assert used


def test_what_an_early_forward_raises_does_not_take_the_events_with_it(monkeypatch):
    """The next call starts it again, and raises what is raised again."""
    model = fresh_model("llada")
    prompts, real, forwards = [[9, 10], [11, 12, 13]], model.decode_rows, []

    def decode_rows(*arguments):
        forwards.append(None)
        if len(forwards) in (2, 3):
            raise MemoryError("too large")
        return real(*arguments)

    want = [decode.generate(model, [p], PIPELINE)[0] for p in prompts]
    engine = Engine(model, batch_size=2, slots=70)
    engine.early = True
    requests = [Request(i, p, PIPELINE, model.contract, None) for i, p in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    monkeypatch.setattr(model, "decode_rows", decode_rows)
    assert [(event.request, event.forward) for event in engine.advance()] == [(0, 1), (1, 1)]
    with pytest.raises(MemoryError, match="too large"):
        engine.advance()
    list(engine.run())
    assert [request.result.raw_tokens for request in requests] == [r.raw_tokens for r in want]
    assert [request.result.calls for request in requests] == [r.calls for r in want]


@settings(max_examples=8)
@given(kinds, st.data(), st.lists(st.booleans(), min_size=60, max_size=60))
def test_what_a_forward_spoilt_is_done_again_alone_with_the_same_draws(kind, data, spoilt):
    """As where a kernel's tile holds the rows of two requests: both look as if they had failed."""
    model, real, left = exact_model(kind), decode.engine.engine.split, iter(spoilt)

    def split(table, groups):
        found = real(table, groups)
        return [None] * len(found) if len(groups) > 1 and next(left, False) else found

    made = data.draw(st.lists(st.tuples(alike, decoders(kind)), min_size=2, max_size=4))
    planned = [Visit(*one) for one in made]
    engine = Engine(model, batch_size=4, slots=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.engine.engine, "split", split)
        requests = play(engine, model, planned)
    for visit, request in zip(planned, requests, strict=True):
        assert request.result.error is None
        want = alone(kind, tuple(visit.prompt), visit.decoder)
        assert request.result.raw_tokens == want.raw_tokens


def test_an_error_says_what_failed_and_at_which_forward():
    model, decoder = exact_model("llada"), decode.D2F(4, max_new_tokens=9, seed=7)
    engine = Engine(model, batch_size=3, slots=70)
    ways = ("step", "poison", "too large")
    requests = play(engine, model, [Visit([9, 10], decoder, way=way, when=1) for way in ways])
    results = [request.result for request in requests]
    broken, nan, large = (result.error for result in results)
    assert str(broken) == "failed at forward 1: KeyError: 'boom'"
    assert isinstance(broken.__cause__, KeyError)
    assert str(nan) == "the model gave NaN or infinite logits at forward 2"
    assert str(large) == "needs 1000000 slots of the cache, which has 70"
    assert [(result.forwards, len(result.calls)) for result in results] == [(1, 1), (2, 2), (0, 0)]
    assert [result.seconds > 0 for result in results] == [True, True, False]
    assert {(result.prompt_tokens, result.seed) for result in results} == {(2, 7)}


def test_a_decoder_without_a_first_step_is_an_error():
    """It would run for ever without a forward."""

    class Idle(decode.Static):
        def begin(self, prompt, contract):
            session = super().begin(prompt, contract)
            session.step = lambda: None
            return session

    with pytest.raises(RequestError, match="the decoder static has no first step"):
        decode.generate(random_model("llada"), [[9]], Idle(block_size=4, max_new_tokens=8))


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


def test_prompts_that_are_too_many_for_a_forward_enter_one_after_the_other(monkeypatch):
    monkeypatch.setattr(decode.engine.engine, "WHOLE_ROWS", 10)
    model, decoder = exact_model("causal"), decode.Autoregressive(3)
    engine = Engine(model, batch_size=4, slots=300)
    for i, length in enumerate((7, 6, 3, 25)):
        engine.submit(Request(i, [9] * length, decoder, model.contract, None))
    first = [[event.request for event in engine.advance()] for _ in range(4)]
    assert first == [[0], [0, 1, 2], [0, 1, 2, 3], [1, 2, 3]], "25 fit nowhere: by themselves"


def test_the_rows_of_a_prompt_fed_in_pieces_are_counted():
    model = exact_model("causal")
    engine = Engine(model, batch_size=1, slots=40, prefill_rows=4)
    request = Request(0, list(range(9, 19)), decode.Autoregressive(3), model.contract, None)
    engine.submit(request)
    events = list(engine.run())
    assert request.result.calls == [(4, 0), (4, 4), (2, 8), (1, 10), (1, 11)]
    assert [len(event.revealed) for event in events] == [0, 0, 1, 1, 1]
    assert engine.forwards == request.result.forwards == 5


@settings(max_examples=10)
@given(
    st.lists(st.tuples(alike, st.booleans(), st.booleans()), min_size=2, max_size=4),
    st.integers(1, 9), st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_prompt_that_is_not_finite_fails_alone_in_pieces_too(prompts, rows, static, early):
    """Its rows meet those of the others before anybody reads them: what another's piece has lost to
    them is fed again."""
    model = exact_model("llada")
    made = (PIPELINE, decode.Block(4, max_new_tokens=8, tau=0.3, align="absolute"))
    engine = Engine(model, batch_size=4, slots=300, static=static, prefill_rows=rows)
    engine.early = early
    requests = []
    for i, (prompt, bad, which) in enumerate(prompts):
        ids = [POISON, *prompt] if bad else prompt
        requests.append(Request(i, ids, made[which], model.contract, None))
        engine.submit(requests[-1])
    list(engine.run())
    for request, (prompt, bad, which) in zip(requests, prompts, strict=True):
        if bad:
            assert isinstance(request.result.error, NonFiniteLogitsError)
        else:
            want = alone("llada", tuple(prompt), made[which])
            assert request.result.raw_tokens == want.raw_tokens
    assert not engine.pool._used


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_rows": 0}, "prefill_rows must be a whole number of at least 1, got 0"),
        ({"max_rows": 2.5}, "max_rows must be a whole number of at least 1, got 2.5"),
    ],
)
def test_an_option_out_of_range_is_named(options, message):
    with pytest.raises(InputError, match=message):
        Engine(random_model("llada"), batch_size=1, slots=9, **options)


def test_every_decoder_is_among_those_of_these_tests():
    named = {decoder.name for _, made in KINDS.values() for decoder in made}
    assert named == set(decode.decoders.DECODERS)
