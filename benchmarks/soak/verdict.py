"""What a soak found: requests lost, answers wrong, slots leaked, memory that grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.soak.client import Outcome
from benchmarks.soak.plan import Planned
from benchmarks.soak.questions import Question
from decode.step import Result

SHOWN = 20  # of the lost and the wrong, in the report
REASONS = {"end": "stop", "stop": "stop", "length": "length"}
WARM_UP = 0.3  # share of the requests
LEAST = 1000  # requests after the warm-up, of which fewer say nothing of memory
RISE = 0.03
RULE = (
    f"level: a least-squares line through the resident bytes over the requests ended, without the "
    f"first {WARM_UP:.0%}, rises by less than {RISE:.0%} of their median in 10,000 requests"
)


def verdict(
    planned: Sequence[Planned],
    outcomes: Sequence[Outcome],
    questions: Sequence[Question],
    expected: Sequence[list[Result]],
) -> dict[str, Any]:
    """Counts of how the requests ended, and which were lost or wrong."""
    found = {outcome.number: outcome for outcome in outcomes}
    nothing = "no outcome was noted"
    ended = [found.get(one.number, Outcome(one.number, why=nothing)) for one in planned]
    lost = [
        f"request {one.number} ({one.path}): {outcome.why}"
        for one, outcome in zip(planned, ended, strict=True)
        if outcome.end == "lost"
    ]
    wrong = []
    for one, outcome in zip(planned, ended, strict=True):
        if one.question is not None and outcome.end in ("answered", "left"):
            why = difference(outcome, questions[one.question], expected[one.question])
            if why is not None:
                wrong.append(f"request {one.number}: {why}; {questions[one.question].body}")
    return {
        "ends": dict(sorted(Counter(outcome.end for outcome in ended).items())),
        "refused_for_a_full_queue": sum(outcome.tries - 1 for outcome in ended if outcome.tries),
        "choices": sum(len(o.texts) for o in ended if o.end == "answered"),
        "lost": {"count": len(lost), "first": lost[:SHOWN]},
        "wrong": {"count": len(wrong), "first": wrong[:SHOWN]},
    }


def difference(outcome: Outcome, question: Question, expected: Sequence[Result]) -> str | None:
    """How an answer, or the beginning of one that the client left, differs from the request alone;
    None where it does not."""
    for index, text in outcome.texts.items():
        if index >= len(expected):
            return f"choice {index}, of {len(expected)}"
        whole = expected[index].text or ""
        if not whole.startswith(text):
            return f"choice {index} has {text!r}, alone {whole!r}"
    if outcome.end == "left":
        return None
    for index, alone in enumerate(expected):
        text, reason = outcome.texts.get(index), outcome.reasons.get(index)
        if text != alone.text:
            return f"choice {index} has {text!r}, alone {alone.text!r}"
        if reason != REASONS[alone.finish_reason]:
            return f"choice {index} ended by {reason}, alone by {alone.finish_reason}"
    usage = outcome.usage
    if usage is not None:
        said = {name: (usage | usage["d2f"])[name] for name in _counted(question, expected)}
        if said != _counted(question, expected):
            return f"usage says {said}, alone it is {_counted(question, expected)}"
    return None


def _counted(question: Question, expected: Sequence[Result]) -> dict[str, int]:
    """What the usage of an answer must say."""
    first = expected[:: len(expected) // len(question.prompts)]  # of each prompt
    return {
        "prompt_tokens": sum(alone.prompt_tokens for alone in first),
        "completion_tokens": sum(len(alone.tokens) for alone in expected),
        "forwards": sum(alone.forwards for alone in expected),
    }


def growth(samples: Sequence[tuple[int, int]], requests: int) -> dict[str, Any]:
    """What the samples (requests ended, resident bytes) say of memory; level is None where they
    are too few."""
    kept = [(ended, size) for ended, size in samples if ended >= WARM_UP * requests]
    if len(kept) < 3 or kept[-1][0] - kept[0][0] < LEAST:
        return {"rule": RULE, "level": None}
    ended, sizes = np.array(kept, dtype=float).T
    slope = float(np.polyfit(ended, sizes, 1)[0])
    median = float(np.median(sizes))
    return {
        "rule": RULE,
        "level": slope * 10_000 < RISE * median,
        "bytes_a_request": round(slope, 1),
        "rise_in_10000_requests_mib": round(slope * 10_000 / 2**20, 2),
        "median_mib": round(median / 2**20, 1),
        "after_warm_up_mib": round(kept[0][1] / 2**20, 1),
        "at_the_end_mib": round(kept[-1][1] / 2**20, 1),
    }
