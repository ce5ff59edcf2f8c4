"""Figures of accuracy against speed: PNG and SVG, the same bytes for the same points.

Needs matplotlib (the extra `plot`). No pyplot: nothing here depends on a display or on what else
a process draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.transforms import Bbox

from d2f.files import writing

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, told apart by people who see fewer colours."""
FAINT = "#9a9a9a"
MARKERS = "osDv^Pp"
PANEL_INCHES = (7.2, 5.0)
DPI = 150
LABEL_SIZE = 8
LABEL_OFFSETS = [
    (sign * dx, dy)  # pixels, the near ones first
    for distance in (24, 40, 60, 90, 130)
    for sign in (1, -1)
    for dx, dy in ((distance, distance), (distance, -distance), (distance, 0))
]


@dataclass(frozen=True)
class Point:
    """One setting. x: visible tokens per second, or what its panel says. accuracy, low, high:
    shares, with the 95 % interval. slowest, fastest: range of x over repetitions. label: written
    beside it. chosen: marked."""

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
    """Points of one kind. line: joined, fastest last. light: small, in the colour of the series
    before. faint: grey and without error bars."""

    name: str
    points: Sequence[Point]
    line: bool = False
    light: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes. bound: an accuracy to mark with a line, a share, and what it is. across:
    what the points' `x` is."""

    title: str
    series: Sequence[Series]
    bound: tuple[float, str] | None = None
    across: str = "speed, visible tokens per second"


def frontier(
    panels: Sequence[Panel],
    caption: str,
    *,
    columns: int | None = None,
    inches: tuple[float, float] = PANEL_INCHES,
) -> Figure:
    """Accuracy against tokens per second, a panel a task. caption: what was measured, on what.
    columns: panels in a row, of which all rows have as many; by default there is one row. inches:
    of a panel."""
    figure, grid = new_figure(len(panels), caption, columns=columns, inches=inches)
    pairs = list(zip(grid, panels, strict=True))
    for axes, panel in pairs:
        _draw(axes, panel)
    figure.draw_without_rendering()  # settles the layout, labels are placed in it
    for axes, panel in pairs:
        # In pixels, which are known only once the layout is settled.
        _place_labels(axes, panel)
    return figure


def new_figure(
    panels: int,
    caption: str,
    *,
    columns: int | None = None,
    inches: tuple[float, float] = PANEL_INCHES,
) -> tuple[Figure, list[Axes]]:
    """A figure of so many pairs of axes, each of `inches`, with what was measured below them."""
    columns = columns or panels
    lines = panels // columns
    size = inches[0] * columns, inches[1] * lines
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.supxlabel(caption, fontsize=8, color="#444444")
    return figure, list(figure.subplots(lines, columns, squeeze=False).flat)


def dress(axes: Axes, title: str, across: str) -> None:
    """What all axes have. across: what is shown over."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(across)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_above(figure: Figure, labelled: Axes) -> None:
    """What the lines of `labelled` are, above all panels, in as many columns, at most 4, as fit."""
    handles, labels = labelled.get_legend_handles_labels()
    for columns in (4, 3, 2, 1):
        legend = figure.legend(
            handles, labels, loc="outside upper center", ncols=columns, frameon=False, fontsize=9
        )
        figure.draw_without_rendering()
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def save(figure: Figure, stem: FilePath) -> list[FilePath]:
    """Write stem.png and stem.svg, each whole or not at all; the paths."""
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
        # Such a series goes with the one before and shares its colour.
        number += not (series.light or series.faint)
        if series.points:
            _draw_series(axes, series, max(number, 0))
    if panel.bound is not None:
        value, what = panel.bound
        axes.axhline(100 * value, color="#444444", linewidth=1, linestyle=(0, (5, 3)), label=what)
    dress(axes, panel.title, panel.across)
    axes.set_ylabel("accuracy, % of problems right")
    axes.margins(x=0.15, y=0.2)
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _marker(number: int) -> str:
    """A series' marker; no two of the first 49 series share marker and colour."""
    return MARKERS[(number + number // len(COLORS)) % len(MARKERS)]


def _draw_series(axes: Axes, series: Series, number: int) -> None:
    points = sorted(series.points, key=lambda p: p.x)
    x = [p.x for p in points]
    y = [100 * p.accuracy for p in points]
    up = [100 * max(0.0, p.high - p.accuracy) for p in points]  # 0 up to rounding at 100 %
    down = [100 * max(0.0, p.accuracy - p.low) for p in points]
    left = [p.x - (p.slowest or p.x) for p in points]
    right = [(p.fastest or p.x) - p.x for p in points]
    small = series.light or series.faint
    axes.errorbar(
        x,
        y,
        yerr=None if series.faint else [down, up],
        xerr=[left, right] if any(left + right) else None,
        fmt="o" if small else _marker(number),
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
    """Each label where it and the line to its point cover no point, error bar, curve or other
    label, as near its point as that can be."""
    inside, taken = axes.get_window_extent(), _boxes(axes, panel)
    curves = [
        Path(sorted(_pixels(axes, point) for point in series.points))
        for series in panel.series
        if series.line and series.points
    ]
    labels: list[Bbox] = []
    lines: list[Path] = []
    for point in (p for series in panel.series for p in series.points if p.label):
        x, y = _pixels(axes, point)
        width, height = _size(axes, point.label)
        best: tuple[float, Bbox, Path] | None = None
        for dx, dy in LABEL_OFFSETS:
            left = x + dx - (width if dx < 0 else 0)
            place = Bbox.from_bounds(left, y + dy - height / 2, width, height)
            # From the point to the nearest place on the label's middle line.
            line = Path([(x, y), (min(max(x, place.x0), place.x1), y + dy)])
            # Everything covered costs 1, leaving the axes 5. Offsets come nearest first and a later
            # one must be strictly better, so of equal ones the nearest is taken.
            cost = (
                sum(place.padded(2).overlaps(box) for box in taken + labels)
                + sum(line.intersects_bbox(box, filled=False) for box in labels)
                + sum(other.intersects_bbox(place, filled=False) for other in lines + curves)
                + 5 * (not _within(place, inside))
            )
            if best is None or cost < best[0]:
                best = (cost, place, line)
        assert best is not None
        _, place, line = best
        labels.append(place)
        lines.append(line)
        axes.annotate(
            point.label,
            (point.x, 100 * point.accuracy),
            xytext=((place.x0 - x) * 72 / DPI, (place.y0 - y) * 72 / DPI),
            textcoords="offset points",
            va="bottom",
            fontsize=LABEL_SIZE,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
            arrowprops={
                "arrowstyle": "-",
                "color": "#8a8a8a",
                "linewidth": 0.6,
                "shrinkB": 5,
                "relpos": (0 if place.x0 > x else 1, 0.5),
            },
            zorder=5,
        )


def _boxes(axes: Axes, panel: Panel) -> list[Bbox]:
    """What labels must not cover, in pixels: points that are not faint, their error bars, and the
    bound."""
    boxes = []
    if panel.bound is not None:
        inside = axes.get_window_extent()
        level = float(axes.transData.transform((0, 100 * panel.bound[0]))[1])
        boxes.append(Bbox([[inside.x0, level - 2], [inside.x1, level + 2]]))
    for point in (p for series in panel.series if not series.faint for p in series.points):
        x, y = _pixels(axes, point)
        around = 22 if point.chosen else 10
        boxes.append(Bbox([[x - around, y - around], [x + around, y + around]]))
        for share in (point.low, point.high):
            end = _pixels(axes, replace(point, accuracy=share))[1]
            boxes.append(Bbox([[x - 6, min(y, end)], [x + 6, max(y, end)]]))
        for speed in (point.slowest, point.fastest):
            if speed is not None:
                end = _pixels(axes, replace(point, x=speed))[0]
                boxes.append(Bbox([[min(x, end), y - 6], [max(x, end), y + 6]]))
    return boxes


def _pixels(axes: Axes, point: Point) -> tuple[float, float]:
    x, y = axes.transData.transform((point.x, 100 * point.accuracy))
    return float(x), float(y)


def _size(axes: Axes, label: str) -> tuple[float, float]:
    """Width and height of a label, in pixels."""
    text = axes.text(0, 0, label, fontsize=LABEL_SIZE)
    box = text.get_window_extent()
    text.remove()
    return box.width, box.height


def _within(inner: Bbox, outer: Bbox) -> bool:
    return (
        outer.x0 <= inner.x0
        and inner.x1 <= outer.x1
        and outer.y0 <= inner.y0
        and inner.y1 <= outer.y1
    )
