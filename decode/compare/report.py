"""Write the report of a comparison: summary.json, report.md and figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.files import write_beside
from decode.compare.results import Row, Run, accuracies, failures, speeds_of
from decode.report import markdown_table

if TYPE_CHECKING:
    from decode.plots import Panel, Point


@dataclass(frozen=True)
class Report:
    """The results of a comparison with what they were measured on.

    about: date, command, versions, device, configuration, the facts of each entry, and whether it
    was cut short. Failed requests make an entry look fast: it is shown, and neither ranked nor
    drawn.
    """

    about: dict[str, Any]
    speeds: list[Row]
    accuracies: list[Row]
    failures: list[Row] = field(default_factory=list)

    @staticmethod
    def of(about: dict[str, Any], runs: Sequence[Run]) -> Report:
        """Compute the results of runs, in the order of the configuration's entries."""
        series = {e["name"]: e.get("series") for e in about["config"]["entries"]}
        names = list(series)
        ordered = sorted(runs, key=lambda r: (r.concurrency, names.index(r.entry)))
        found = accuracies(ordered, about["baseline"])
        return Report(about, speeds_of(ordered, series), found, failures(ordered))

    def save(self, folder: Path) -> None:
        """Write summary.json, what is known of each row to five digits, and report.md."""
        content = vars(self) | {
            name: [_brief(row) for row in getattr(self, name)] for name in ("speeds", "accuracies")
        }
        write_beside(folder / "summary.json", json.dumps(content, indent=1) + "\n")
        write_beside(folder / "report.md", self.markdown())

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(speed["workload"] for speed in self.speeds))

    @property
    def ranked(self) -> list[Row]:
        """Leave out the entries with failed requests in the workload."""
        return [speed for speed in self.speeds if self.is_ranked(speed["entry"], speed["workload"])]

    def is_ranked(self, entry: str, workload: str) -> bool:
        return not any((f["entry"], f["workload"]) == (entry, workload) for f in self.failures)

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
            lines += [*self.accuracy_table(workload), *self.speed_table(workload), ""]
        lines += ["## What was counted", "", *COUNTED, "", "## Entries", ""]
        lines += [f"- **{name}**: {_facts(facts)}" for name, facts in about["entries"].items()]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        lines += ["", f"Versions: {versions}. Raw measurements: measurements.jsonl.", ""]
        return "\n".join(lines)

    def verdict(self, workload: str) -> list[str]:
        """Say who won where; an entry with failed requests has won nothing."""
        baseline = self.about["baseline"]
        lines = [
            f"- **{f['entry']} is not ranked**: {f['failed']} of its {f['requests']} requests "
            f"failed, e.g. {f['example']}"
            for f in self.failures
            if f["workload"] == workload
        ]
        own = [speed for speed in self.ranked if speed["workload"] == workload]
        # Find where the baseline is faster than each of the others.
        wins: dict[str, list[str]] = {r["entry"]: [] for r in own if not r["series"]}
        for concurrency in dict.fromkeys(speed["concurrency"] for speed in own):
            here = {r["entry"]: r["throughput"] for r in own if r["concurrency"] == concurrency}
            best, base = max(here, key=lambda entry: here[entry]), here.get(baseline)
            against = ""
            if base and best != baseline:
                against = f", {here[best] / base:.2f} times {baseline}"
            lines.append(
                f"- At concurrency {concurrency} **{best}** is fastest: {here[best]:,.0f} visible "
                f"tokens/s{against}."
            )
            for entry in wins.keys() & here.keys():
                wins[entry] += [str(concurrency)] * bool(base and base > here[entry])
        if wins.pop(baseline, None) is not None:
            lines += [
                f"- {baseline} is faster than {entry} at concurrency {', '.join(won)}."
                if won
                else f"- {baseline} is nowhere faster than {entry}."
                for entry, won in wins.items()
            ]
        return lines

    def accuracy_table(self, workload: str) -> list[str]:
        """Tabulate how right the entries are, with 95 % intervals; empty where nothing judged."""
        base, rows = self.about["baseline"], []
        for a in (a for a in self.accuracies if a["workload"] == workload):
            points = f"{a['difference']:+.1f} ({a['difference_low']:+.1f} to "
            points += f"{a['difference_high']:+.1f})"
            # A difference is to the baseline, so both must be ranked.
            ranked = all(self.is_ranked(entry, workload) for entry in (a["entry"], base))
            other = a["entry"] != base
            rows.append(
                (
                    a["entry"],
                    f"{a['right']} of {a['problems']}",
                    f"{a['right'] / a['problems']:.1%} ({a['low']:.1%} to {a['high']:.1%})",
                    points if other and ranked else "",
                    f"{a['same']} of {a['problems']}" if other else "",
                    a["unstable"],
                )
            )
        header = (
            "entry", "right", "accuracy (95 %)", f"points of {base} (95 %)",
            f"answers equal to {base}'s", "unstable answers",
        )  # fmt: skip
        return [*markdown_table(header, rows), ""] if rows else []

    def speed_table(self, workload: str, *, brief: bool = False) -> list[str]:
        """Tabulate how fast the entries are, without the columns that no entry has a value in.
        brief: the first columns alone, for a terminal."""
        own = [speed for speed in self.speeds if speed["workload"] == workload]
        counts = dict.fromkeys(name for speed in own for name in speed["counts"])
        rows = [_cells(speed, counts) for speed in own]
        titles = [title for title in rows[0] if any(row[title] != "-" for row in rows)]
        titles = [title for title in titles if title in BRIEF] if brief else titles
        return markdown_table(titles, ([row[title] for title in titles] for row in rows))


def _brief(row: Row) -> Row:
    known = {name: value for name, value in row.items() if value not in (None, {})}
    return {n: float(f"{v:.5g}") if isinstance(v, float) else v for n, v in known.items()}


def _facts(facts: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} `{' '.join(map(str, value)) if isinstance(value, list) else value}`"
        for key, value in facts.items()
        if value not in (None, {}, [])
    )


def _cells(row: Row, counts: Iterable[str]) -> dict[str, str]:
    """Format a speed for its line of the table, by column."""

    def number(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    def milliseconds(key: str) -> str:
        if row[key] is None:
            return "-"
        return f"{1e3 * row[key]:,.1f} / {1e3 * row[f'{key}_95']:,.1f}"

    spread = f"{row['throughput_low']:,.0f} to {row['throughput_high']:,.0f}"
    unranked = " (not ranked)" if row["failed"] else ""
    cells = {
        "concurrency": str(row["concurrency"]),
        "entry": row["entry"],
        "tokens/s (slowest to fastest run)": f"{row['throughput']:,.0f} ({spread}){unranked}",
        "tokens/s a request": number(row["request_throughput"]),
        "first token, ms (median / 95 %)": milliseconds("first"),
        "whole answer, ms (median / 95 %)": milliseconds("finished"),
        "prefill, ms": number(row["prefill"] and 1e3 * row["prefill"], 1),
        "tokens/s after prefill": number(row["decode_throughput"]),
        "tokens a request": number(row["tokens"], 1),
        "forwards a request": number(row["forwards"], 1),
        "tokens a forward": number(row["tokens_per_forward"], 2),
        "rows a forward": number(row["rows_per_forward"], 1),
        "p_cache": number(row["p_cache"], 2),
        "tokens a model call": number(row["tokens_per_call"], 2),
        "peak memory, MiB": number(row["peak_bytes"] and row["peak_bytes"] / 2**20),
        "failed": f"{row['failed']} of {row['requests'] * row['repetitions']}",
        "retried": str(row["retried"]),
    }
    return cells | {
        f"{name.replace('_', ' ')} a request": number(row["counts"].get(name), 2) for name in counts
    }


BRIEF = (
    "concurrency", "entry", "tokens/s (slowest to fastest run)", "tokens/s a request",
    "first token, ms (median / 95 %)", "whole answer, ms (median / 95 %)",
)  # fmt: skip
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


# The figures: throughput against concurrency, accuracy against throughput or tokens a forward.


def draw(
    report: Report,
    folder: Path,
    suffixes: Sequence[str] = (".png", ".svg"),
    names: Sequence[str] = ("throughput", "frontier", "forwards"),
) -> None:
    """Write throughput (at more than one concurrency, or without sweeps) and, where answers were
    judged, frontier and, where an option was swept, forwards."""
    from decode import plots

    about, ranked = report.about, report.ranked
    entries = about["config"]["entries"]
    swept = list(dict.fromkeys(entry["model"] for entry in entries if entry.get("series")))
    workloads = list(dict.fromkeys(speed["workload"] for speed in ranked))
    several = len({speed["concurrency"] for speed in ranked}) > 1
    figures: dict[str, tuple[list[Panel], int]] = {}
    if not swept or several:
        panels = [_throughput(report, workload) for workload in workloads]
        figures["throughput"] = panels, min(2, len(panels))
    across = {"frontier": ("throughput", plots.SPEED)}
    if swept:
        across["forwards"] = ("tokens_per_forward", "visible tokens a forward")
    for name, (key, title) in across.items():
        figures[name] = (
            [
                _frontier(report, workload, model, swept, key, title)
                for workload in workloads
                for model in swept or (None,)
            ],
            len(swept) or 1 + several * (len(workloads) > 1),
        )
    for name, (panels, columns) in figures.items():
        # A server does not say how often it called its model: then there is no figure of forwards.
        if name in names and panels and all(panel.series for panel in panels):
            bars = "slowest to fastest run" if name == "throughput" else "95 % intervals"
            caption = f"{about['device']}, {about['date']}; {bars}"
            columns = columns if len(panels) % columns == 0 else 1
            plots.save(panels, caption, folder / name, columns=columns, suffixes=suffixes)


def _throughput(report: Report, workload: str) -> Panel:
    """Draw visible tokens a second over the requests in flight, a line for each entry."""
    from decode.plots import SPEED, Panel, Point, Series

    lines: dict[str, list[Point]] = {}
    for speed in (speed for speed in report.ranked if speed["workload"] == workload):
        values = (speed[f"throughput{end}"] for end in ("", "_low", "_high"))
        lines.setdefault(speed["entry"], []).append(Point(speed["concurrency"], *values))
    series = [Series(name, points, line=True) for name, points in lines.items()]
    return Panel(workload, series, across="requests in flight", up=SPEED, log=True)


def _frontier(
    report: Report, workload: str, model: str | None, swept: Sequence[str], key: str, across: str
) -> Panel:
    """Draw accuracy over `key`: a line for each entry through its concurrencies; of a swept model a
    line for each sweep through its values, at the lowest concurrency, with entries of models
    without sweeps as points."""
    from decode.plots import Panel, Point, Series

    levels = sorted({speed["concurrency"] for speed in report.ranked})
    models = {entry["name"]: entry["model"] for entry in report.about["config"]["entries"]}
    judged = {a["entry"]: a for a in report.accuracies if a["workload"] == workload}
    lines: dict[str, list[Point]] = {}
    for speed in report.ranked:
        name, x = speed["entry"], speed.get(key)
        elsewhere = model is not None and (
            speed["concurrency"] != levels[0] or models[name] in set(swept) - {model}
        )
        if speed["workload"] != workload or name not in judged or x is None or elsewhere:
            continue
        series = speed.get("series")
        label = str(speed["concurrency"]) if len(levels) > 1 else name
        if model is not None:
            label = name.split()[-1] if series else ""
        found = judged[name]
        y = 100 * found["right"] / found["problems"]
        point = Point(x, y, 100 * found["low"], 100 * found["high"], label)
        if key == "throughput":
            point = replace(point, left=speed["throughput_low"], right=speed["throughput_high"])
        lines.setdefault(series or name, []).append(point)
    for points in lines.values():  # only the ends keep their labels, the others lie between
        points[1:-1] = [replace(point, label="") for point in points[1:-1]]
    series = [Series(name, points, line=len(points) > 1) for name, points in lines.items()]
    said = "labels: requests in flight" if len(levels) > 1 else f"{levels[0]} in flight"
    if model is not None:
        said = f"{model}, {levels[0]} in flight"
    return Panel(f"{workload}, {said}", series, across=across)
