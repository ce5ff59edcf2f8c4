"""The report of a comparison: results.json, report.md and figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from d2f.files import write_beside
from decode.compare.results import (
    Accuracy,
    Failures,
    Record,
    Speed,
    accuracies,
    failures,
    faster_at,
    speeds_of,
)
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
from decode.report import markdown_table

Column = tuple[str, Callable[[Speed], str]]


@dataclass(frozen=True)
class ComparisonReport:
    """The results of a comparison with what they were measured on.

    about: date, command, versions, device, configuration, the facts of each entry, and whether it
    was cut short. Failed requests make an entry look fast: it is shown, and neither ranked nor
    drawn.
    """

    about: dict[str, Any]
    speeds: list[Speed]
    accuracies: list[Accuracy]
    failures: list[Failures]

    @staticmethod
    def of(about: dict[str, Any], records: Sequence[Record]) -> ComparisonReport:
        """Compute the results of records, in the order of the configuration's entries."""
        series = {e["name"]: e.get("series") for e in about["config"]["entries"]}
        names = list(series)
        came = {level: n for n, level in enumerate(dict.fromkeys(map(_level, records)))}
        ordered = sorted(records, key=lambda r: (came[_level(r)], names.index(r.entry)))
        found = accuracies(ordered, about["baseline"])
        return ComparisonReport(about, speeds_of(ordered, series), found, failures(ordered))

    @staticmethod
    def load(path: Path) -> ComparisonReport:
        """Read a results.json."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return ComparisonReport(
            values["about"],
            [Speed(**speed) for speed in values["speeds"]],
            [Accuracy(**accuracy) for accuracy in values["accuracies"]],
            [Failures(**failed) for failed in values["failures"]],
        )

    def save(self, folder: Path) -> None:
        """Write results.json and report.md."""
        write_beside(folder / "results.json", json.dumps(asdict(self), indent=1) + "\n")
        write_beside(folder / "report.md", self.markdown())

    @property
    def baseline(self) -> str:
        return str(self.about["baseline"])

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(speed.workload for speed in self.speeds))

    @property
    def ranked(self) -> list[Speed]:
        """Leave out the entries with failed requests in the workload."""
        return [speed for speed in self.speeds if self._is_ranked(speed.entry, speed.workload)]

    def _is_ranked(self, entry: str, workload: str) -> bool:
        return not any((f.entry, f.workload) == (entry, workload) for f in self.failures)

    def speedup(self, speed: Speed) -> float | None:
        """Divide throughput by the baseline's at this concurrency; None where one is not ranked."""
        if not self._is_ranked(speed.entry, speed.workload):
            return None
        key = speed.workload, speed.concurrency, self.baseline
        for other in self.ranked:
            if (other.workload, other.concurrency, other.entry) == key and other.throughput:
                return speed.throughput / other.throughput
        return None

    def accuracy(self, entry: str, workload: str) -> Accuracy | None:
        own = (a for a in self.accuracies if (a.entry, a.workload) == (entry, workload))
        return next(own, None)

    def markdown(self) -> str:
        """Write the report for reading."""
        about = self.about
        lines = [f"# Comparison of {about['date']}", ""]
        if about["cut_short"]:
            lines += [f"**Cut short:** {about['cut_short']}. What follows was measured before.", ""]
        if len(about["starts"]) > 1:
            lines += [
                f"**Resumed:** measured in {len(about['starts'])} goes, begun at "
                f"{', '.join(about['starts'])}. In each repetition all entries had their turn in "
                "one go; one that was cut short was measured again.",
                "",
            ]
        lines += [f"On {about['device']}, with", "", "```", about["command"], "```", ""]
        for workload in self.workloads:
            lines += [f"## {workload}", "", *self.verdict(workload), ""]
            lines += [*self._accuracy_table(workload), *self.speed_table(workload), ""]
            lines += [*self._table(workload, WORK), "", *self._counts_table(workload)]
        lines += ["## What was counted", "", *COUNTED, "", "## Entries", ""]
        lines += [f"- **{name}**: {_facts(facts)}" for name, facts in about["entries"].items()]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        lines += ["", f"Versions: {versions}. Raw measurements: measurements.jsonl.", ""]
        return "\n".join(lines)

    def verdict(self, workload: str) -> list[str]:
        """Say who won where; an entry with failed requests has won nothing."""
        lines = [
            f"- **{f.entry} is not ranked**: {f.failed} of its {f.requests} requests failed, "
            f"e.g. {f.example}"
            for f in self.failures
            if f.workload == workload
        ]
        own = [speed for speed in self.ranked if speed.workload == workload]
        for concurrency in dict.fromkeys(speed.concurrency for speed in own):
            best = max((r for r in own if r.concurrency == concurrency), key=lambda r: r.throughput)
            ratio = None if best.entry == self.baseline else self.speedup(best)
            against = f", {ratio:.2f} times {self.baseline}" if ratio else ""
            lines.append(
                f"- At concurrency {concurrency} **{best.entry}** is fastest: "
                f"{best.throughput:,.0f} visible tokens/s{against}."
            )
        if self.baseline in [speed.entry for speed in own]:
            for entry in dict.fromkeys(speed.entry for speed in own if not speed.series):
                if entry != self.baseline:
                    lines.append(f"- {self._beside_baseline(entry, own, workload)}.")
        return lines

    def _beside_baseline(self, entry: str, own: Sequence[Speed], workload: str) -> str:
        """Say where the baseline is faster than an entry, and how their accuracies differ."""
        base = self.baseline
        wins = (
            ", ".join(map(str, faster_at(own, workload, base, entry))) or "none of those measured"
        )
        said = f"{base} is faster than {entry} at concurrency {wins}"
        found = self.accuracy(entry, workload)
        if found is None or self.accuracy(base, workload) is None:
            return said
        return (
            f"{said}; the accuracy of {entry} is {found.difference:+.1f} points of it "
            f"(95 % {found.difference_low:+.1f} to {found.difference_high:+.1f})"
        )

    def _accuracy_table(self, workload: str) -> list[str]:
        own = [a for a in self.accuracies if a.workload == workload]
        if not own:
            return []
        base = self.baseline
        header = (
            "entry", "right", "accuracy", "95 %", f"points of {base}",
            f"answers equal to {base}'s", "unstable answers",
        )  # fmt: skip
        rows = []
        for a in own:
            # A difference is to the baseline, so both must be ranked.
            ranked = all(self._is_ranked(e, workload) for e in (a.entry, base))
            points = "" if a.entry == base or not ranked else f"{a.difference:+.1f}"
            same = "" if a.entry == base else f"{a.same} of {a.problems}"
            right, share = f"{a.right} of {a.problems}", f"{a.right / a.problems:.1%}"
            rows.append(
                (a.entry, right, share, f"{a.low:.1%} to {a.high:.1%}", points, same, a.unstable)
            )
        return [*markdown_table(header, rows), ""]

    def _counts_table(self, workload: str) -> list[str]:
        """Tabulate what decoders counted of themselves, a request."""
        own = [speed for speed in self.speeds if speed.workload == workload and speed.counts]
        names = list(dict.fromkeys(name for speed in own for name in speed.counts))
        if not names:
            return []
        header = ["concurrency", "entry", *(f"{n.replace('_', ' ')} a request" for n in names)]
        rows = [
            [speed.concurrency, speed.entry, *(number(speed.counts.get(name), 2) for name in names)]
            for speed in own
        ]
        return [*markdown_table(header, rows), ""]

    def speed_table(self, workload: str) -> list[str]:
        """Tabulate how fast the entries are."""
        return self._table(workload, SPEED)

    def _table(self, workload: str, columns: Sequence[Column]) -> list[str]:
        own = [speed for speed in self.speeds if speed.workload == workload]
        rows = [[value(speed) for _, value in columns] for speed in own]
        return markdown_table([name for name, _ in columns], rows)


def _level(record: Record) -> tuple[str, int]:
    return record.workload, record.concurrency


def number(value: float | None, digits: int = 0) -> str:
    """Format a value for a table; - where it is unknown."""
    return "-" if value is None else f"{value:,.{digits}f}"


def _milliseconds(middle: float | None, high: float | None) -> str:
    return "-" if middle is None else f"{1e3 * middle:,.1f} / {1e3 * (high or 0):,.1f}"


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


# The figures: throughput against concurrency, accuracy against throughput.


def draw(report: ComparisonReport, folder: Path) -> None:
    """Write throughput (at more than one concurrency, or without sweeps) and, where answers were
    judged, frontier and, where an option was swept, forwards; each as PNG and SVG."""
    entries = report.about["config"]["entries"]
    swept = list(dict.fromkeys(entry["model"] for entry in entries if entry.get("series")))
    workloads = list(dict.fromkeys(speed.workload for speed in report.ranked))
    levels = sorted({speed.concurrency for speed in report.ranked})
    if workloads and (not swept or len(levels) > 1):
        save(throughput(report, workloads, levels), folder / "throughput")
    for name in ("frontier", "forwards") if swept else ("frontier",):
        panels = [
            _panel(report, workload, model, set(swept), forwards=name == "forwards")
            for workload in workloads
            for model in swept or (None,)
        ]
        # A server does not say how often it called its model: then there is no figure of forwards.
        if panels and all(panel.series for panel in panels):
            caption = f"{_caption(report)}; 95 % intervals"
            save(frontier(panels, caption, columns=len(swept) or None), folder / name)


def _caption(report: ComparisonReport) -> str:
    return f"{report.about['device']}, {report.about['date']}"


def throughput(report: ComparisonReport, workloads: list[str], levels: list[int]) -> Figure:
    """Draw visible tokens a second over the requests in flight: a panel for each workload, a line
    for each entry with a band from its slowest to its fastest repetition."""
    figure, panels = new_figure(len(workloads), _caption(report), inches=(5.6, 4.6))
    for axes, workload in zip(panels, workloads, strict=True):
        for place, entry in enumerate(report.about["entries"]):
            own = [r for r in report.ranked if (r.workload, r.entry) == (workload, entry)]
            color = COLORS[place % len(COLORS)]
            again = place >= len(COLORS)  # the colors begin anew with broken lines and hollow marks
            if not own:
                continue
            x = [speed.concurrency for speed in own]
            axes.plot(
                x,
                [speed.throughput for speed in own],
                label=entry,
                color=color,
                linestyle="--" if again else "-",
                marker=MARKERS[place % len(MARKERS)],
                markerfacecolor="white" if again else color,
                markersize=5,
            )
            low, high = [r.throughput_low for r in own], [r.throughput_high for r in own]
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)  # concurrencies usually double
        axes.set_xticks(levels, [str(level) for level in levels])
        axes.set_ylim(bottom=0)
        dress(axes, workload, "requests in flight")
    panels[0].set_ylabel("speed, visible tokens per second")
    legend_above(figure, panels[0])
    return figure


def _panel(
    report: ComparisonReport, workload: str, model: str | None, swept: set[str], *, forwards: bool
) -> Panel:
    """Draw a line for each entry through its concurrencies; of a swept model a line for each sweep
    through its values, at the lowest concurrency, with entries of models without sweeps as points.
    forwards: over the tokens of a forward, not of a second."""
    levels = sorted({speed.concurrency for speed in report.ranked})
    models = {entry["name"]: entry["model"] for entry in report.about["config"]["entries"]}
    lines: dict[str, list[Point]] = {}
    for speed in report.ranked:
        found = report.accuracy(speed.entry, workload)
        x = speed.tokens_per_forward if forwards else speed.throughput
        elsewhere = model is not None and (
            speed.concurrency != levels[0] or models[speed.entry] in swept - {model}
        )
        if speed.workload != workload or found is None or x is None or elsewhere:
            continue
        label = str(speed.concurrency) if len(levels) > 1 else speed.entry
        if model is not None:
            label = speed.entry.split()[-1] if speed.series else ""
        point = Point(x, found.right / found.problems, found.low, found.high, label)
        if not forwards:
            point = replace(point, slowest=speed.throughput_low, fastest=speed.throughput_high)
        lines.setdefault(speed.series or speed.entry, []).append(point)
    for points in lines.values():  # only the ends keep their labels, the others lie between
        points[1:-1] = [replace(point, label="") for point in points[1:-1]]
    series = [Series(name, points, line=len(points) > 1) for name, points in lines.items()]
    said = "labels: requests in flight" if len(levels) > 1 else f"requests in flight: {levels[0]}"
    title = (
        f"{workload}, {said}" if model is None else f"{workload}, {model}, {levels[0]} in flight"
    )
    across = "visible tokens a forward" if forwards else "speed, visible tokens per second"
    return Panel(title, series, across=across)
