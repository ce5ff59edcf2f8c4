"""What responses come to: the estimator of pass@k beside its definition, and majorities."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f.tasks import find_task
from decode.evaluate import line, majority, pass_at_k, score
from decode.jobs import Record
from decode.report import wilson

STORY = find_task("story")


def record(name: str, text: str, right: bool, **more: object) -> Record:
    values = {
        "id": name, "task": "story", "question": "?", "text": text, "right": right,
        "finish_reason": "end", "prompt_tokens": 3, "max_new_tokens": 8, "forwards": 2, "rows": 7,
        "counts": {"revoked": 1}, "seconds": 0.5, "tokens": [1, 2, 3], "raw_tokens": [1, 2, 3, 0],
    } | more  # fmt: skip
    return Record(**values)


@given(verdicts=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(verdicts, data):
    k = data.draw(st.integers(1, len(verdicts)))
    subsets = list(combinations(verdicts, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(verdicts), sum(verdicts), k) == pytest.approx(share)


def test_a_response_a_problem_is_counted_as_a_share():
    records = [record(str(i), "#### 7", i < 3) for i in range(4)]
    found = score(STORY, records)
    low, high = wilson(3, 4)
    assert (found["right"], found["problems"], found["accuracy"]) == (3, 4, 0.75)
    assert (found["accuracy_low"], found["accuracy_high"]) == (low, high)
    assert (found["visible_tokens"], found["forwards"]) == (12, 8)
    assert (found["tokens_per_forward"], found["rows_per_forward"]) == (1.5, 3.5)
    assert found["counts"] == {"revoked": 4} and "majority" not in found


def test_samples_of_one_problem_are_one_problem_in_the_interval():
    """Four samples of one problem say no more of other problems than one does."""
    records = [record(str(i), "#### 7", True) for i in range(8)]
    found = score(STORY, records, samples=4, pass_at=[1, 4])
    assert (found["accuracy_low"], found["accuracy_high"]) == wilson(2, 2)
    assert found["pass_at"]["4"] == {k: found[k] for k in found["pass_at"]["4"]}
    said = line(found | {"seconds": None})
    assert "8 of 8 right" in said and "pass@4 100.0%" in said and "majority of 4" in said


@pytest.mark.parametrize(
    ("texts", "right"),
    [
        (["#### 7", "#### 8", "so\n#### 7"], True),
        (["#### 8", "#### 8", "#### 7"], False),
        (["#### 7", "#### 8"], True),  # equally many: the first
        (["#### 8", "#### 7"], False),
        (["nothing", "none", "#### 7"], True),  # who says nothing has no vote
        (["nothing", "none"], None),
    ],
)
def test_the_majority_is_of_answers_and_not_of_texts(texts, right):
    group = [record(str(i), text, text.endswith("#### 7")) for i, text in enumerate(texts)]
    assert majority(STORY, group) is right


def test_a_task_whose_answers_cannot_be_counted_has_no_majority():
    records = [record(str(i), "1+1=2", True) for i in range(4)]
    assert "majority" not in score(find_task("countdown"), records, samples=2)
