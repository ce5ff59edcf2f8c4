"""Drafting without loss, FreeDave and D2F: what a forward takes where drafts hold, and where not
(that no token is lost: tests/test_decode_reference.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from shadows import CONTRACT, SHIFTED
from tiny import random_model

import decode
from decode.step import Predictions, Step
from triton_kernels.span_attention import span_mask

STUDENT = {"objective": "d2f", "block_size": 3}


class Scripted:
    """Predictions that do not depend on the state: every draft holds."""

    def __init__(self, length: int):
        generator = np.random.default_rng(0)
        self.confidence = generator.permutation(length).astype(np.float32) / length

    def __call__(self, session, step: Step) -> Predictions:
        positions = step.positions[step.read] + session.contract.logit_shift
        return Predictions(positions + 5, self.confidence[positions])


def play(session, answer) -> list[int]:
    """How many tokens each forward reveals."""
    taken = []
    while (step := session.step()) is not None:
        session.accept(answer(session, step))
        taken.append(len(session.revealed))
    assert session.tokens == [p + 5 for p in range(session.prompt_length, len(session.x))]
    return taken


@pytest.mark.parametrize("contract", [CONTRACT, SHIFTED])
@pytest.mark.parametrize("d", [1, 2, 4, 8])
def test_where_every_draft_holds_a_forward_reveals_d_tokens(contract, d):
    """A block costs its first forward, which has no drafts, and then a forward for d tokens; eager
    drafting pays that first forward once."""
    for over_the_border, expected in ((False, 4 * (1 + -(-5 // d))), (True, 1 + -(-23 // d))):
        decoder = decode.FreeDave(6, 24, early_exit=False, drafts=d, eager=over_the_border)
        session = decoder.begin([7, 8, 9], replace(contract, **STUDENT))
        assert len(play(session, Scripted(len(session.x)))) == expected


@pytest.mark.parametrize("contract", [CONTRACT, SHIFTED])
@pytest.mark.parametrize("pick", ["confidence", "entropy", "margin"])
def test_where_every_draft_holds_a_forward_takes_d_steps_of_the_pipeline(contract, pick):
    """Blocks of 6, one forced token a step: the first forward has no drafts. The draft that
    completes a block opens the next one in its branch, whose predictions then draft further."""

    def never_sure(session, step: Step) -> Predictions:
        """Later positions have less confidence, but also less entropy."""
        positions = step.positions[step.read] + session.contract.logit_shift
        confidence = (0.5 - positions / 1000).astype(np.float32)
        return Predictions(positions + 5, confidence, entropy=confidence, margin=1 - confidence)

    decoder = decode.D2F(6, 1.0, 1.0, max_new_tokens=12, lossless=3, forced_pick=pick)
    session = decoder.begin([7, 8], contract)
    assert play(session, never_sure) == [1, 3, 3, 3, 2]
    assert session.counts["drafted"] == session.counts["accepted"] == 7


def values(*confidence: float, token: int = 9) -> Predictions:
    return Predictions(np.full(len(confidence), token), np.array(confidence, np.float32))


def shown(session) -> tuple[int | None, ...]:
    return session.view(1, len(session.x), "decoded").tokens


def test_a_state_that_the_pipeline_does_not_reach_is_not_taken():
    """The draft reveals one token; the pipeline, surer now, reveals two."""
    session = decode.D2F(4, tau_conf=0.5, max_new_tokens=4, lossless=2).begin([7], CONTRACT)
    session.step()
    session.accept(values(0.9, 0.4, 0.3, 0.2))
    assert len(session.step().read) == 3 + 2  # the state with 3 masks, the draft with 2
    session.accept(values(0.9, 0.9, 0.2, 0.9, 0.9))
    assert shown(session) == (9, 9, 9, None)
    assert (session.counts["drafted"], session.counts["accepted"]) == (1, 0)


def test_the_chain_ends_at_the_first_draft_that_static_decoding_would_not_reveal():
    session = decode.FreeDave(4, 4, drafts=3).begin([7], CONTRACT)
    assert session.step().read.tolist() == [1, 2, 3, 4]
    session.accept(values(0.9, 0.2, 0.8, 0.4))
    assert shown(session) == (9, None, None, None)
    step = session.step()
    assert session.drafts == [[(3, 9)], [(4, 9)]]
    assert step.tokens[step.read].tolist() == [CONTRACT.mask_id] * 6  # 3, 2 and 1 masks
    session.accept(values(0.1, 0.7, 0.6, 0.8, 0.3, 0.9))
    # The state reveals 3, as drafted; the first branch then 2 and not 4: the second does not hold.
    assert shown(session) == (9, 9, 9, None)
    assert session.counts == {"drafted": 2, "accepted": 1}
    assert [r.position for r in session.revealed] == [2, 1]


def test_a_draft_of_several_tokens_holds_only_whole():
    """Two steps a block of 4: x reveals one of the two that were drafted, and another."""
    session = decode.FreeDave(6, 6, steps=3, drafts=2).begin([7], CONTRACT)
    session.step()
    session.accept(values(0.9, 0.8, 0.7, 0.6, 0.2, 0.1))
    session.step()
    assert session.drafts == [[(3, 9), (4, 9)]]
    session.accept(values(0.9, 0.1, 0.8, 0.2, 0.9, 0.9))  # of x, then of the branch
    assert shown(session) == (9, 9, 9, None, 9, None)
    assert session.counts == {"drafted": 1, "accepted": 0}


def test_freedave_plus_takes_the_longest_branch_of_what_the_rule_reveals_and_decides_anew():
    session = decode.FreeDave(5, 5, drafts=3, tau=0.5).begin([7], CONTRACT)
    session.step()
    session.accept(values(0.9, 0.4, 0.3, 0.2, 0.1))
    assert len(session.step().read) == 4 + 3 + 2
    assert session.drafts == [[(2, 9)], [(3, 9)]]
    of_x = [0.6, 0.7, 0.8, 0.1]  # reveals 2, 3 and 4: both branches are among them
    of_branch = [0.1, 0.1, 0.9]  # would not reveal 3: not asked, the other branch is longer
    of_last = [0.3, 0.4]  # of 4 and 5: not that sure of 4 any more, the surest is 5
    session.accept(values(*of_x, *of_branch, *of_last))
    assert shown(session) == (9, 9, 9, None, 9)
    assert session.counts == {"drafted": 2, "accepted": 2}


def test_the_same_position_with_another_token_is_no_match():
    session = decode.FreeDave(3, 3, drafts=2).begin([7], CONTRACT)
    session.step()
    session.accept(values(0.9, 0.5, 0.1))
    session.step()
    session.accept(Predictions(np.array([8, 9, 9]), np.array([0.9, 0.1, 0.9], np.float32)))
    assert shown(session) == (9, 8, None)
    assert session.counts == {"drafted": 1, "accepted": 0}


def test_a_row_of_a_step_sees_the_prefix_and_its_own_branch():
    """On a bidirectional model with the prefix cached, one block: a prefix and d branches."""
    session = decode.FreeDave(6, 6, "prefix", drafts=4).begin([7, 8, 9], CONTRACT)
    session.accept(Scripted(len(session.x))(session, session.step()))
    mask = span_mask(torch.from_numpy(session.step().spans), session.slots)
    branch = torch.arange(4).repeat_interleave(6)
    own = torch.cat((torch.full((3,), -1), branch[:6], torch.tensor([9]), branch[6:]))
    # by slot: prefix, state x, the spare slot (seen by none), the three branches
    assert torch.equal(mask, (own == -1) | (own == branch[:, None]))


@pytest.mark.parametrize(
    ("family", "mask", "over_the_border", "shares"),
    [
        ("llada", STUDENT, True, True),  # rows of a complete block, on their way into the cache
        ("dream", STUDENT, False, True),  # the row before the block
        ("llada", STUDENT, False, False),
        ("llada", {}, False, False),
        ("dream", {}, False, False),
    ],
)
def test_a_tree_feeds_fewer_rows_only_where_branches_share_some(
    family, mask, over_the_border, shares
):
    from shadows import model_with

    model, rows = model_with(random_model(family), **mask), []
    for drafting in ("tree", "batch"):
        options = {"drafting": drafting, "eager": over_the_border, "early_exit": False}
        decoder = decode.FreeDave(3, 12, **options)
        result = decode.generate(model, [list(range(5, 17))], decoder)[0]
        rows.append(sum(fed for fed, _ in result.calls))
    assert (rows[0] < rows[1]) if shares else (rows[0] == rows[1])
