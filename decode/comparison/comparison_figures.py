"""The figures of a comparison: throughput against concurrency, accuracy against throughput."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from decode.comparison.comparison_report import ComparisonReport
from decode.comparison.statistics import Accuracy, Speed
from decode.reporting.plots import (
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
