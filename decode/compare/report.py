"""report.json with all that was measured, report.md for reading; both made from the records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pydantic import TypeAdapter

from d2f.files import write_beside
from d2f.tasks import before_stop
from decode.compare.client import Run
from decode.compare.config import Workload
from decode.compare.entries import count_tokens
from decode.ledger import Ledger
from decode.plots import (
    COLORS,
    MARKERS,
    Panel,
    Point,
    Series,
    dress,
    frontier,
    legend_above,
    new_figure,
    save,
)
from decode.report import markdown_table, paired, wilson
from decode.step import p_cache_of

# Raw measurements: one record a run, and how they are written.

COLUMNS = (
    "item", "submitted", "prefill", "first", "finished", "first_tokens", "tokens", "own_tokens",
    "forwards", "rows", "attempts", "right", "text", "error", "counts",
)  # fmt: skip

Key = tuple[str, int, int | None, str]  # workload, concurrency, repetition, entry of a run


@dataclass(frozen=True)
class Judged:
    """An answer as it counts. tokens: visible ones, by the common tokenizer, 0 where the request
    failed; right: None where nothing judges. The others are as in `Answer`."""

    item: int
    submitted: float
    prefill: float | None
    first: float | None
    finished: float | None
    first_tokens: int
    tokens: int
    own_tokens: int | None
    forwards: int | None
    rows: int | None
    attempts: int
    right: bool | None
    text: str
    error: str | None
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """One run of one entry. repetition: from 0; None for the pass that only judges."""

    entry: str
    workload: str
    concurrency: int
    repetition: int | None
    seconds: float
    calls: int | None
    peak_bytes: int | None
    answers: list[Judged]

    @property
    def key(self) -> Key:
        return self.workload, self.concurrency, self.repetition, self.entry

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)


_RECORD = TypeAdapter(Record)


def judge(
    run: Run,
    workload: Workload,
    tokenizer: Any,
    *,
    entry: str,
    concurrency: int,
    repetition: int | None,
) -> Record:
    """Count and judge the answers of a run; a failed request has no tokens and is wrong, and none
    has more tokens than were asked for."""
    texts = ["" if a.error else before_stop(a.text, workload.stop) for a in run.answers]
    answers = []
    for answer, text, tokens in zip(
        run.answers, texts, count_tokens(tokenizer, texts), strict=True
    ):
        tokens = min(tokens, workload.max_new_tokens)  # by another tokenizer than its own
        right = workload.items[answer.item].right(text)
        answers.append(
            Judged(
                **vars(answer)
                | {
                    "first_tokens": min(answer.first_tokens, tokens),
                    "tokens": tokens,
                    "right": False if answer.error and right is not None else right,
                    "text": text,
                }
            )
        )
    return Record(
        entry, workload.name, concurrency, repetition, run.seconds, run.calls, run.peak_bytes,
        answers,
    )  # fmt: skip


def as_json(records: list[Record]) -> dict[str, Any]:
    """Records as plain values: answers are lists under common columns, equal texts are kept
    once."""
    texts: dict[str, int] = {}
    runs = []
    for record in records:
        answers = []
        for answer in record.answers:
            values = dict(vars(answer))
            # Repetitions mostly give the same text: written once, and referred to by number.
            values["text"] = texts.setdefault(answer.text, len(texts))
            answers.append([_short(values[column]) for column in COLUMNS])
        runs.append({**vars(record), "seconds": _short(record.seconds), "answers": answers})
    return {"columns": list(COLUMNS), "texts": list(texts), "runs": runs}


def from_json(values: dict[str, Any]) -> list[Record]:
    """The records that `as_json` wrote. Raises ValueError, LookupError or TypeError."""
    records = []
    for run in values["runs"]:
        answers = []
        for row in run["answers"]:
            fields = dict(zip(values["columns"], row, strict=True))
            answers.append(fields | {"text": values["texts"][fields["text"]]})
        records.append(_RECORD.validate_json(json.dumps(run | {"answers": answers}), strict=True))
    return records


def _short(value: Any) -> Any:
    """Times to the microsecond."""
    return round(value, 6) if isinstance(value, float) else value


# From records to how fast and how right the entries are.


@dataclass(frozen=True)
class Speed:
    """One entry at one concurrency of one workload; times in seconds, None where unknown.

    throughput: visible tokens a second of the whole run, the median repetition; throughput_low and
    throughput_high: the slowest and fastest. request_throughput: of one request, the median.
    first, finished: from submission to the first token that could be shown and to the end;
    prefill: to the end of the first forward; decode_throughput: visible tokens a second after
    that, of one request. tokens, forwards: mean a request; calls_tokens: visible tokens a call of
    the model, whichever requests share it. peak_bytes: most over the runs. failed, retried: of the
    timed requests. p_cache: `decode.step.p_cache_of`. series: the sweep that the entry is
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
    `decode.report.paired`). same: answers that are the baseline's, word for word."""

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


Column = tuple[str, Callable[[Speed], str]]


class ComparisonReport:
    """A comparison's records with what they were measured on.

    about: date, command, versions, device, configuration, the facts of each entry, and whether it
    was cut short.
    """

    def __init__(self, about: dict[str, Any], records: Sequence[Record]):
        self.about = about
        self.records = list(records)
        self.baseline: str = about["baseline"]
        series = {e["name"]: e.get("series") for e in about["config"]["entries"]}
        ordered = _in_the_configurations_order(self.records, list(series))
        self.speeds = speeds_of(ordered, series)
        self.accuracies = accuracies(ordered, self.baseline)
        self.failures = failures(ordered)
        # Failed requests make an entry look fast: it is shown, and neither ranked nor drawn.
        self.ranked = [r for r in self.speeds if self._is_ranked(r.entry, r.workload)]

    @classmethod
    def load(cls, path: Path) -> ComparisonReport:
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(values["about"], from_json(values["measurements"]))

    def save(self, folder: Path) -> None:
        """Write report.json and report.md."""
        values = {"about": self.about, "measurements": as_json(self.records)}
        write_beside(folder / "report.json", json.dumps(values) + "\n")
        write_beside(folder / "report.md", self.markdown())

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(speed.workload for speed in self.speeds))

    def _is_ranked(self, entry: str, workload: str) -> bool:
        return not any((f.entry, f.workload) == (entry, workload) for f in self.failures)

    def speedup(self, speed: Speed) -> float | None:
        """Throughput over the baseline's at the same concurrency, None where one is not ranked."""
        for other in self.ranked if speed in self.ranked else ():
            same = (other.workload, other.concurrency) == (speed.workload, speed.concurrency)
            if same and other.entry == self.baseline and other.throughput:
                return speed.throughput / other.throughput
        return None

    def accuracy(self, entry: str, workload: str) -> Accuracy | None:
        for found in self.accuracies:
            if (found.entry, found.workload) == (entry, workload):
                return found
        return None

    def markdown(self) -> str:
        """The report for reading."""
        about = self.about
        lines = [f"# Comparison of {about['date']}", ""]
        if about["cut_short"]:
            lines += [f"**Cut short:** {about['cut_short']}. What follows was measured before.", ""]
        lines += _resumed(about)
        lines += [f"On {about['device']}, with", "", "```", about["command"], "```", ""]
        for workload in self.workloads:
            lines += [f"## {workload}", "", *self.verdict(workload), ""]
            lines += [*self._accuracy_table(workload), *self._table(workload, SPEED), ""]
            lines += [*self._table(workload, WORK), "", *self._counts_table(workload)]
        lines += ["## What was counted", "", *COUNTED, "", "## Entries", ""]
        for name, facts in about["entries"].items():
            lines += [f"- **{name}**: " + _facts(facts)]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        lines += ["", f"Versions: {versions}. Raw measurements: report.json.", ""]
        return "\n".join(lines)

    def verdict(self, workload: str) -> list[str]:
        """Who won where, in sentences; who has failed requests has won nothing."""
        lines = [
            f"- **{f.entry} is not ranked**: {f.failed} of its {f.requests} requests failed, "
            f"e.g. {f.example}"
            for f in self.failures
            if f.workload == workload
        ]
        own = [speed for speed in self.ranked if speed.workload == workload]
        for concurrency in dict.fromkeys(speed.concurrency for speed in own):
            best = max((r for r in own if r.concurrency == concurrency), key=lambda r: r.throughput)
            lines.append(
                f"- At concurrency {concurrency} **{best.entry}** is fastest: "
                f"{best.throughput:,.0f} visible tokens/s{self._against(best)}."
            )
        counts = sorted({speed.concurrency for speed in own})
        for series in dict.fromkeys(speed.series for speed in own if speed.series):
            lines.append(f"- {series}: {self._range([r for r in own if r.series == series])}.")
        entries = dict.fromkeys(speed.entry for speed in own)
        compared = [speed.entry for speed in own if not speed.series and self.baseline in entries]
        for entry in dict.fromkeys(compared):
            if entry != self.baseline:
                wins = faster_at(own, workload, self.baseline, entry)
                won = self._won(entry, wins, counts)
                lines.append(f"- {won}{self._points(entry, workload)}.")
        return lines

    def _range(self, own: Sequence[Speed]) -> str:
        """From the slowest to the fastest value of a sweep, at the lowest concurrency."""
        lowest = min(speed.concurrency for speed in own)
        ends = sorted((r for r in own if r.concurrency == lowest), key=lambda r: r.throughput)
        parts = []
        for speed in (ends[0], ends[-1]):
            found = self.accuracy(speed.entry, speed.workload)
            right = f", {found.right / found.problems:.1%} right" if found else ""
            value = speed.entry.removeprefix(f"{speed.series} ")
            parts.append(
                f"{value} has {speed.throughput:,.0f} visible tokens/s, "
                f"{number(speed.tokens_per_forward, 2)} a forward{right}"
            )
        return "; ".join(dict.fromkeys(parts))

    def _won(self, entry: str, wins: list[int], counts: list[int]) -> str:
        """Where the baseline is faster than an entry, and where the two cross."""
        if not wins:
            return f"{self.baseline} is not faster than {entry} at any concurrency measured"
        if wins == counts:
            return f"{self.baseline} is faster than {entry} at every concurrency measured"
        # The wins are the highest concurrencies, so the two cross once.
        if wins == counts[-len(wins) :]:
            before = counts[-len(wins) - 1]
            return (
                f"{self.baseline} overtakes {entry} between concurrency {before} and {wins[0]}, "
                "and stays ahead"
            )
        return f"{self.baseline} is faster than {entry} at concurrency {', '.join(map(str, wins))}"

    def _against(self, speed: Speed) -> str:
        ratio = self.speedup(speed)
        if ratio is None or speed.entry == self.baseline:
            return ""
        return f", {ratio:.2f} times {self.baseline}"

    def _points(self, entry: str, workload: str) -> str:
        found = self.accuracy(entry, workload)
        if found is None or self.accuracy(self.baseline, workload) is None:
            return ""
        return (
            f"; the accuracy of {entry} is {found.difference:+.1f} points of it "
            f"(95 % {found.difference_low:+.1f} to {found.difference_high:+.1f})"
        )

    def _accuracy_table(self, workload: str) -> list[str]:
        own = [a for a in self.accuracies if a.workload == workload]
        if not own:
            return []
        base = self.baseline
        columns = (
            "entry", "right", "accuracy", "95 %", f"points of {base}",
            f"answers equal to {base}'s", "unstable answers",
        )  # fmt: skip
        entries = []
        for a in own:
            # A difference is to the baseline, so both must be ranked.
            ranked = all(self._is_ranked(e, workload) for e in (a.entry, base))
            points = "" if a.entry == base or not ranked else f"{a.difference:+.1f}"
            same = "" if a.entry == base else f"{a.same} of {a.problems}"
            right, share = f"{a.right} of {a.problems}", f"{a.right / a.problems:.1%}"
            interval = f"{a.low:.1%} to {a.high:.1%}"
            entries.append((a.entry, right, share, interval, points, same, a.unstable))
        return [*markdown_table(columns, entries), ""]

    def _counts_table(self, workload: str) -> list[str]:
        """What decoders counted of themselves, a request."""
        own = [speed for speed in self.speeds if speed.workload == workload and speed.counts]
        names = list(dict.fromkeys(name for speed in own for name in speed.counts))
        if not names:
            return []
        columns = ["concurrency", "entry", *(f"{n.replace('_', ' ')} a request" for n in names)]
        cells = [
            [speed.concurrency, speed.entry, *(number(speed.counts.get(name), 2) for name in names)]
            for speed in own
        ]
        return [*markdown_table(columns, cells), ""]

    def _table(self, workload: str, columns: Sequence[Column]) -> list[str]:
        own = [speed for speed in self.speeds if speed.workload == workload]
        cells = [[value(speed) for _, value in columns] for speed in own]
        return markdown_table([name for name, _ in columns], cells)


def _in_the_configurations_order(records: list[Record], entries: list[str]) -> list[Record]:
    """By workload and concurrency as they came; under these by entry, whose turns change."""
    came = {key: n for n, key in enumerate(dict.fromkeys(map(_level, records)))}
    return sorted(records, key=lambda r: (came[_level(r)], entries.index(r.entry)))


def _level(record: Record) -> tuple[str, int]:
    return record.workload, record.concurrency


def _resumed(about: dict[str, Any]) -> list[str]:
    """That the runs are not of one go, and what that means for them."""
    found = about.get("resumed")
    if not found:
        return []
    times = ", ".join(f"at {t['date']} with {t['kept']} runs measured before" for t in found)
    return [
        f"**Resumed** {times}. In each repetition all entries had their turn without a break; one "
        "that was cut short was measured again.",
        "",
    ]


def number(value: float | None, digits: int = 0) -> str:
    """A value for a table, - where it is unknown."""
    return "-" if value is None else f"{value:,.{digits}f}"


def _milliseconds(middle: float | None, high: float | None) -> str:
    if middle is None:
        return "-"
    return f"{1e3 * middle:,.1f} / {1e3 * (high or 0):,.1f}"


def _facts(facts: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} `{' '.join(map(str, value)) if isinstance(value, list) else value}`"
        for key, value in facts.items()
        if value not in (None, {}, [])
    )


SPEED: list[Column] = [
    ("concurrency", lambda r: str(r.concurrency)),
    ("entry", lambda r: r.entry),
    ("tokens/s", lambda r: number(r.throughput) + " (not ranked)" * bool(r.failed)),
    ("slowest to fastest run", lambda r: f"{r.throughput_low:,.0f} to {r.throughput_high:,.0f}"),
    ("tokens/s a request", lambda r: number(r.request_throughput)),
    ("first token, ms (median / 95 %)", lambda r: _milliseconds(r.first, r.first_95)),
    ("whole answer, ms (median / 95 %)", lambda r: _milliseconds(r.finished, r.finished_95)),
    ("prefill, ms", lambda r: number(None if r.prefill is None else 1e3 * r.prefill, 1)),
    ("tokens/s after prefill", lambda r: number(r.decode_throughput)),
]
WORK: list[Column] = [
    ("concurrency", lambda r: str(r.concurrency)),
    ("entry", lambda r: r.entry),
    ("tokens a request", lambda r: number(r.tokens, 1)),
    ("forwards a request", lambda r: number(r.forwards, 1)),
    ("tokens a forward", lambda r: number(r.tokens_per_forward, 2)),
    ("rows a forward", lambda r: number(r.rows_per_forward, 1)),
    ("p_cache", lambda r: number(r.p_cache, 2)),
    ("tokens a model call", lambda r: number(r.tokens_per_call, 2)),
    ("peak memory, MiB", lambda r: number(r.peak_bytes and r.peak_bytes / 2**20)),
    ("failed", lambda r: f"{r.failed} of {r.requests * r.repetitions}"),
    ("retried", lambda r: str(r.retried)),
]
COUNTED = [
    "- Tokens are visible ones: the answer's text before the first end token or stop string, "
    "counted by one tokenizer for all entries, at most as many as were asked for. Tokens/s is "
    "their sum over the wall time of a whole run, from the first request to the last answer, with "
    "`concurrency` requests in flight; the median of the repetitions, each of "
    "all entries in an order of its own. Warm-ups are not in it.",
    "- Every entry had the same prompts through its own tokenizer and chat template, the same "
    "longest answer, the same stop strings, and decodes greedily.",
    "- Prefill ends with the first forward that a request was in (streamed: its first piece). The "
    "first token is the first that a reader could be shown: nothing before it is undecided.",
    "- A forward is a call of the model that a request was in; rows are what was fed for it. For a "
    "server, one forward a token that it counts, and no rows for padding. p_cache is WeDLM's: "
    "tokens over the rows fed after the prompt's.",
    "- Peak memory is resident memory of the entry's processes on a CPU (pages that two of them "
    "share count twice), allocated memory on a GPU.",
    "- Accuracy: all problems, once, with Wilson's interval; its difference to the baseline's, on "
    "the same problems, with Tango's. A failed request is wrong. An entry with failed requests is "
    "neither ranked nor drawn. Unstable answers were not the same text in every run.",
]


# The figures of a comparison: throughput against concurrency, accuracy against throughput.


def draw(report: ComparisonReport, folder: Path) -> None:
    """Write throughput (at more than one concurrency, or without sweeps) and, where answers were
    judged, frontier and, where an option was swept, forwards; each as PNG and SVG. Of what is
    ranked: an entry with failed requests is not drawn."""
    caption = f"{_caption(report)}; 95 % intervals"
    if not report.ranked:  # nothing that could be compared
        return
    models = _swept_models(report)
    if not models or len({speed.concurrency for speed in report.ranked}) > 1:
        save(throughput(report), folder / "throughput")
    if models:
        for name, forwards in (("frontier", False), ("forwards", True)):
            panels = [
                _sweep_panel(report, workload, model, forwards=forwards)
                for workload in _workloads(report)
                for model in models
            ]
            # A server does not say how often it called its model: then there is no figure of
            # forwards.
            if all(panel.series for panel in panels):
                save(frontier(panels, caption, columns=len(models)), folder / name)
        return
    every = [_panel(report, workload) for workload in _workloads(report)]
    panels = [panel for panel in every if panel.series]
    if panels:
        save(frontier(panels, caption), folder / "frontier")


def throughput(report: ComparisonReport) -> Figure:
    """A panel a workload: visible tokens a second over the requests in flight, a line an entry,
    its band from the slowest to the fastest repetition."""
    workloads = _workloads(report)
    figure, panels = new_figure(len(workloads), _caption(report), inches=(5.6, 4.6))
    ticks = sorted({speed.concurrency for speed in report.ranked})
    for axes, workload in zip(panels, workloads, strict=True):
        for i, (entry, own) in enumerate(_lines(report, workload)):
            x = [speed.concurrency for speed in own]
            color = COLORS[i % len(COLORS)]
            # The colors begin anew with broken lines and hollow marks.
            again = i >= len(COLORS)
            axes.plot(
                x,
                [r.throughput for r in own],
                label=entry,
                color=color,
                linestyle="--" if again else "-",
                marker=MARKERS[i % len(MARKERS)],
                markerfacecolor="white" if again else color,
                markersize=5,
            )
            low, high = [r.throughput_low for r in own], [r.throughput_high for r in own]
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        # Concurrencies usually double: here they are evenly apart.
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(bottom=0)
        dress(axes, workload, "requests in flight")
    panels[0].set_ylabel("speed, visible tokens per second")
    legend_above(figure, panels[0])
    return figure


def _panel(report: ComparisonReport, workload: str) -> Panel:
    """A line an entry through its points, which are labelled with the requests in flight, or where
    there is one number of them with the entry."""
    levels = {speed.concurrency for speed in report.ranked}
    series = []
    for entry, own in _lines(report, workload):
        found = report.accuracy(entry, workload)
        if found is not None:
            ends = own[0], own[-1]
            labels = [str(speed.concurrency) if speed in ends else "" for speed in own]
            if len(levels) == 1:
                labels = [entry]
            points = [_point(speed, found, label) for speed, label in zip(own, labels, strict=True)]
            series.append(Series(entry, points, line=True))
    if len(levels) == 1:
        return Panel(f"{workload}, requests in flight: {levels.pop()}", series)
    return Panel(f"{workload}, labels: requests in flight", series)


def _point(speed: Speed, found: Accuracy, label: str) -> Point:
    return Point(
        x=speed.throughput,
        accuracy=found.right / found.problems,
        low=found.low,
        high=found.high,
        label=label,
        slowest=speed.throughput_low,
        fastest=speed.throughput_high,
    )


def _swept_models(report: ComparisonReport) -> list[str]:
    """The models of which an option was swept, in the order of the entries."""
    entries = report.about["config"]["entries"]
    return list(dict.fromkeys(entry["model"] for entry in entries if entry.get("series")))


def _sweep_panel(report: ComparisonReport, workload: str, model: str, *, forwards: bool) -> Panel:
    """A line a sweep of that model, its points in the order of its values, at the lowest
    concurrency; other entries of the model, and of models without sweeps, are points. forwards:
    over the tokens of a forward, not of a second."""
    lowest = min(speed.concurrency for speed in report.ranked)
    others = set(_swept_models(report)) - {model}
    models = {entry["name"]: entry["model"] for entry in report.about["config"]["entries"]}
    points: dict[str, list[Point]] = {}
    for speed in report.ranked:
        found = report.accuracy(speed.entry, workload)
        here = (speed.workload, speed.concurrency) == (workload, lowest)
        if not here or models[speed.entry] in others or found is None:
            continue
        point = _point(speed, found, speed.entry.split()[-1] if speed.series else "")
        if forwards:
            if speed.tokens_per_forward is None:
                continue
            point = replace(point, x=speed.tokens_per_forward, slowest=None, fastest=None)
        points.setdefault(speed.series or speed.entry, []).append(point)
    series = [Series(name, _ends_labelled(own), line=len(own) > 1) for name, own in points.items()]
    across = "visible tokens a forward" if forwards else "speed, visible tokens per second"
    return Panel(f"{workload}, {model}, {lowest} in flight", series, across=across)


def _ends_labelled(points: list[Point]) -> list[Point]:
    """Only the first and the last value are written, the others lie between."""
    last = len(points) - 1
    return [p if i in (0, last) else replace(p, label="") for i, p in enumerate(points)]


def _workloads(report: ComparisonReport) -> list[str]:
    return list(dict.fromkeys(speed.workload for speed in report.ranked))


def _lines(report: ComparisonReport, workload: str) -> list[tuple[str, list[Speed]]]:
    """Each entry with its speeds, in the configuration's order, so that colours stay its own."""
    return [
        (entry, [r for r in report.ranked if (r.workload, r.entry) == (workload, entry)])
        for entry in report.about["entries"]
        if any(r.entry == entry for r in report.ranked)
    ]


def _caption(report: ComparisonReport) -> str:
    return f"{report.about['device']}, {report.about['date']}"


# The runs of a comparison on disk as they come, so that a killed command goes on where it was.


class RunsLedger(Ledger):
    """The records of a comparison, and in `resumed` the times that it went on before."""

    def __init__(self, path: Path, run: dict[str, Any]):
        super().__init__(path, run, key=_ledger_key, sync=True)
        lines = self.rows.values()
        self.done = {r.key: r for row in lines if "runs" in row for r in from_json(row)}
        self.found = bool(self.done)
        self.resumed = [row["resumed"] for row in lines if "resumed" in row] if self.found else []

    @property
    def records(self) -> list[Record]:
        return list(self.done.values())

    def add_record(self, record: Record) -> None:
        """Append a record. Raises OutputError."""
        self.add(as_json([record]))
        self.done[record.key] = record

    def begin(self, entries: Collection[str]) -> None:
        """Keep what is complete, and write it. A repetition is complete if each of the entries had
        its turn: they are compared with each other, so one that was cut short is measured anew.
        """
        before = self.done
        self.done = {
            key: record
            for key, record in before.items()
            # The pass that only judges compares no times: it is kept as it is.
            if record.repetition is None or all((*key[:3], entry) in before for entry in entries)
        }
        if self.found:
            date, kept = time.strftime("%Y-%m-%d %H:%M:%S %z"), len(self.done)
            self.resumed.append({"date": date, "kept": kept, "dropped": len(before) - kept})
        notes = [{"resumed": one} for one in self.resumed]
        self.replace([*notes, *(as_json([record]) for record in self.records)])


def _ledger_key(row: dict[str, Any]) -> Any:
    """The key of a record, or of a note of when the comparison went on."""
    if "resumed" in row:
        return id(row)
    (record,) = from_json(row)
    return record.key
