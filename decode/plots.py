"""Draw figures of accuracy against speed, or speed against load: PNG and SVG, the same bytes for
the same points.

Needs matplotlib and adjustText (the extra `plot`); no display.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from adjustText import adjust_text
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from d2f.files import writing

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's palette, for readers who see fewer colours."""
FAINT = "#9a9a9a"
MARKERS = "osDv^Pp"
DPI = 150
SPEED = "speed, visible tokens per second"
ACCURACY = "accuracy, % of problems right"


@dataclass(frozen=True)
class Point:
    """A measurement at (x, y), with bars from low to high and from left to right. label: text
    beside it. chosen: circle it."""

    x: float
    y: float
    low: float
    high: float
    label: str = ""
    left: float | None = None
    right: float | None = None
    chosen: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one kind. line: join them in the order of x. light: small marks in the colour of
    the series before. faint: small grey marks without error bars."""

    name: str
    points: Sequence[Point]
    line: bool = False
    light: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Panel:
    """Describe two axes. bound: a y to mark with a line, and its name. across, up: the axes. log: x
    doubles."""

    title: str
    series: Sequence[Series]
    bound: tuple[float, str] | None = None
    across: str = SPEED
    up: str = ACCURACY
    log: bool = False


def draw(panels: Sequence[Panel], caption: str, *, columns: int | None = None) -> Figure:
    """Draw panels, by default all in a row, above a caption that says what was measured."""
    columns = columns or len(panels)
    rows = len(panels) // columns
    figure = Figure(figsize=(7.2 * columns, 5.0 * rows), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.supxlabel(caption, fontsize=8, color="#444444")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=True):
        _draw(axes, panel)
    figure.draw_without_rendering()  # labels are placed in pixels: the layout must be settled
    for axes, panel in zip(grid, panels, strict=True):
        _place_labels(axes, panel)
    return figure


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write stem.png and stem.svg, each whole or not at all, and return their paths."""
    written = []
    # By default ids in an SVG are random, and both formats carry a date or a version.
    fixed = {"svg.hashsalt": "d2f-toolkit", "svg.fonttype": "path"}
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
        path = stem.with_name(stem.name + suffix)
        with matplotlib.rc_context(fixed), writing(path) as file:
            figure.savefig(file, format=suffix[1:], dpi=DPI, metadata=metadata)
        written.append(path)
    return written


def _draw(axes: Axes, panel: Panel) -> None:
    number = -1
    for series in panel.series:
        # A light or faint series shares the colour of the one before it.
        number += not (series.light or series.faint)
        if series.points:
            _draw_series(axes, series, max(number, 0))
    if panel.bound is not None:
        y, name = panel.bound
        axes.axhline(y, color="#444444", linewidth=1, linestyle=(0, (5, 3)), label=name)
    axes.set_title(panel.title, fontsize=11)
    axes.set_xlabel(panel.across)
    axes.set_ylabel(panel.up)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15, y=0.2)
    if panel.log:
        levels = sorted({point.x for series in panel.series for point in series.points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, [f"{level:g}" for level in levels])
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _draw_series(axes: Axes, series: Series, number: int) -> None:
    points = sorted(series.points, key=lambda p: p.x)
    x, y = [p.x for p in points], [p.y for p in points]
    # Not below 0, by the rounding of an interval at 100 %.
    bars = [[max(0.0, p.y - p.low) for p in points], [max(0.0, p.high - p.y) for p in points]]
    across = [[p.x - (p.left or p.x) for p in points], [(p.right or p.x) - p.x for p in points]]
    small = series.light or series.faint
    # No two of the first 49 series share marker and colour.
    marker = MARKERS[(number + number // len(COLORS)) % len(MARKERS)]
    axes.errorbar(
        x,
        y,
        yerr=None if series.faint else bars,
        xerr=across if any(map(any, across)) else None,
        fmt="o" if small else marker,
        markersize=4 if small else 6,
        color=FAINT if series.faint else COLORS[number % len(COLORS)],
        elinewidth=0.7 if small else 1.1,
        capsize=0 if small else 2.5,
        alpha=0.5 if small else 1.0,
        linestyle="-" if series.line else "none",
        linewidth=1.2,
        label=series.name,
        zorder=2 if small else 3,
    )
    if chosen := [p for p in points if p.chosen]:
        axes.scatter(
            [p.x for p in chosen],
            [p.y for p in chosen],
            s=196,
            facecolors="none",
            edgecolors="#c00000",
            linewidths=1.8,
            label="chosen",
            zorder=4,
        )


def _place_labels(axes: Axes, panel: Panel) -> None:
    """Write the labels where they cover no point and no other label."""
    points = [p for series in panel.series if not series.faint for p in series.points]
    labels = [axes.text(p.x, p.y, p.label, fontsize=8, zorder=5) for p in points if p.label]
    if not labels:
        return
    adjust_text(
        labels,
        x=[p.x for p in points],
        y=[p.y for p in points],
        ax=axes,
        expand=(1.2, 1.8),
        iter_lim=500,  # its default is a limit of time, which is not the same on each machine
        arrowprops={"arrowstyle": "-", "color": "#8a8a8a", "linewidth": 0.6},
    )
