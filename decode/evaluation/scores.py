"""What the responses to a task's problems come to: accuracy, pass@k, majority vote, counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import Any

from d2f.tasks import Task
from decode.engine.result import p_cache_of
from decode.reporting.intervals import wilson
from decode.reporting.record import Record


def score(
    task: Task,
    records: Sequence[Record],
    *,
    samples: int = 1,
    pass_at: Sequence[int] = (),
) -> dict[str, Any]:
    """Sums and shares of a task's responses, `samples` for each problem, problem after problem.

    accuracy is the share of right responses; its interval is over problems, as the samples of one
    are alike. forwards adds the calls that each request was in, so tokens_per_forward is that of a
    request alone. p_cache is there where the decoder counts what it is made of.
    """
    groups = [records[i : i + samples] for i in range(0, len(records), samples)]
    right = [sum(bool(record.right) for record in group) for group in groups]
    forwards = sum(record.forwards for record in records)
    tokens = sum(len(record.tokens) for record in records)
    counts = dict(sum((Counter(record.counts) for record in records), Counter()))
    found = {
        "task": task.name,
        "problems": len(groups),
        "samples": samples,
        "right": sum(right),
        # Which ones, to compare with what another model or decoder has on the same problems.
        **({"right_by_problem": "".join(map(str, right))} if samples == 1 else {}),
        **_share([count / samples for count in right]),
        "visible_tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / forwards,
        "rows_per_forward": sum(record.rows for record in records) / forwards,
        "unfinished": sum(record.finish_reason == "length" for record in records),
        "counts": counts,
    }
    if (p_cache := p_cache_of(tokens, counts)) is not None:
        found["p_cache"] = p_cache
    if pass_at:
        found["pass_at"] = {
            str(k): _share([pass_at_k(samples, count, k) for count in right]) for k in pass_at
        }
    votes = [majority(task, group) for group in groups] if samples > 1 else []
    if any(vote is not None for vote in votes):
        found["majority"] = _share([float(vote is True) for vote in votes])
    return found


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one of k samples is right, of which `right` of `samples` are: the unbiased
    estimator 1 - C(n-c, k) / C(n, k) of Chen et al., 2021 (HumanEval), equation 1."""
    return 1 - comb(samples - right, k) / comb(samples, k)


def majority(task: Task, group: Sequence[Record]) -> bool | None:
    """Whether the answer that most samples of a problem give is right, of equally many the one that
    comes first; None where no sample has an answer that can be counted."""
    answers = [task.answer(record.text or "") for record in group]
    counted = Counter(answer for answer in answers if answer is not None)
    if not counted:
        return None
    chosen, _ = counted.most_common(1)[0]
    return bool(group[answers.index(chosen)].right)


def _share(values: Sequence[float]) -> dict[str, float]:
    """The mean of a value a problem, each in [0, 1], with its 95 % interval over problems: that of
    a share, which is wider than needed where values lie between 0 and 1."""
    low, high = wilson(sum(values), len(values))
    return {
        "accuracy": sum(values) / len(values),
        "accuracy_low": low,
        "accuracy_high": high,
    }


def line(on: dict[str, Any]) -> str:
    """What was measured, for reading."""
    responses = on["problems"] * on["samples"]
    seconds = "" if on["seconds"] is None else f"  {on['seconds']:6.1f} s"
    parts = [
        f"{on['task']:<10} {on['right']:>4} of {responses} right "
        f"({on['accuracy']:6.1%}, 95 % {_interval(on)})  "
        f"{on['tokens_per_forward']:5.2f} visible tokens a forward  "
        f"{on['forwards'] / responses:6.1f} forwards a problem{seconds}"
        + (f"  p_cache {on['p_cache']:.2f}" if "p_cache" in on else "")
    ]
    for k, share in on.get("pass_at", {}).items():
        parts.append(f"{'':<10} pass@{k} {share['accuracy']:.1%} (95 % {_interval(share)})")
    if "majority" in on:
        share = on["majority"]
        parts.append(
            f"{'':<10} majority of {on['samples']} {share['accuracy']:.1%} "
            f"(95 % {_interval(share)})"
        )
    return "\n".join(parts)


def _interval(share: dict[str, Any]) -> str:
    return f"{share['accuracy_low']:.1%} to {share['accuracy_high']:.1%}"
