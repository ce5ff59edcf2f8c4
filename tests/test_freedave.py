"""FreeDave gives static decoding's tokens in no more forwards: with a model and without one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model, tokenizer

import decode
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.decoders.freedave import FreeDaveSession
from decode.engine.engine import Engine
from decode.engine.request import Request
from decode.step import Predictions, Step
from tests.references.freedave import decode_freedave
from triton_kernels.span_attention import span_mask

BLOCK_CAUSAL = [
    {"objective": "d2f", "block_size": 3},
    {"objective": "d2f", "block_size": 8},
    {"prompt_rule": "block_causal", "block_size": 4},  # blocks on absolute positions
]


@cache
def model_of(family: str, mask: int | None) -> DiffusionModel:
    """A random model: bidirectional for None, else under that mask of `BLOCK_CAUSAL`."""
    model = fresh_model(family, seed=mask or 0)
    if mask is not None:
        model.contract = replace(model.contract, **BLOCK_CAUSAL[mask])
    return model


families = st.sampled_from(["llada", "dream"])
masks = st.sampled_from([0, 1, 2])
prompts = st.lists(st.integers(2, len(tokenizer()) - 1), min_size=1, max_size=15)
drafts = st.sampled_from([1, 2, 4, 8])
draftings = st.sampled_from(["tree", "batch"])
lengths = {
    "block_size": st.one_of(st.sampled_from([None, 1, 3, 4, 8]), st.integers(1, 64)),
    "max_new_tokens": st.integers(1, 20),
    "early_exit": st.booleans(),
}


def freedave(each: int | None = None, **options) -> decode.FreeDave:
    """each: steps a block, so that one reveals several tokens; None for one."""
    decoder = decode.FreeDave(**options)
    return decoder if each is None else replace(decoder, steps=each * decoder.block_count)


each = st.one_of(st.none(), st.integers(1, 5))
common = {"each": each, "drafts": drafts, "drafting": draftings} | lengths
caches = st.sampled_from(["none", "prefix", "dual"])
decoders = st.builds(freedave, cache=caches, **common)
exact = st.builds(freedave, **common)
eager = st.builds(freedave, eager=st.just(True), **common)
taus = st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.4, 1.0])
plus = st.builds(decode.FreeDave, tau=taus, drafts=drafts, drafting=draftings, **lengths)


def static_of(decoder: decode.FreeDave) -> decode.Static:
    names = ("block_size", "max_new_tokens", "cache", "early_exit", "steps")
    return decode.Static(**{name: getattr(decoder, name) for name in names})


def check_lossless(model, requests, batch_size):
    """The requests (prompt, FreeDave) give what static decoding gives, a forward saved for each
    accepted draft."""
    asked = [prompt for prompt, _ in requests]
    chosen = [decoder for _, decoder in requests]
    statics = decode.generate(model, asked, [static_of(d) for d in chosen])
    drafted = decode.generate(model, asked, chosen, batch_size=batch_size)
    for static, result, decoder in zip(statics, drafted, chosen, strict=True):
        assert result.raw_tokens == static.raw_tokens
        assert result.tokens == static.tokens
        assert result.finish_reason == static.finish_reason
        accepted = result.counts["accepted"]
        assert result.forwards == static.forwards - accepted
        assert 0 <= accepted <= result.counts["drafted"]
        assert accepted <= (decoder.drafts - 1) * result.forwards


@settings(max_examples=40)
@given(
    families,
    st.one_of(st.none(), masks),
    st.lists(st.tuples(prompts, decoders), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_it_equals_static_decoding_with_the_same_cache(family, mask, requests, batch_size):
    check_lossless(model_of(family, mask), requests, batch_size)


@settings(max_examples=30)
@given(
    families,
    masks,
    st.lists(st.tuples(prompts, eager), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_drafts_over_the_border_of_a_block_lose_nothing(family, mask, requests, batch_size):
    check_lossless(model_of(family, mask), requests, batch_size)


@settings(max_examples=25)
@given(families, st.one_of(st.none(), masks), prompts, st.one_of(exact, plus), st.booleans())
def test_it_equals_the_plain_algorithm_in_tokens_and_forwards(
    family, mask, prompt, decoder, over_the_border
):
    decoder = replace(decoder, eager=over_the_border and mask is not None)
    model = model_of(family, mask)
    raw, forwards = decode_freedave(model, prompt, decoder)
    result = decode.generate(model, [prompt], decoder)[0]
    assert result.raw_tokens == [token for token in raw if token is not None]
    assert result.forwards == forwards


@settings(max_examples=25)
@given(families, st.one_of(st.none(), masks), prompts, plus, st.booleans(), caches)
def test_freedave_plus_without_drafts_is_threshold_decoding_and_above_1_static(
    family, mask, prompt, decoder, over_the_border, cache
):
    over_the_border = over_the_border and mask is not None
    shape = {n: getattr(decoder, n) for n in ("block_size", "max_new_tokens", "early_exit")}
    if not over_the_border:
        shape["cache"] = cache
    model, size = model_of(family, mask), shape["block_size"]
    shape["block_size"] = size or decoder.length
    given = decode.FreeDave(tau=decoder.tau, drafts=1, eager=over_the_border, **shape)
    plain = decode.Threshold(tau=decoder.tau, **shape)
    alone, expected = (decode.generate(model, [prompt], d)[0] for d in (given, plain))
    assert alone.raw_tokens == expected.raw_tokens
    assert alone.forwards == expected.forwards
    unsure = decode.FreeDave(tau=1.1, drafts=decoder.drafts, eager=over_the_border, **shape)
    check_lossless(model, [(prompt, unsure)], 1)


def visible_slots(step: Step) -> list[np.ndarray]:
    """The slots that each row sees; fails where two ranges of a row overlap."""
    rows = []
    for ranges in step.spans:
        seen = np.concatenate([np.arange(*pair) for pair in ranges])
        assert len(seen) == len(set(seen.tolist()))
        rows.append(seen)
    return rows


@settings(max_examples=25)
@given(
    families,
    st.one_of(st.none(), masks),
    prompts,
    st.one_of(decoders, eager, plus.map(lambda d: replace(d, eager=True))),
)
def test_a_branch_sees_one_state_and_writes_only_slots_of_its_request(
    family, mask, prompt, decoder
):
    """Each row sees every position below its end exactly once, in a slot that was written."""
    model = model_of(family, mask)
    if mask is None:
        decoder = replace(decoder, eager=False)
    request = Request(0, prompt, decoder, model.contract, None)
    session = request.session
    assert isinstance(session, FreeDaveSession)
    engine = Engine(model, batch_size=1, slots=session.slots)
    engine.submit(request)
    holds: dict[int, int] = {}  # position by slot
    while not request.done:
        step = request.next_step
        assert step is not None
        assert step.slots.max() < session.slots
        assert not session.masked[: step.cached].any()
        used = step.slots[step.slots != session.scratch - 1]
        assert len(used) == len(set(used.tolist()))
        holds |= dict(zip(step.slots.tolist(), step.positions.tolist(), strict=True))
        for position, seen in zip(step.positions, visible_slots(step), strict=True):
            held = sorted(holds[slot] for slot in seen.tolist())
            assert held == list(range(session.ends[position]))
        engine.advance()


def test_a_row_of_a_step_sees_the_prefix_and_its_own_branch():
    """On a bidirectional model with the prefix cached, one block: a prefix and d branches."""
    session = decode.FreeDave(max_new_tokens=6, cache="prefix", drafts=4).begin(
        [7, 8, 9], model_of("llada", None).contract
    )
    script = Scripted(len(session.x))
    session.accept(script(session, session.step()))
    spans = torch.from_numpy(session.step().spans)
    mask = span_mask(spans, session.slots)
    branch = torch.arange(4).repeat_interleave(6)
    own = torch.cat((torch.full((3,), -1), branch[:6], torch.tensor([9]), branch[6:]))
    # by slot: prefix, state x, the spare slot (seen by none), the three branches
    assert torch.equal(mask, (own == -1) | (own == branch[:, None]))


@pytest.mark.parametrize(
    ("family", "mask", "over_the_border", "shares"),
    [
        ("llada", 0, True, True),  # rows of a complete block, on their way into the cache
        ("dream", 0, False, True),  # the row before the block
        ("llada", 0, False, False),
        ("llada", None, False, False),
        ("dream", None, False, False),
    ],
)
def test_a_tree_feeds_fewer_rows_only_where_branches_share_some(
    family, mask, over_the_border, shares
):
    rows = []
    for drafting in ("tree", "batch"):
        decoder = decode.FreeDave(
            block_size=3,
            max_new_tokens=12,
            early_exit=False,
            drafting=drafting,
            eager=over_the_border,
        )
        result = decode.generate(model_of(family, mask), [list(range(5, 17))], decoder)[0]
        rows.append(sum(fed for fed, _ in result.calls))
    assert (rows[0] < rows[1]) if shares else (rows[0] == rows[1])


class Scripted:
    """Predictions that do not depend on the state: every draft holds."""

    def __init__(self, length: int):
        generator = np.random.default_rng(0)
        self.confidence = generator.permutation(length).astype(np.float32) / length

    def __call__(self, session: FreeDaveSession, step: Step) -> Predictions:
        positions = step.positions[step.read] + session.contract.logit_shift
        return Predictions(positions + 5, self.confidence[positions])

    def forwards(self, session: FreeDaveSession) -> int:
        count = 0
        while (step := session.step()) is not None:
            session.accept(self(session, step))
            count += 1
        assert session.tokens == [p + 5 for p in range(session.prompt_length, len(session.x))]
        return count


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("d", [1, 2, 4, 8])
def test_where_every_draft_holds_a_forward_reveals_d_tokens(family, d):
    """A block costs its first forward, which has no drafts, and then a forward for d tokens; eager
    drafting pays that first forward once."""
    contract = model_of(family, 0).contract
    for over_the_border, expected in ((False, 4 * (1 + -(-5 // d))), (True, 1 + -(-23 // d))):
        decoder = decode.FreeDave(6, 24, early_exit=False, drafts=d, eager=over_the_border)
        session = decoder.begin([7, 8, 9], contract)
        assert Scripted(len(session.x)).forwards(session) == expected


def test_the_chain_ends_at_the_first_draft_that_static_decoding_would_not_reveal():
    session = decode.FreeDave(4, 4, drafts=3).begin([7], model_of("llada", None).contract)
    step = session.step()
    assert step.read.tolist() == [1, 2, 3, 4]
    first = Predictions(np.array([9, 9, 9, 9]), np.array([0.9, 0.2, 0.8, 0.4], np.float32))
    session.accept(first)
    assert session.view(1, 5) == (9, None, None, None)
    step = session.step()
    assert session.drafts == [[(3, 9)], [(4, 9)]]
    assert step.tokens[step.read].tolist() == [session.contract.mask_id] * 6  # 3, 2 and 1 masks
    confidence = np.array([0.1, 0.7, 0.6, 0.8, 0.3, 0.9], np.float32)
    session.accept(Predictions(np.full(6, 9), confidence))
    # The state reveals 3, as drafted; the first branch then 2 and not 4: the second does not hold.
    assert session.view(1, 5) == (9, 9, 9, None)
    assert session.counts == {"drafted": 2, "accepted": 1}
    assert [r.position for r in session.revealed] == [2, 1]


def test_a_draft_of_several_tokens_holds_only_whole():
    """Two steps a block of 4: x reveals one of the two that were drafted, and another."""
    decoder = decode.FreeDave(6, 6, steps=3, drafts=2)
    session = decoder.begin([7], model_of("llada", None).contract)
    session.step()
    values = np.array([0.9, 0.8, 0.7, 0.6, 0.2, 0.1], np.float32)
    session.accept(Predictions(np.full(6, 9), values))
    assert session.view(1, 7) == (9, 9, None, None, None, None)
    session.step()
    assert session.drafts == [[(3, 9), (4, 9)]]
    found = np.array([0.9, 0.1, 0.8, 0.2, 0.9, 0.9], np.float32)  # of x, then of the branch
    session.accept(Predictions(np.full(6, 9), found))
    assert session.view(1, 7) == (9, 9, 9, None, 9, None)
    assert session.counts == {"drafted": 1, "accepted": 0}


def test_freedave_plus_takes_the_longest_branch_of_what_the_rule_reveals_and_decides_anew():
    decoder = decode.FreeDave(5, 5, drafts=3, tau=0.5)
    session = decoder.begin([7], model_of("llada", None).contract)
    session.step()
    values = np.array([0.9, 0.4, 0.3, 0.2, 0.1], np.float32)
    session.accept(Predictions(np.full(5, 9), values))
    step = session.step()
    assert session.drafts == [[(2, 9)], [(3, 9)]]
    assert len(step.read) == 4 + 3 + 2
    of_x = [0.6, 0.7, 0.8, 0.1]  # reveals 2, 3 and 4: both branches are among them
    of_branch = [0.1, 0.1, 0.9]  # would not reveal 3: not asked, the other branch is longer
    of_last = [0.3, 0.4]  # of 4 and 5: not that sure of 4 any more, the surest is 5
    found = np.array([*of_x, *of_branch, *of_last], np.float32)
    session.accept(Predictions(np.full(9, 9), found))
    assert session.view(1, 6) == (9, 9, 9, None, 9)
    assert session.counts == {"drafted": 2, "accepted": 2}


def test_the_same_position_with_another_token_is_no_match():
    session = decode.FreeDave(3, 3, drafts=2).begin([7], model_of("llada", None).contract)
    session.step()
    session.accept(Predictions(np.array([9, 9, 9]), np.array([0.9, 0.5, 0.1], np.float32)))
    session.step()
    found = Predictions(np.array([8, 9, 9]), np.array([0.9, 0.1, 0.9], np.float32))
    session.accept(found)
    assert session.view(1, 4) == (9, 8, None)
    assert session.counts == {"drafted": 1, "accepted": 0}


BAD = [
    ({"drafts": 0}, "drafts must be a whole number of at least 1, got 0"),
    ({"drafts": 2.0}, "drafts"),
    ({"drafts": True}, "drafts"),
    ({"drafting": "trees"}, "drafting must be one of tree, batch, got 'trees'"),
    (
        {"steps": 3, "block_size": 4, "max_new_tokens": 8},
        "steps must be a multiple of the 2 blocks",
    ),
    ({"tau": -0.1}, "tau must be a finite number of at least 0, got -0.1"),
    ({"tau": 0.9, "steps": 4}, "expected one of them, got steps 4 and tau 0.9"),
    ({"eager": 1}, "eager must be true or false, got 1"),
    ({"eager": True, "cache": "dual"}, "eager needs cache none"),
    ({"temperature": 0.5}, "freedave needs temperature 0.*got 0.5"),
    ({"cache": "all"}, "cache must be one of none, prefix, dual"),
    ({"block_size": 0}, "block_size"),
    ({"early_exit": "no"}, "early_exit"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_a_bad_option_is_named_with_what_came(options, message):
    with pytest.raises(InputError, match=message):
        decode.FreeDave(**options)


def test_eager_is_refused_on_a_bidirectional_model_with_the_alternative():
    decoder = decode.FreeDave(eager=True)
    with pytest.raises(InputError, match=r"family llada is bidirectional here.*take eager=False"):
        decode.generate(model_of("llada", None), [[5]], decoder)
    decoder.check(model_of("llada", 0).contract)


def test_a_causal_model_is_refused():
    contract = replace(model_of("llada", None).contract, family="wedlm", prompt_rule="causal")
    with pytest.raises(InputError, match="freedave needs a bidirectional or block-causal model"):
        decode.FreeDave().check(contract)
