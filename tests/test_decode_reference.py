"""Each decoder equals its plain reference token by token (dense masks, no cache), whatever the
model, options, prompt and batch; lossless forms equal what they speed up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from block_tiny import sdar, student, wedlm
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shadows import model_with
from shadows import models as masked_models
from tiny import random_model, tokenizer

import decode
from d2f.model import DiffusionModel
from decode.decoders import Decoder
from decode.decoders.d2f import D2FSession
from decode.engine.engine import Engine
from decode.engine.request import Request
from tests.references.block import decode_block
from tests.references.blockwise import decode_blockwise
from tests.references.d2f import decode_autoregressive, decode_d2f
from tests.references.d2f_revoke import decode_d2f_revoking
from tests.references.freedave import decode_freedave
from tests.references.wedlm import decode_wedlm
from tests.references.wino import decode_wino

prompts = st.lists(st.integers(2, len(tokenizer()) - 1), min_size=1, max_size=15)
sampling = st.sampled_from(
    [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 2.0, "top_k": 5}]
)
seeds = st.integers(0, 3)
families = st.sampled_from(["llada", "dream"])
sizes = st.sampled_from([1, 3, 4, 7])
block_size = st.sampled_from([None, 1, 3, 4, 8, 13])
plain_models = st.builds(random_model, families, seeds)
students = st.builds(student, families, sizes, seeds)
block_models = st.one_of(st.builds(sdar, sizes, seeds), students)
wedlms = st.builds(wedlm, st.booleans(), st.integers(0, 2))


def options(kind: type[Decoder], **drawn: st.SearchStrategy) -> st.SearchStrategy[Decoder]:
    """A decoder with what is drawn; `sampling` is a mapping of options."""
    return st.fixed_dictionaries(drawn).map(lambda d: kind(**(d.pop("sampling", {}) | d)))


def with_steps(
    kind: type[decode.Static], each: int | None, values: dict[str, Any]
) -> decode.Static:
    """each: steps a block, so that one reveals several tokens; None for one."""
    decoder = kind(**values)
    return decoder if each is None else replace(decoder, steps=each * decoder.block_count)


pipeline_sizes = st.sampled_from([1, 3, 5, 8, 10])


def shares(size: int) -> st.SearchStrategy[float]:
    """Thresholds for the decoded share of a block: usual ones, and exact fractions of its size."""
    few = st.integers(0, min(size, 3))  # what a forward or two decode
    fractions = st.one_of(few, st.integers(0, size)).map(lambda k: k / size)
    return st.one_of(st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]), fractions)


@st.composite
def pipelines(draw: st.DrawFn, **options: st.SearchStrategy) -> decode.D2F:
    """A pipeline; options: what else is drawn, a `sampling` as a mapping of options."""
    size, drawn = draw(pipeline_sizes), {name: draw(v) for name, v in options.items()}
    length = draw(st.integers(1, 20))
    return decode.D2F(
        block_size=size,
        tau_add=draw(shares(min(size, length))),
        tau_act=draw(shares(min(size, length))),
        max_new_tokens=length,
        forced_pick=draw(st.sampled_from(["confidence", "entropy", "margin"])),
        **drawn.pop("sampling", {}),
        **drawn,
    )


length = {"max_new_tokens": st.integers(1, 16), "early_exit": st.booleans()}
drawn = {"sampling": sampling, "seed": st.integers(0, 9)}
d2fs = pipelines(
    tau_conf=st.sampled_from([0.05, 0.15, 0.3, 0.9, 1.0]), early_exit=st.booleans(), **drawn
)
revoking = pipelines(
    tau_conf=st.sampled_from([0.05, 0.1, 0.2, 0.9]),
    early_exit=st.booleans(),
    revoke=st.sampled_from(["always", "commit"]),
    tau_revoke=st.sampled_from([0.05, 0.2, 0.5, 0.9, 1.0]),
    **drawn,
)
frame = {"block_size": block_size, "cache": st.sampled_from(["none", "prefix", "dual"])} | length
each = st.one_of(st.none(), st.integers(1, 4))
statics = st.builds(with_steps, st.just(decode.Static), each, st.fixed_dictionaries(frame))
blockwise = st.one_of(
    statics,
    options(decode.Static, **frame, **drawn),
    options(decode.Threshold, tau=st.sampled_from([0.1, 0.3, 0.6, 2.0]), **frame, **drawn),
    options(decode.Factor, factor=st.sampled_from([0.0, 0.7, 1.5, 3.0]), **frame, **drawn),
    options(
        decode.EntropyBounded,
        gamma=st.sampled_from([0.0, 0.5, 3.0, 9.0]),
        proxy=st.sampled_from(["entropy", "confidence", "margin"]),
        **frame,
        **drawn,
    ),
)
winos = st.builds(
    lambda taus, other: replace(other, tau1=taus[0], tau2=taus[1]),
    # Random models are seldom sure: thresholds among their probabilities, and extreme ones.
    st.sampled_from([(0.02, 0.05), (0.05, 0.1), (0.05, 0.3), (0.1, 0.9), (0.0, 1.0), (0.2, 0.0)]),
    options(
        decode.Wino,
        block_size=st.sampled_from([None, 4, 8, 13]),
        caps=st.booleans(),
        max_new_tokens=st.integers(6, 20),
        early_exit=st.booleans(),
        **drawn,
    ),
)
drafts = {"drafts": st.sampled_from([1, 2, 4, 8]), "drafting": st.sampled_from(["tree", "batch"])}
exact = {"block_size": block_size} | length
freedaves = st.builds(
    with_steps, st.just(decode.FreeDave), each, st.fixed_dictionaries(frame | drafts)
)
eager = st.builds(
    with_steps,
    st.just(decode.FreeDave),
    each,
    st.fixed_dictionaries(exact | drafts | {"eager": st.just(True)}),
)
taus = st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.4, 1.0])
plus = options(decode.FreeDave, tau=taus, **exact, **drafts)
blocks = st.one_of(
    options(
        decode.Block,
        block_size=block_size,
        reveal=st.sampled_from(["static", "dynamic", "sequential"]),
        align=st.sampled_from([None, "absolute", "prompt"]),
        tau=st.sampled_from([0.0, 0.1, 0.3, 0.85, 1.0]),
        **length,
        **drawn,
    ),
    options(
        decode.Block, block_size=st.integers(3, 9), denoising_steps=st.integers(1, 3), **length
    ),
)
windows = {
    "window": st.sampled_from([1, 2, 4, 9]),
    "entropy_threshold": st.sampled_from([None, 0.0, 0.5, 1.5, 3.0]),
    "distance_penalty": st.sampled_from([0.0, 0.02, 0.5]),
    "refill": st.sampled_from(["paper", "repository"]),
    "max_new_tokens": st.integers(1, 16),
}
streaming = st.one_of(
    options(decode.WeDLM, **windows, **drawn),
    options(
        decode.WeDLM,
        **windows | {"refill": st.just("block")},
        window_attention=st.sampled_from(["causal", "bidirectional"]),
        **drawn,
    ),
)
verified = options(decode.WeDLM, **windows, verify=st.just("ar"))
causals = options(decode.Autoregressive, max_new_tokens=st.integers(1, 15), **drawn)


class Case(NamedTuple):
    """reference: gives all that is generated, None where undecoded, alone or with the forwards."""

    models: st.SearchStrategy[DiffusionModel]
    decoders: st.SearchStrategy[Decoder]
    reference: Callable[..., Any]


CASES = {
    "d2f": Case(plain_models, d2fs, decode_d2f),
    "revoking": Case(masked_models, revoking, decode_d2f_revoking),
    "wino": Case(masked_models, winos, decode_wino),
    "block": Case(block_models, blocks, decode_block),
    "freedave": Case(plain_models, options(decode.FreeDave, **exact, **drafts), decode_freedave),
    "freedave eager": Case(students, eager, decode_freedave),
    "freedave++": Case(st.one_of(plain_models, students), plus, decode_freedave),
    "wedlm": Case(wedlms, streaming, decode_wedlm),
    "verified": Case(wedlms, verified, decode_autoregressive),
    "autoregressive": Case(st.builds(random_model, st.just("causal"), seeds), causals,
                           decode_autoregressive),
    "autoregressive on wedlm": Case(wedlms, causals, decode_autoregressive),
}  # fmt: skip


def visible(model: DiffusionModel, raw: list[int | None]) -> list[int]:
    kept: list[int] = []
    for token in raw:
        if token is None or token in model.end_ids:
            break
        kept.append(token)
    return kept


def run(model, requests, batch_size=16):
    asked = [prompt for prompt, _ in requests], [decoder for _, decoder in requests]
    return decode.generate(model, *asked, batch_size=batch_size)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25)
@given(st.data(), st.integers(1, 3))
def test_the_engine_equals_the_reference(name, data, batch_size):
    case = CASES[name]
    model = data.draw(case.models)
    requests = data.draw(st.lists(st.tuples(prompts, case.decoders), min_size=1, max_size=3))
    for (prompt, decoder), result in zip(requests, run(model, requests, batch_size), strict=True):
        if name == "verified":
            truth = case.reference(model, prompt, decode.Autoregressive(decoder.max_new_tokens))
            assert len(truth) <= result.forwards + result.counts["accepted"]
        else:
            truth = case.reference(model, prompt, decoder)
        raw, forwards = truth if isinstance(truth, tuple) else (truth, None)
        assert result.raw_tokens == [token for token in raw if token is not None]
        assert result.tokens == visible(model, raw)
        assert forwards in (None, result.forwards)
        if "revoked" in result.counts:
            assert result.counts["drafted"] - result.counts["revoked"] == len(result.raw_tokens)


@pytest.mark.parametrize(
    ("model", "decoder"),
    [
        (random_model("llada"), decode.D2F(10, 0.1, 0.1, max_new_tokens=30, early_exit=False)),
        # At a temperature too, blocks that could reveal nothing are not read.
        (random_model("dream"), decode.D2F(4, tau_conf=1.0, max_new_tokens=24, temperature=0.7)),
        # An end id at a temperature: fewer rows are read after it.
        (random_model("dream"), decode.D2F(16, 0.0, 0.0, 0.3, 29, temperature=0.7, seed=2)),
    ],
)
def test_cases_that_once_failed(model, decoder):
    for prompt in ([5, 6, 7], [256, 280, 92, 292, 101, 131, 28]):
        raw = decode_d2f(model, prompt, decoder)
        found = decode.generate(model, [prompt], decoder)[0].raw_tokens
        assert found == [token for token in raw if token is not None]


@settings(max_examples=20)
@given(
    st.one_of(plain_models, students, st.builds(sdar, st.sampled_from([3, 8]), seeds)),
    st.lists(st.tuples(prompts, blockwise), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_blockwise_decoders_equal_the_reference_forward_by_forward(model, requests, batch_size):
    """All rules, masks and cache policies, block sizes that fit the model's and ones that do not:
    the same positions and tokens in each forward, confidences to rounding."""
    found: list[list] = [[] for _ in requests]
    asked = [prompt for prompt, _ in requests], [decoder for _, decoder in requests]
    for event in decode.stream(model, *asked, batch_size=batch_size):
        found[event.request].append(event.revealed)
    for (prompt, decoder), ours in zip(requests, found, strict=True):
        for mine, other in zip(ours, decode_blockwise(model, prompt, decoder), strict=True):
            mine, other = (sorted(part, key=lambda r: r.position) for part in (mine, other))
            assert [(r.position, r.token) for r in mine] == [(r.position, r.token) for r in other]
            for a, b in zip(mine, other, strict=True):
                assert abs(a.confidence - b.confidence) < 1e-4


@pytest.mark.parametrize("name", ["d2f", "revoking", "wino", "block", "blockwise"])
@settings(max_examples=8)
@given(st.data(), prompts)
def test_early_exit_never_changes_the_visible_tokens(name, data, prompt):
    """And the response without an end is exactly max_new_tokens, the last block short. Drawn tokens
    too, where no forward is left out before the end is settled."""
    case = Case(plain_models, blockwise, None) if name == "blockwise" else CASES[name]
    # One in so many tokens ends the response: of one end id a random model seldom says any.
    ends = tuple(range(0, len(tokenizer()), data.draw(st.sampled_from([5, 20]))))
    ends = tuple(token for token in ends if token not in prompt)
    model, decoder = model_with(data.draw(case.models), end_ids=ends), data.draw(case.decoders)
    if name != "revoking":
        decoder = replace(decoder, temperature=0.0)
    early, late = (
        decode.generate(model, [prompt], replace(decoder, early_exit=exit_))[0]
        for exit_ in (True, False)
    )
    assert (early.tokens, early.finish_reason) == (late.tokens, late.finish_reason)
    assert early.forwards <= late.forwards
    if not set(late.raw_tokens) & set(model.end_ids):
        assert len(late.raw_tokens) == decoder.max_new_tokens


LOSSLESS = {
    "d2f": (plain_models, pipelines(
        tau_conf=st.sampled_from([0.05, 0.15, 0.3, 0.9, 1.0]), early_exit=st.booleans(),
        lossless=st.sampled_from([1, 2, 4, 8]),
    )),
    "freedave": (st.one_of(plain_models, block_models), freedaves),
    "freedave eager": (block_models, eager),
    "freedave above 1": (plain_models, options(
        decode.FreeDave, tau=st.just(1.1), **exact | drafts
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=12)
@given(st.data(), st.integers(1, 3))
def test_what_is_lossless_saves_a_forward_for_each_accepted_draft(name, data, batch_size):
    models, decoders = LOSSLESS[name]
    model = data.draw(models)
    requests = data.draw(st.lists(st.tuples(prompts, decoders), min_size=1, max_size=3))
    kept = ("block_size", "max_new_tokens", "cache", "early_exit", "steps")

    def slow(decoder: Any) -> Decoder:
        if decoder.name == "d2f":
            return replace(decoder, lossless=None)
        return decode.Static(**{option: getattr(decoder, option) for option in kept})

    plain = run(model, [(prompt, slow(decoder)) for prompt, decoder in requests])
    drafted = run(model, requests, batch_size)
    for expected, result, (_, decoder) in zip(plain, drafted, requests, strict=True):
        assert result.raw_tokens == expected.raw_tokens
        assert result.finish_reason == expected.finish_reason
        accepted = result.counts["accepted"]
        assert result.forwards == expected.forwards - accepted
        assert 0 <= accepted <= result.counts["drafted"]
        plain_form = 1 in (getattr(decoder, "lossless", 0), getattr(decoder, "drafts", 0))
        if plain_form and name != "freedave eager":  # which feeds the next block all the same
            assert result.calls == expected.calls


@settings(max_examples=8)
@given(st.one_of(plain_models, students), prompts, plus, frame["cache"])
def test_freedave_plus_without_drafts_is_threshold_decoding(model, prompt, decoder, cache):
    size = decoder.block_size or decoder.length
    plain = decode.Threshold(size, decoder.length, cache, decoder.early_exit, tau=decoder.tau)
    one = replace(decoder, drafts=1, cache=cache)
    alone, expected = (decode.generate(model, [prompt], d)[0] for d in (one, plain))
    assert (alone.raw_tokens, alone.forwards) == (expected.raw_tokens, expected.forwards)


@settings(max_examples=12)
@given(plain_models, prompts, d2fs)
@example(random_model("llada", 0), [5, 6, 7], decode.D2F(4, 0.0, 1.0, 1.0, 16))
def test_d2f_feeds_only_blocks_that_may_reveal_or_are_cached(model, prompt, decoder):
    """And would decode the same if it fed all open ones."""
    result = decode.generate(model, [prompt], decoder)[0]
    with patch.object(D2FSession, "needed_end", lambda self: self.pipeline[-1].end):
        whole = decode.generate(model, [prompt], decoder)[0]
    assert result.raw_tokens == whole.raw_tokens
    assert result.forwards == whole.forwards
    fed, all_fed = ([rows for rows, _ in one.calls] for one in (result, whole))
    assert all(few <= many for few, many in zip(fed, all_fed, strict=True))
    if decoder == decode.D2F(4, 0.0, 1.0, 1.0, 16):
        # One block that is cached, one that reveals.
        assert max(fed[1:]) == 8 < max(all_fed[1:])


STEPPED = {
    "d2f": (masked_models, d2fs),
    "d2f lossless": LOSSLESS["d2f"],
    "revoking": (masked_models, revoking),
    "blockwise": (masked_models, blockwise),
    "block": (block_models, blocks),
    "freedave": (masked_models, freedaves),
    "freedave eager": (block_models, eager),
}


@pytest.mark.parametrize("name", STEPPED)
@settings(max_examples=8)
@given(st.data(), prompts)
def test_what_is_cached_is_final_and_each_row_sees_one_state(name, data, prompt):
    """Leading slots that a step calls cached hold no mask and were last written from the tokens
    that stand there; a row of the sequence writes its own slot, a branch or shadow only scratch
    slots of the request, and each row sees a position once, in a slot that holds it."""
    models, decoders = STEPPED[name]
    model, decoder = data.draw(models), data.draw(decoders)
    request = Request(0, prompt, decoder, model.contract, None)
    session, own = request.session, len(request.session.x)
    engine = Engine(model, batch_size=1, slots=session.slots)
    step = request.begin(session.share)
    engine.submit(request)
    position_in: dict[int, int] = {}
    token_in: dict[int, int] = {}
    while not request.done:
        assert step.slots.max() < session.slots
        used = step.slots[step.slots != own]  # the spare slot, for rows fed only to be read
        assert len(used) == len(set(used.tolist()))
        assert not session.masked[: step.cached].any()
        exact = getattr(decoder, "cache", "none") == "none"
        assert not exact or all(token_in[slot] == session.x[slot] for slot in range(step.cached))
        for slot, position, token in zip(step.slots, step.positions, step.tokens, strict=True):
            assert slot >= own or slot == position
            position_in[slot], token_in[slot] = position, token
        for ranges in step.spans:
            seen = np.concatenate([np.arange(*pair) for pair in ranges])
            held = sorted(position_in[slot] for slot in seen.tolist())
            assert len(set(seen.tolist())) == len(seen)
            if name != "revoking":  # a shadow leaves positions out
                assert held == list(range(len(held)))
        engine.advance()
        step = request.step
