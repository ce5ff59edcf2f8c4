"""What was measured: runs counted and judged, and how fast and how right the entries are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from d2f.tasks import before_stop
from decode.compare.client import Answer, Run
from decode.compare.config import Workload
from decode.report import paired, wilson
from decode.step import p_cache_of


@dataclass(frozen=True)
class Record:
    """One run of one entry, counted and judged. repetition: from 0; None for the pass that only
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

    def to_json(self) -> dict[str, Any]:
        """Return plain values, times to the microsecond."""
        answers = [{k: _short(v) for k, v in vars(answer).items()} for answer in self.answers]
        return {**vars(self), "seconds": _short(self.seconds), "answers": answers}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Record:
        return Record(**values | {"answers": [Answer(**answer) for answer in values["answers"]]})


def _short(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def judge(
    run: Run, workload: Workload, tokenizer: Any, *, entry: str, concurrency: int,
    repetition: int | None,
) -> Record:  # fmt: skip
    """Count and judge the answers of a run; a failed request has no tokens and is wrong, and none
    has more tokens than were asked for."""
    texts = ["" if a.error else before_stop(a.text, workload.stop) for a in run.answers]
    counts = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    answers = []
    for answer, text, count in zip(run.answers, texts, counts, strict=True):
        tokens = min(count, workload.max_new_tokens)  # by another tokenizer than its own
        right = workload.items[answer.item].right(text)
        answers.append(
            replace(
                answer,
                text=text,
                tokens=tokens,
                first_tokens=min(answer.first_tokens, tokens),
                right=False if answer.error and right is not None else right,
            )
        )
    return Record(
        entry, workload.name, concurrency, repetition, run.seconds, run.calls, run.peak_bytes,
        answers,
    )  # fmt: skip


# How fast and how right the entries are.


@dataclass(frozen=True)
class Speed:
    """One entry at one concurrency of one workload; times in seconds, None where unknown.

    throughput: visible tokens a second of the whole run, the median repetition; throughput_low and
    throughput_high: the slowest and fastest. request_throughput: of one request, the median.
    first, finished: from submission to the first token that could be shown and to the end;
    prefill: to the end of the first forward; decode_throughput: visible tokens a second after
    that, of one request. tokens, forwards: mean a request; tokens_per_call: visible tokens a call
    of the model, whichever requests share it. peak_bytes: most over the runs. failed, retried: of
    the timed requests. p_cache: `decode.step.p_cache_of`. series: the sweep that the entry is of.
    counts: what its decoder counted, a request.
    """

    entry: str
    series: str | None
    workload: str
    concurrency: int
    repetitions: int
    requests: int
    throughput: float
    throughput_low: float
    throughput_high: float
    request_throughput: float | None
    first: float | None
    first_95: float | None
    finished: float | None
    finished_95: float | None
    prefill: float | None
    decode_throughput: float | None
    tokens: float
    forwards: float | None
    tokens_per_forward: float | None
    rows_per_forward: float | None
    p_cache: float | None
    tokens_per_call: float | None
    peak_bytes: int | None
    failed: int
    retried: int
    counts: dict[str, float]


@dataclass(frozen=True)
class Accuracy:
    """How right an entry is on a workload; low, high: 95 % (Wilson). difference, its low and high:
    against the baseline on the same problems, in points (Tango). same: answers that are the
    baseline's, word for word. unstable: problems answered differently in different runs. Decoding
    is greedy, so none should be; the rounding of forwards in another batch may decide a close
    choice."""

    entry: str
    workload: str
    right: int
    problems: int
    low: float
    high: float
    difference: float
    difference_low: float
    difference_high: float
    same: int
    unstable: int


@dataclass(frozen=True)
class Failures:
    """An entry with failed requests in a workload, of all its runs there: it is not ranked."""

    entry: str
    workload: str
    failed: int
    requests: int
    example: str


def failures(records: Sequence[Record]) -> list[Failures]:
    """List the entries and workloads with failed requests, in the order of the records."""
    found = []
    for workload, entry in dict.fromkeys((r.workload, r.entry) for r in records):
        answers = [a for r in _of(records, workload, entry) for a in r.answers]
        errors = [a.error for a in answers if a.error is not None]
        if errors:
            found.append(Failures(entry, workload, len(errors), len(answers), errors[0]))
    return found


def _of(records: Sequence[Record], workload: str, entry: str) -> list[Record]:
    return [r for r in records if (r.workload, r.entry) == (workload, entry)]


def speeds_of(
    records: Sequence[Record], series: dict[str, str | None] | None = None
) -> list[Speed]:
    """Compute the speed of each workload, concurrency and entry, in the order of the records.
    series: of the entries that a sweep made."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        if record.repetition is not None:
            key = record.workload, record.concurrency, record.entry
            groups.setdefault(key, []).append(record)
    return [_speed_of(runs, (series or {}).get(runs[0].entry)) for runs in groups.values()]


def _speed_of(runs: list[Record], series: str | None) -> Speed:
    # Of all repetitions together: times of requests are medians over all of them.
    answers = [a for run in runs for a in run.answers]
    good = [a for a in answers if a.error is None]
    # A whole run from its first request to its last answer, so waiting and failing count.
    speeds = [run.tokens / run.seconds for run in runs]
    firsts = [a.first - a.submitted for a in good if a.first is not None]
    ends = [a.finished - a.submitted for a in good if a.finished is not None]
    calls = sum(run.calls or 0 for run in runs)
    # An endpoint does not tell how often its model was called: means are over answers that do.
    fed = [a for a in good if a.forwards]
    # A forward that several requests share counts once for each of them here, and once in `calls`.
    forwards = sum(a.forwards or 0 for a in fed)
    names = dict.fromkeys(name for a in good for name in a.counts)
    counts = {name: sum(a.counts.get(name, 0) for a in good) / len(good) for name in names}
    tokens = sum(a.tokens for a in good) / max(1, len(good))
    return Speed(
        entry=runs[0].entry,
        series=series,
        workload=runs[0].workload,
        concurrency=runs[0].concurrency,
        repetitions=len(runs),
        requests=len(runs[0].answers),
        throughput=float(np.median(speeds)),
        throughput_low=min(speeds),
        throughput_high=max(speeds),
        request_throughput=_percentile([_request_speed(a) for a in good], 50),
        first=_percentile(firsts, 50),
        first_95=_percentile(firsts, 95),
        finished=_percentile(ends, 50),
        finished_95=_percentile(ends, 95),
        prefill=_percentile([a.prefill - a.submitted for a in good if a.prefill is not None], 50),
        decode_throughput=_percentile([_decode_speed(a) for a in good], 50),
        tokens=tokens,
        forwards=forwards / len(fed) if fed else None,
        tokens_per_forward=sum(a.tokens for a in fed) / forwards if fed else None,
        rows_per_forward=sum(a.rows or 0 for a in fed) / forwards if fed else None,
        p_cache=p_cache_of(tokens, counts),
        tokens_per_call=sum(run.tokens for run in runs) / calls if calls else None,
        # None where it cannot be read: an endpoint, or a system other than Linux.
        peak_bytes=max((run.peak_bytes or 0 for run in runs), default=0) or None,
        failed=sum(a.error is not None for a in answers),
        retried=sum(a.attempts > 1 for a in answers),
        counts=counts,
    )


def _request_speed(answer: Answer) -> float | None:
    """Compute visible tokens a second of one request, from its submission to its end."""
    if answer.finished is None or not answer.tokens:
        return None
    return answer.tokens / max(1e-9, answer.finished - answer.submitted)


def _decode_speed(answer: Answer) -> float | None:
    """Compute visible tokens a second of one request after its first forward, whose own tokens are
    left out as its time is."""
    if answer.finished is None or answer.prefill is None or answer.finished <= answer.prefill:
        return None
    return (answer.tokens - answer.first_tokens) / (answer.finished - answer.prefill)


def _percentile(values: Sequence[float | None], share: int) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, share)) if known else None


def accuracies(records: Sequence[Record], baseline: str) -> list[Accuracy]:
    """Compute the accuracy of each entry and workload that has a judge, from its run with most
    problems."""
    keys = dict.fromkeys((r.workload, r.entry) for r in records)
    runs = {key: _of(records, *key) for key in keys}
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
            Accuracy(
                entry=entry,
                workload=workload,
                right=right,
                problems=len(answers),
                low=low,
                high=high,
                difference=100 * (gained - lost) / max(1, len(both)),
                difference_low=100 * least,
                difference_high=100 * most,
                same=sum(a.text == b.text for a, b in both),
                unstable=sum(len(own) > 1 for own in texts.values()),
            )
        )
    return found


def faster_at(table: Sequence[Speed], workload: str, one: str, other: str) -> list[int]:
    """List the concurrencies at which `one` is faster than `other`."""
    speed = {(r.entry, r.concurrency): r.throughput for r in table if r.workload == workload}
    counts = sorted({c for e, c in speed if e == one} & {c for e, c in speed if e == other})
    return [c for c in counts if speed[one, c] > speed[other, c]]
