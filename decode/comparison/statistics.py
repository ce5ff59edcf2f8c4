"""From records to how fast and how right the entries are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from decode.comparison.records import Judged, Record
from decode.engine.result import p_cache_of
from decode.reporting.intervals import paired, wilson


@dataclass(frozen=True)
class Speed:
    """One entry at one concurrency of one workload; times in seconds, None where unknown.

    throughput: visible tokens a second of the whole run, the median repetition; throughput_low and
    throughput_high: the slowest and fastest. request_throughput: of one request, the median.
    first, finished: from submission to the first token that could be shown and to the end;
    prefill: to the end of the first forward; decode_throughput: visible tokens a second after
    that, of one request. tokens, forwards: mean a request; calls_tokens: visible tokens a call of
    the model, whichever requests share it. peak_bytes: most over the runs. failed, retried: of the
    timed requests. p_cache: `decode.engine.result.p_cache_of`. series: the sweep that the entry is
    of. counts: what its decoder counted, a request.
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
    against the baseline on the same problems, in points (paired:
    `decode.reporting.intervals.paired`). same: answers that are the baseline's, word for word."""

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
    """The entries and workloads with failed requests, in the order of the records."""
    found = []
    for workload, entry in dict.fromkeys((r.workload, r.entry) for r in records):
        own = [r for r in records if (r.workload, r.entry) == (workload, entry)]
        errors = [a.error for run in own for a in run.answers if a.error is not None]
        if errors:
            requests = sum(len(run.answers) for run in own)
            found.append(Failures(entry, workload, len(errors), requests, errors[0]))
    return found


def speeds_of(
    records: Sequence[Record], series: Mapping[str, str | None] = MappingProxyType({})
) -> list[Speed]:
    """A speed for each workload, concurrency and entry, in the order of the records. series: of the
    entries that a sweep made."""
    keys = dict.fromkeys(
        (r.workload, r.concurrency, r.entry) for r in records if r.repetition is not None
    )
    timed = [r for r in records if r.repetition is not None]
    runs = [[r for r in timed if (r.workload, r.concurrency, r.entry) == key] for key in keys]
    return [_speed_of(own, series.get(own[0].entry)) for own in runs]


def _speed_of(runs: list[Record], series: str | None) -> Speed:
    # Of all repetitions together: times of requests are medians over all of them.
    answers = [a for run in runs for a in run.answers]
    good = [a for a in answers if a.error is None]
    # A whole run from its first request to its last answer, so waiting and failing count.
    speeds = [run.tokens / run.seconds for run in runs]
    firsts = [a.first - a.submitted for a in good if a.first is not None]
    ends = [a.finished - a.submitted for a in good if a.finished is not None]
    prefills = [a.prefill - a.submitted for a in good if a.prefill is not None]
    calls = [run.calls for run in runs if run.calls is not None]
    # None where it cannot be read: an endpoint, or a system other than Linux.
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
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
        request_throughput=_median([_request_speed(a) for a in good]),
        first=_median(firsts),
        first_95=_percentile(firsts),
        finished=_median(ends),
        finished_95=_percentile(ends),
        prefill=_median(prefills),
        decode_throughput=_median([_decode_speed(a) for a in good]),
        tokens=tokens,
        forwards=forwards / len(fed) if fed else None,
        tokens_per_forward=sum(a.tokens for a in fed) / forwards if fed else None,
        rows_per_forward=sum(a.rows or 0 for a in fed) / forwards if fed else None,
        p_cache=p_cache_of(tokens, counts),
        tokens_per_call=sum(r.tokens for r in runs) / sum(calls) if calls else None,
        peak_bytes=max(peaks) if peaks else None,
        failed=sum(a.error is not None for a in answers),
        retried=sum(a.attempts > 1 for a in answers),
        counts=counts,
    )


def accuracies(records: Sequence[Record], baseline: str) -> list[Accuracy]:
    """One for each entry and workload that has a judge, from the run with most problems."""
    keys = list(dict.fromkeys((r.workload, r.entry) for r in records))
    judged = {key: _most([r for r in records if (r.workload, r.entry) == key]) for key in keys}
    found = []
    for workload, entry in keys:
        answers = judged[workload, entry]
        # Nothing judges prompts of one's own.
        if any(a.right is None for a in answers):
            continue
        theirs = {a.item: a for a in judged.get((workload, baseline), [])}
        right = sum(bool(a.right) for a in answers)
        low, high = wilson(right, len(answers))
        both = [(a, theirs[a.item]) for a in answers if a.item in theirs]
        # Problems that both or neither are right on say nothing about the difference.
        gained = sum(bool(a.right) and not b.right for a, b in both)
        lost = sum(bool(b.right) and not a.right for a, b in both)
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
                unstable=_unstable(
                    [r for r in records if (r.workload, r.entry) == (workload, entry)]
                ),
            )
        )
    return found


def faster_at(table: Sequence[Speed], workload: str, one: str, other: str) -> list[int]:
    """The concurrencies at which `one` is faster than `other`."""
    speed = {(r.entry, r.concurrency): r.throughput for r in table if r.workload == workload}
    counts = sorted({c for e, c in speed if e == one} & {c for e, c in speed if e == other})
    return [c for c in counts if speed[one, c] > speed[other, c]]


def _most(runs: list[Record]) -> list[Judged]:
    """The answers of the run with the most problems."""
    return max(runs, key=lambda run: len(run.answers)).answers


def _unstable(runs: list[Record]) -> int:
    """How many problems an entry has answered with different texts in different runs. Decoding is
    greedy, so none should; the rounding of forwards in another batch may decide a close choice."""
    texts: dict[int, set[str]] = {}
    for run in runs:
        for answer in run.answers:
            if answer.error is None:
                texts.setdefault(answer.item, set()).add(answer.text)
    return sum(len(found) > 1 for found in texts.values())


def _request_speed(answer: Judged) -> float | None:
    """Visible tokens a second of one request, from its submission to its end."""
    if answer.finished is None or not answer.tokens:
        return None
    return answer.tokens / max(1e-9, answer.finished - answer.submitted)


def _decode_speed(answer: Judged) -> float | None:
    """Visible tokens a second of one request after its first forward, whose own tokens are left
    out as its time is."""
    if answer.finished is None or answer.prefill is None or answer.finished <= answer.prefill:
        return None
    return (answer.tokens - answer.first_tokens) / (answer.finished - answer.prefill)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _percentile(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, 95)) if values else None
