"""What a width of lossless sessions is expected to bring: seen, guessed where it was not, and tried
now and then."""

from __future__ import annotations

import numpy as np
import pytest
from every_decoder import exact_model

import decode
from decode.decoders.wedlm import WIDTHS
from decode.engine.learned import OFTEN, RECENT, TRIED, Yields


def test_widths_that_were_seen_are_believed_and_others_are_tried():
    yields = Yields(WIDTHS)
    for _ in range(2000):
        yields.note(1, 1, 1, 1, 1)
        yields.note(16, 2, 8, 32, 30)
    tokens, (rows, reads) = yields.expected()
    assert tokens[0] == pytest.approx(1.0)
    at = WIDTHS.index(16)
    assert tokens[at] == pytest.approx(4.0, rel=0.05) and rows[at] == pytest.approx(16, rel=0.01)
    assert reads[at] == pytest.approx(15, rel=0.01)
    assert (np.diff(tokens[: at - 1]) > 0).all()  # between the two, never seen: on a rising curve
    assert tokens[WIDTHS.index(4)] > 1 and rows[WIDTHS.index(4)] == pytest.approx(4.0)


def test_rows_of_a_width_never_seen_lie_between_those_beside_it():
    yields = Yields(WIDTHS)
    yields.note(2, 1000, 1500, 4000, 2000)  # two rows for each of a width, one of them read
    yields.note(8, 1000, 3000, 16000, 8000)
    yields.note(32, 1000, 4000, 32000, 32000)  # and here one
    _, rows = yields.expected()
    fed, read = (dict(zip(WIDTHS, of, strict=True)) for of in rows)
    assert fed[4] == pytest.approx(8.0, rel=0.01) and fed[16] == pytest.approx(24.0, rel=0.02)
    assert read[4] == pytest.approx(4.0, rel=0.01) and read[16] == pytest.approx(16.0, rel=0.02)


def test_rows_without_speculation_are_known_where_the_session_says_them():
    """Else no speculation, never tried, looks as if it fed what a draft costs."""
    yields = Yields(WIDTHS, alone=1)
    yields.note(2, 1000, 1500, 4000, 4000)
    yields.note(8, 1000, 3000, 16000, 16000)
    _, (rows, reads) = yields.expected()
    assert rows[0] == reads[0] == 1.0 and rows[WIDTHS.index(4)] == pytest.approx(8.0, rel=0.01)
    yields.note(1, 1000, 1000, 3000, 1000)  # what was seen counts all the same
    assert yields.expected()[1][0, 0] == pytest.approx(3.0, rel=0.05)
    session = decode.WeDLM("auto", verify="ar").begin([5], exact_model("wedlm").contract)
    assert session.rows_alone == 1


def test_the_forward_with_the_prompt_is_one_of_a_response():
    """Responses of 20 tokens, the first of them with a prompt of 30 rows. At a width of 8, which
    feeds 8 rows beside the prompt and then decides 4 tokens a forward, 19 / 4 forwards follow."""
    yields, at = Yields(WIDTHS), WIDTHS.index(8)
    for _ in range(2000):
        yields.note(1, 1, 1, 1, 1)
        yields.note(8, 1, 4, 10, 8)
    for _ in range(9):
        yields.begin(1, 30, 0, 1, 1)
        yields.begin(8, 30, 8, 9, 1)
        yields.end(20)
    tokens, (rows, reads) = yields.expected()
    assert (tokens[0], rows[0], reads[0]) == pytest.approx((1, (30 + 19) / 20, 1), rel=0.01)
    forwards = 1 + 19 / 4
    assert tokens[at] == pytest.approx(20 / forwards, rel=0.01)
    assert rows[at] == pytest.approx((30 + 8 + 19 / 4 * 10) / forwards, rel=0.01)
    assert reads[at] == pytest.approx((9 + 19 / 4 * 8) / forwards, rel=0.01)
    assert (np.diff(tokens) > 0).all() and (np.diff(rows) > 0).all()  # not seen: between, beyond


def test_a_width_is_tried_again_the_later_the_better_it_is_known():
    yields, best = Yields(WIDTHS), WIDTHS.index(8)
    tried = [yields.trial(best) for _ in range(2 * OFTEN)]
    assert [i for i, at in enumerate(tried) if at is not None] == [OFTEN - 1, 2 * OFTEN - 1]
    assert {at for at in tried if at is not None} == {best - 1}
    yields.note(WIDTHS[best - 1], 5 * TRIED, 1, 1, 1)
    yields.note(WIDTHS[best], 3 * TRIED, 1, 1, 1)
    assert {at for at in (yields.trial(best) for _ in range(OFTEN)) if at} == {best + 1}
    yields.note(WIDTHS[best + 1], 4 * TRIED, 1, 1, 1)
    tried = [yields.trial(best) for _ in range(12)]
    assert [at for at in tried if at is not None] == [best] * 4  # held at the best, least seen now
    for at in (best - 1, best, best + 1):
        yields.note(WIDTHS[at], RECENT, 1, 1, 1)
    assert sum(yields.trial(best) is not None for _ in range(RECENT // TRIED)) == 1
