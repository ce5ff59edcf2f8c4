"""report.json with all that was measured, report.md for reading; both made from the records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from d2f.files import write_beside
from decode.comparison.records import Record, as_json, from_json
from decode.comparison.statistics import Accuracy, Speed, accuracies, failures, faster_at, speeds_of
from decode.reporting.tables import markdown_table

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
