"""From answers to the table: each figure against a plain computation of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.compare.config import Item, Workload
from decode.compare.report import Report
from decode.compare.results import Answer, Run, accuracies, judge, speeds_of
from decode.report import paired


def judged(item=0, *, tokens=10, submitted=0.0, finished=2.0, right=True, text="x", **more):
    values = {
        "prefill": 0.5, "first": 0.5, "first_tokens": 1, "own_tokens": tokens + 1,
        "forwards": 5, "rows": 50, "attempts": 1, "error": None,
    } | more  # fmt: skip
    return Answer(
        item=item, tokens=tokens, submitted=submitted, finished=finished, right=right, text=text,
        **values,
    )  # fmt: skip


def record(entry="a", answers=(), *, repetition=0, seconds=4.0, concurrency=1, calls=None):
    return Run(list(answers), seconds, calls, None, entry, "story", concurrency, repetition)


def test_a_speed_is_what_it_says():
    fast = record(answers=[judged(tokens=12), judged(1, finished=4.0)], seconds=2.0, calls=4)
    slow = record(
        answers=[judged(), judged(1, error="HTTP 500", tokens=0, finished=None, attempts=3)],
        repetition=1, seconds=5.0, calls=6,
    )  # fmt: skip
    (speed,) = speeds_of([fast, slow])
    assert speed == speed | {
        "throughput_low": 2.0, "throughput": 6.5, "throughput_high": 11.0,
        "finished": 2.0, "finished_95": pytest.approx(np.percentile([2.0, 4.0, 2.0], 95)),
        "first": 0.5,
        "request_throughput": 5.0,  # of 6, 2.5 and 5
        "decode_throughput": 6.0,  # of 11/1.5, 9/3.5 and 9/1.5
        "tokens_per_forward": pytest.approx(32 / 15), "rows_per_forward": 10,
        "tokens_per_call": 3.2, "p_cache": None,
        "failed": 1, "retried": 1, "requests": 2, "repetitions": 2,
    }  # fmt: skip
    windows = record(
        answers=[judged(counts={"window_rows": 8}), judged(1, counts={"window_rows": 32})]
    )
    assert speeds_of([windows])[0]["p_cache"] == 20 / 40  # of all requests together


def test_the_judging_pass_is_not_timed():
    timed = record(answers=[judged()])
    wide = record(answers=[judged(), judged(1, right=False)], repetition=None, seconds=0.1)
    (speed,) = speeds_of([timed, wide])
    assert speed["throughput"] == 2.5 and speed["repetitions"] == 1
    other = record(answers=[judged(text="y")], repetition=1)
    (found,) = accuracies([timed, wide, other], "a")
    assert (found["right"], found["problems"], found["unstable"]) == (1, 2, 1)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_the_difference_to_the_baseline_is_paired(pairs):
    mine = record("a", [judged(i, right=r) for i, (r, _) in enumerate(pairs)])
    base = record("b", [judged(i, right=r) for i, (_, r) in enumerate(pairs)])
    found = {a["entry"]: a for a in accuracies([mine, base], "b")}
    a, b = found["a"], found["b"]
    steps = 100 * np.array([one - other for one, other in np.array(pairs, dtype=float)])
    assert a["difference"] == pytest.approx(steps.mean())
    low, high = paired(int((steps > 0).sum()), int((steps < 0).sum()), len(pairs))
    assert (a["difference_low"], a["difference_high"]) == (100 * low, 100 * high)
    assert low < high and (b["difference"], b["same"]) == (0.0, len(pairs))


def test_it_is_said_where_the_baseline_is_faster():
    """Also where it wins everywhere, or nowhere."""
    speeds = {1: (5, 1, 9), 2: (5, 4, 9), 4: (5, 6, 9), 8: (5, 9, 9)}
    records = [
        record(entry, [judged(tokens=tokens)], seconds=1.0, concurrency=concurrency)
        for concurrency, three in speeds.items()
        for entry, tokens in zip("abc", three, strict=True)
    ]
    config = {"entries": [{"name": name} for name in "abc"]}
    report = Report.of({"baseline": "a", "config": config}, records)
    said = "\n".join(report.verdict("story"))
    assert "a is faster than b at concurrency 1, 2.\n" in said
    assert "a is nowhere faster than c." in said
    assert "At concurrency 1 **c** is fastest: 9 visible tokens/s, 1.80 times a." in said
    other = Report.of({"baseline": "b", "config": config}, records).verdict("story")
    assert "- b is faster than a at concurrency 4, 8." in other


class Words:
    """A tokenizer of words."""

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [text.split() for text in texts]}


def test_what_is_hidden_or_failed_is_never_counted():
    work = Workload("prompts", [Item(str(i), [1]) for i in range(3)], 3, 1, 9, ("STOP",))
    run = Run(
        [
            Answer(0, text="one two STOP three", finished=1.0, first_tokens=1, own_tokens=4),
            Answer(1, text="one two", error="HTTP 500"),
            Answer(2, text="", finished=1.0, first_tokens=1),
        ],
        2.0,
    )
    kept = judge(run, work, Words(), "e", 1, 0)
    assert [a.tokens for a in kept.answers] == [2, 0, 0]
    assert [a.first_tokens for a in kept.answers] == [1, 0, 0]
    assert [a.text for a in kept.answers] == ["one two ", "", ""]
    assert all(a.right is None for a in kept.answers)
    assert kept.tokens == 2
    long = judge(
        Run([Answer(0, text="w " * 20, finished=1.0)], 1.0), work, Words(), "e", 1, 0,
    )  # fmt: skip
    assert long.tokens == 9, "no more than were asked for"
