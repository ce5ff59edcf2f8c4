"""The figures of a comparison: throughput against concurrency, accuracy against throughput."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from d2f.errors import InputError
from decode.comparison.report import Report

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*"


def check_figures() -> None:
    """Raise InputError where matplotlib is missing."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise InputError(
            "figures need matplotlib: pip install 'd2f-toolkit[plot]', or give --figures false"
        )


def draw(report: Report, folder: Path) -> None:
    """Write throughput.png, throughput.svg, frontier.png and frontier.svg."""
    for name, figure in (("throughput", _throughput(report)), ("frontier", _frontier(report))):
        if figure is not None:
            save(figure, folder / name)


def save(figure: Any, path: Path) -> None:
    """PNG and SVG of a figure, the same bytes for the same figure."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        for kind, metadata in (("png", {}), ("svg", {"Date": None})):
            beside = path.with_name(f"{path.name}.writing.{kind}")
            figure.savefig(beside, dpi=150, metadata=metadata)
            os.replace(beside, path.with_suffix(f".{kind}"))


def _throughput(report: Report) -> Any:
    """A panel a workload: visible tokens a second over concurrency, a line an entry, its band from
    the slowest to the fastest repetition."""
    figure, panels = _panels(report)
    for panel, workload in zip(panels, report.workloads, strict=True):
        for i, entry in enumerate(_entries(report)):
            own = [r for r in report.rows if (r.workload, r.entry) == (workload, entry)]
            x = [row.concurrency for row in own]
            style = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
            panel.plot(x, [row.throughput for row in own], label=entry, markersize=5, **style)
            low, high = [r.throughput_low for r in own], [r.throughput_high for r in own]
            panel.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        ticks = sorted({r.concurrency for r in report.rows})
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set_ylim(bottom=0)
        panel.set_title(workload)
        panel.set_xlabel("requests in flight")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("visible tokens a second")
    return _finish(figure, panels, report)


def _frontier(report: Report) -> Any:
    """A panel a workload: accuracy with its 95 % interval over visible tokens a second, a point an
    entry at the lowest and at the highest concurrency."""
    workloads = {a.workload for a in report.accuracies}
    if not workloads:
        return None
    from matplotlib.ticker import ScalarFormatter

    figure, panels = _panels(report)
    counts = sorted({r.concurrency for r in report.rows})
    for panel, workload in zip(panels, report.workloads, strict=True):
        for i, entry in enumerate(_entries(report)):
            found = report.accuracy(entry, workload)
            own = [
                row
                for row in report.rows
                if (row.workload, row.entry) == (workload, entry)
                and row.concurrency in (counts[0], counts[-1])
            ]
            if found is None or not own:
                continue
            color, marker = COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]
            share = 100 * found.right / found.problems
            down, up = share - 100 * found.low, 100 * found.high - share
            x = [row.throughput for row in own]
            panel.plot(x, [share] * len(own), color=color, alpha=0.4, linewidth=1)
            for row in own:
                first = row.concurrency == counts[0]
                panel.errorbar(
                    row.throughput, share, yerr=[[down], [up]], color=color, marker=marker,
                    markerfacecolor=color if first else "white", capsize=2, linestyle="",
                    label=entry if first else None,
                )  # fmt: skip
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_formatter(ScalarFormatter())
        panel.tick_params(axis="x", which="minor", labelsize=7, rotation=45)
        panel.set_title(workload)
        panel.set_xlabel(
            f"visible tokens a second (filled: {counts[0]} in flight, hollow: {counts[-1]})"
        )
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("right answers, %")
    return _finish(figure, panels, report)


def _panels(report: Report) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    count = len(report.workloads)
    figure = Figure(figsize=(5.2 * count + 0.6, 4.2), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    return figure, list(panels)


def _finish(figure: Any, panels: list[Any], report: Report) -> Any:
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    figure.supxlabel(f"{report.about['device']}, {report.about['date']}", fontsize=8)
    return figure


def _entries(report: Report) -> list[str]:
    return list(report.about["entries"])
