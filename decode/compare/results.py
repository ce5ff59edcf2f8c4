"""Count and judge the runs, and say how fast and how right the entries are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from d2f.tasks import before_stop
from decode.compare.client import Answer, Run
from decode.compare.config import Workload
from decode.report import paired, wilson
from decode.step import p_cache_of

Row = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """Hold a counted and judged run of an entry. repetition: from 0; None for the pass that only
    judges."""

    entry: str
    workload: str
    concurrency: int
    repetition: int | None
    seconds: float
    calls: int | None
    peak_bytes: int | None
    answers: list[Answer]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error is not None]

    def to_json(self) -> Row:
        """Return plain values, times to the microsecond."""
        values = asdict(self)
        for one in (values, *values["answers"]):
            one |= {k: round(v, 6) for k, v in one.items() if isinstance(v, float)}
        return values

    @staticmethod
    def from_json(values: Row) -> Record:
        return Record(**values | {"answers": [Answer(**answer) for answer in values["answers"]]})


def judge(
    run: Run,
    workload: Workload,
    tokenizer: Any,
    entry: str,
    concurrency: int,
    repetition: int | None,
) -> Record:
    """Count and judge the answers of a run; a failed request has no tokens and is wrong, and none
    has more tokens than were asked for."""
    texts = ["" if a.error else before_stop(a.text, workload.stop) for a in run.answers]
    counts = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    answers = []
    for answer, text, count in zip(run.answers, texts, counts, strict=True):
        tokens = min(count, workload.max_new_tokens)  # by another tokenizer than its own
        right = workload.items[answer.item].right(text)
        right = False if answer.error and right is not None else right
        first = min(answer.first_tokens, tokens)
        answers.append(replace(answer, text=text, tokens=tokens, first_tokens=first, right=right))
    level = entry, workload.name, concurrency, repetition
    return Record(*level, run.seconds, run.calls, run.peak_bytes, answers)


def failures(records: Sequence[Record]) -> list[Row]:
    """List the entries and workloads with failed requests, of all their runs: they are not
    ranked."""
    found = []
    for (workload, entry), runs in _groups(records, "workload", "entry").items():
        errors = [error for run in runs for error in run.errors]
        if errors:
            requests = sum(len(run.answers) for run in runs)
            row = {"entry": entry, "workload": workload, "failed": len(errors)}
            found.append(row | {"requests": requests, "example": errors[0]})
    return found


def _groups(records: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    """Group by attributes, in the order of the records."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(getattr(record, key) for key in keys), []).append(record)
    return groups


# Speed and accuracy of the entries.


def speeds_of(records: Iterable[Record], series: dict[str, str | None] | None = None) -> list[Row]:
    """Compute the speed of each workload, concurrency and entry, in the order of the records; times
    in seconds, None where unknown. series: of the entries that a sweep made."""
    timed = (record for record in records if record.repetition is not None)
    groups = _groups(timed, "workload", "concurrency", "entry")
    return [
        {"entry": entry, "series": (series or {}).get(entry), "workload": workload}
        | {"concurrency": concurrency, **_speed_of(runs)}
        for (workload, concurrency, entry), runs in groups.items()
    ]


def _speed_of(runs: list[Record]) -> Row:
    # All repetitions together: times of requests are medians over all of them.
    answers = [a for run in runs for a in run.answers]
    good = [a for a in answers if a.error is None]
    # A whole run from its first request to its last answer, so waiting and failing count.
    speeds = [run.tokens / run.seconds for run in runs]
    firsts = [_after(a.submitted, a.first) for a in good]
    ends = [_after(a.submitted, a.finished) for a in good]
    prefills = [_after(a.submitted, a.prefill) for a in good]
    decoding = [_after(a.prefill, a.finished) for a in good]
    calls = sum(run.calls or 0 for run in runs)
    # An endpoint does not tell how often its model was called: means are over answers that do.
    fed = [a for a in good if a.forwards]
    # A forward that several requests share counts once for each of them here, and once in `calls`.
    forwards = sum(a.forwards or 0 for a in fed)
    names = dict.fromkeys(name for a in good for name in a.counts)
    counts = {name: sum(a.counts.get(name, 0) for a in good) / len(good) for name in names}
    tokens = sum(a.tokens for a in good) / max(1, len(good))
    return {
        "repetitions": len(runs),
        "requests": len(runs[0].answers),
        # Visible tokens a second of all requests: the median, slowest and fastest repetition.
        "throughput": float(np.median(speeds)),
        "throughput_low": min(speeds),
        "throughput_high": max(speeds),
        # From here on of one request: from its submission to the first token that could be shown,
        # to its end, and to the end of its first forward.
        "request_throughput": _percentile(
            [a.tokens / t for a, t in zip(good, ends, strict=True) if t and a.tokens]
        ),
        "first": _percentile(firsts),
        "first_95": _percentile(firsts, 95),
        "finished": _percentile(ends),
        "finished_95": _percentile(ends, 95),
        "prefill": _percentile(prefills),
        # After the first forward, whose own tokens are left out as its time is.
        "decode_throughput": _percentile(
            [(a.tokens - a.first_tokens) / t for a, t in zip(good, decoding, strict=True) if t]
        ),
        "tokens": tokens,
        "forwards": forwards / len(fed) if fed else None,
        "tokens_per_forward": sum(a.tokens for a in fed) / forwards if fed else None,
        "rows_per_forward": sum(a.rows or 0 for a in fed) / forwards if fed else None,
        "p_cache": p_cache_of(tokens, counts),
        # A call may be shared by several requests.
        "tokens_per_call": sum(run.tokens for run in runs) / calls if calls else None,
        # None where it cannot be read: an endpoint, or a system other than Linux.
        "peak_bytes": max((run.peak_bytes or 0 for run in runs), default=0) or None,
        "failed": len(answers) - len(good),
        "retried": sum(a.attempts > 1 for a in answers),
        "counts": counts,
    }


def _after(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def _percentile(values: Sequence[float | None], share: int = 50) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, share)) if known else None


def accuracies(records: Sequence[Record], baseline: str) -> list[Row]:
    """Compute the accuracy of each entry and workload that has a judge, from its run with most
    problems: low and high of 95 % (Wilson), the difference to the baseline on the same problems, in
    points (Tango), the answers that are the baseline's word for word, and the unstable problems,
    answered differently in different runs. Decoding is greedy, so none should be; the rounding of
    forwards in another batch may decide a close choice."""
    runs = _groups(records, "workload", "entry")
    judged = {key: max(own, key=lambda r: len(r.answers)).answers for key, own in runs.items()}
    found = []
    for (workload, entry), answers in judged.items():
        if any(a.right is None for a in answers):  # nothing judges prompts of one's own
            continue
        texts: dict[int, set[str]] = {}
        for answer in (a for run in runs[workload, entry] for a in run.answers if not a.error):
            texts.setdefault(answer.item, set()).add(answer.text)
        theirs = {a.item: a for a in judged.get((workload, baseline), [])}
        both = [(a, theirs[a.item]) for a in answers if a.item in theirs]
        # Problems that both or neither are right on say nothing about the difference.
        gained = sum(bool(a.right) and not b.right for a, b in both)
        lost = sum(bool(b.right) and not a.right for a, b in both)
        right = sum(bool(a.right) for a in answers)
        low, high = wilson(right, len(answers))
        least, most = paired(gained, lost, len(both))
        found.append(
            {
                "entry": entry,
                "workload": workload,
                "right": right,
                "problems": len(answers),
                "low": low,
                "high": high,
                "difference": 100 * (gained - lost) / max(1, len(both)),
                "difference_low": 100 * least,
                "difference_high": 100 * most,
                "same": sum(a.text == b.text for a, b in both),
                "unstable": sum(len(own) > 1 for own in texts.values()),
            }
        )
    return found
