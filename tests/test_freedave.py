"""Drafting without loss, FreeDave and D2F: what a forward takes where drafts hold, and where not
(that no token is lost: tests/test_decode_reference.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shadows import CONTRACT, SHIFTED
from tiny import random_model

import decode
from decode.step import Predictions, Step

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
