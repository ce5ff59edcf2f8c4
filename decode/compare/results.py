"""What a run of an entry gave: count and judge it, and say how fast and how right the entries
are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from d2f.tasks import before_stop
from decode.compare.config import Workload
from decode.report import paired, wilson
from decode.step import p_cache_of

Row = dict[str, Any]


@dataclass
class Answer:
    """Hold what one request of an entry gave; times in seconds from the start of its run, None
    where unknown.

    item: its place in the workload. submitted: when it was sent, after waiting for its turn.
    prefill: the end of the first forward it was in, or the first piece of a streamed answer.
    first: when the first token of the final text could be shown. finished: when all was there.
    first_tokens: tokens there at `prefill`. text: what a reader gets. own_tokens: tokens as the
    entry itself counts them, its end token with it where it made one. forwards, rows: calls of the
    model that the request was in, and rows fed for it. attempts: tries that it took. error: why
    the last of them failed. counts: what its decoder counted, by name. tokens: visible ones by the
    common tokenizer, and right: whether they solve the problem, both filled in by `judge`.
    """

    item: int
    submitted: float = 0.0
    prefill: float | None = None
    first: float | None = None
    finished: float | None = None
    first_tokens: int = 0
    text: str = ""
    own_tokens: int | None = None
    forwards: int | None = None
    rows: int | None = None
    attempts: int = 1
    error: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    right: bool | None = None


@dataclass
class Run:
    """The answers of one run of a workload by an entry.

    seconds: wall time from the first request to the last answer. calls: calls of the model, None
    where unknown; a call that serves several requests is one. peak_bytes: most memory held
    while it ran, None where it could not be read. The rest is filled in by `judge`; repetition:
    from 0, None for the pass that only judges.
    """

    answers: list[Answer]
    seconds: float
    calls: int | None = None
    peak_bytes: int | None = None
    entry: str = ""
    workload: str = ""
    concurrency: int = 1
    repetition: int | None = None

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
    def from_json(values: Row) -> Run:
        return Run(**values | {"answers": [Answer(**answer) for answer in values["answers"]]})


def judge(
    run: Run, workload: Workload, tokenizer: Any, entry: str, concurrency: int, number: int | None
) -> Run:
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
    judged = replace(run, answers=answers, entry=entry, workload=workload.name)
    return replace(judged, concurrency=concurrency, repetition=number)


def failures(runs: Sequence[Run]) -> list[Row]:
    """List the entries and workloads with failed requests, of all their runs: they are not
    ranked."""
    found = []
    for (workload, entry), own in _groups(runs, "workload", "entry").items():
        if errors := [error for run in own for error in run.errors]:
            row = {"entry": entry, "workload": workload, "failed": len(errors)}
            requests = sum(len(run.answers) for run in own)
            found.append(row | {"requests": requests, "example": errors[0]})
    return found


def _groups(runs: Iterable[Run], *keys: str) -> dict[tuple[Any, ...], list[Run]]:
    """Group by attributes, in the order of the runs."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(getattr(run, key) for key in keys), []).append(run)
    return groups


# Speed and accuracy of the entries.


def speeds_of(runs: Iterable[Run], series: dict[str, str | None] | None = None) -> list[Row]:
    """Compute the speed of each workload, concurrency and entry, in the order of the runs; times
    in seconds, None where unknown. series: of the entries that a sweep made."""
    timed = (run for run in runs if run.repetition is not None)
    groups = _groups(timed, "workload", "concurrency", "entry")
    return [
        {"entry": entry, "series": (series or {}).get(entry), "workload": workload}
        | {"concurrency": concurrency, **_speed_of(own)}
        for (workload, concurrency, entry), own in groups.items()
    ]


def _speed_of(runs: list[Run]) -> Row:
    # All repetitions together: times of requests are medians over all of them.
    answers = [a for run in runs for a in run.answers]
    good = [a for a in answers if a.error is None]

    def seconds(begin: str, end: str) -> list[float | None]:
        """Return the time between two events of each answer."""
        both = [(getattr(a, begin), getattr(a, end)) for a in good]
        return [None if b is None or e is None else e - b for b, e in both]

    # A whole run from its first request to its last answer, so waiting and failing count.
    speeds = [run.tokens / run.seconds for run in runs]
    firsts, ends = seconds("submitted", "first"), seconds("submitted", "finished")
    whole = zip(good, ends, strict=True)
    decoding = zip(good, seconds("prefill", "finished"), strict=True)
    calls = sum(run.calls or 0 for run in runs)
    # An endpoint does not tell how often its model was called: means are over answers that do.
    fed = [a for a in good if a.forwards]
    # A forward that several requests share counts once for each of them here, and once in `calls`.
    forwards = sum(a.forwards or 0 for a in fed)
    names = dict.fromkeys(name for a in good for name in a.counts)
    counts = {name: sum(a.counts.get(name, 0) for a in good) / len(good) for name in names}
    tokens = sum(a.tokens for a in good) / max(1, len(good))
    rows = [a.rows for a in fed]
    known = sum(n for n in rows if n is not None) if fed and None not in rows else None
    return {
        "repetitions": len(runs),
        "requests": len(runs[0].answers),
        # Visible tokens a second of all requests: the median, slowest and fastest repetition.
        "throughput": float(np.median(speeds)),
        "throughput_low": min(speeds),
        "throughput_high": max(speeds),
        # From here on of one request: from its submission to the first token that could be shown,
        # to its end, and to the end of its first forward.
        "request_throughput": _percentile(a.tokens / t for a, t in whole if t and a.tokens),
        "first": _percentile(firsts),
        "first_95": _percentile(firsts, 95),
        "finished": _percentile(ends),
        "finished_95": _percentile(ends, 95),
        "prefill": _percentile(seconds("submitted", "prefill")),
        # After the first forward, whose own tokens are left out as its time is.
        "decode_throughput": _percentile((a.tokens - a.first_tokens) / t for a, t in decoding if t),
        "tokens": tokens,
        "forwards": forwards / len(fed) if fed else None,
        "tokens_per_forward": sum(a.tokens for a in fed) / forwards if fed else None,
        "rows_per_forward": None if known is None else known / forwards,
        "p_cache": p_cache_of(tokens, counts),
        # A call may be shared by several requests.
        "tokens_per_call": sum(run.tokens for run in runs) / calls if calls else None,
        # None where it cannot be read: an endpoint, or a system other than Linux.
        "peak_bytes": max((run.peak_bytes or 0 for run in runs), default=0) or None,
        "failed": len(answers) - len(good),
        "retried": sum(a.attempts > 1 for a in answers),
        "counts": counts,
    }


def _percentile(values: Iterable[float | None], share: int = 50) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, share)) if known else None


def accuracies(runs: Sequence[Run], baseline: str) -> list[Row]:
    """Compute the accuracy of each entry and workload that has a judge, from its run with most
    problems: low and high of 95 % (Wilson), the difference to the baseline on the same problems, in
    points (Tango), the answers that are the baseline's word for word, and the unstable problems,
    answered differently in different runs. Decoding is greedy, so none should be; the rounding of
    forwards in another batch may decide a close choice."""
    groups = _groups(runs, "workload", "entry")
    judged = {key: max(own, key=lambda r: len(r.answers)).answers for key, own in groups.items()}
    found = []
    for (workload, entry), answers in judged.items():
        if any(a.right is None for a in answers):  # nothing judges prompts of one's own
            continue
        texts: dict[int, set[str]] = {}
        for answer in (a for run in groups[workload, entry] for a in run.answers if not a.error):
            texts.setdefault(answer.item, set()).add(answer.text)
        theirs = {a.item: a for a in judged.get((workload, baseline), [])}
        both = [(a, theirs[a.item]) for a in answers if a.item in theirs]
        # Problems that both or neither are right on say nothing about the difference.
        gained = sum(bool(a.right) and not b.right for a, b in both)
        lost = sum(bool(b.right) and not a.right for a, b in both)
        right = sum(bool(a.right) for a in answers)
        row: Row = {"entry": entry, "workload": workload, "right": right, "problems": len(answers)}
        row["low"], row["high"] = wilson(right, len(answers))
        row["difference"] = 100 * (gained - lost) / max(1, len(both))
        least, most = paired(gained, lost, len(both))
        row |= {"difference_low": 100 * least, "difference_high": 100 * most}
        row["same"] = sum(a.text == b.text for a, b in both)
        row["unstable"] = sum(len(own) > 1 for own in texts.values())
        found.append(row)
    return found
