"""Draw figures of accuracy against speed: PNG and SVG, the same bytes for the same points.

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


@dataclass(frozen=True)
class Point:
    """One setting.

    x: visible tokens per second, or what its panel says. accuracy, low, high: shares, with the
    95 % interval. slowest, fastest: the range of x over repetitions. label: text beside it.
    chosen: circle it.
    """

    x: float
    accuracy: float
    low: float
    high: float
    label: str = ""
    slowest: float | None = None
    fastest: float | None = None
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
    """One pair of axes. bound: a share to mark with a line, and its name. across: the x axis."""

    title: str
    series: Sequence[Series]
    bound: tuple[float, str] | None = None
    across: str = "speed, visible tokens per second"


def frontier(panels: Sequence[Panel], caption: str, *, columns: int | None = None) -> Figure:
    """Draw accuracy against speed.

    Args:
        panels: one for each task.
        caption: what was measured, on what.
        columns: panels in a row; by default all of them.
    """
    figure, grid = new_figure(len(panels), caption, columns=columns)
    for axes, panel in zip(grid, panels, strict=True):
        _draw(axes, panel)
    figure.draw_without_rendering()  # labels are placed in pixels: the layout must be settled
    for axes, panel in zip(grid, panels, strict=True):
        _place_labels(axes, panel)
    return figure


def new_figure(
    panels: int,
    caption: str,
    *,
    columns: int | None = None,
    inches: tuple[float, float] = (7.2, 5.0),
) -> tuple[Figure, list[Axes]]:
    """Make a figure with so many pairs of axes, each of `inches`, and the caption below them."""
    columns = columns or panels
    lines = panels // columns
    size = inches[0] * columns, inches[1] * lines
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.supxlabel(caption, fontsize=8, color="#444444")
    return figure, list(figure.subplots(lines, columns, squeeze=False).flat)


def dress(axes: Axes, title: str, across: str) -> None:
    """Give axes the common style. across: the label of the x axis."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(across)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_above(figure: Figure, labelled: Axes) -> None:
    """Put the legend of `labelled` above all panels, in at most 4 columns and as many as fit."""
    handles, labels = labelled.get_legend_handles_labels()
    for columns in (4, 3, 2, 1):
        legend = figure.legend(
            handles, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=9
        )
        figure.draw_without_rendering()
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


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
        share, name = panel.bound
        axes.axhline(100 * share, color="#444444", linewidth=1, linestyle=(0, (5, 3)), label=name)
    dress(axes, panel.title, panel.across)
    axes.set_ylabel("accuracy, % of problems right")
    axes.margins(x=0.15, y=0.2)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _draw_series(axes: Axes, series: Series, number: int) -> None:
    points = sorted(series.points, key=lambda p: p.x)
    y = [100 * p.accuracy for p in points]
    up = [100 * max(0.0, p.high - p.accuracy) for p in points]  # rounding at 100 %
    down = [100 * max(0.0, p.accuracy - p.low) for p in points]
    left = [p.x - (p.slowest or p.x) for p in points]
    right = [(p.fastest or p.x) - p.x for p in points]
    small = series.light or series.faint
    # No two of the first 49 series share marker and colour.
    marker = MARKERS[(number + number // len(COLORS)) % len(MARKERS)]
    axes.errorbar(
        [p.x for p in points],
        y,
        yerr=None if series.faint else [down, up],
        xerr=[left, right] if any(left + right) else None,
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
    chosen = [p for p in points if p.chosen]
    if chosen:
        axes.plot(
            [p.x for p in chosen],
            [100 * p.accuracy for p in chosen],
            linestyle="none",
            marker="o",
            markersize=14,
            markerfacecolor="none",
            markeredgecolor="#c00000",
            markeredgewidth=1.8,
            label="chosen",
            zorder=4,
        )


def _place_labels(axes: Axes, panel: Panel) -> None:
    """Write the labels where they cover no point and no other label."""
    points = [p for series in panel.series if not series.faint for p in series.points]
    labels = [
        axes.text(p.x, 100 * p.accuracy, p.label, fontsize=8, zorder=5) for p in points if p.label
    ]
    adjust_text(
        labels,
        x=[p.x for p in points],
        y=[100 * p.accuracy for p in points],
        ax=axes,
        expand=(1.2, 1.8),
        iter_lim=500,  # its default is a limit of time, which is not the same on each machine
        arrowprops={"arrowstyle": "-", "color": "#8a8a8a", "linewidth": 0.6},
    )
