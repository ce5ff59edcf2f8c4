"""Draw figures of accuracy against speed, or speed against load: PNG and SVG, light and dark, the
same bytes for the same points.

A decoder has one colour in all figures (`COLORS`, by a word of the entry's name); further entries
of it in a figure are shades of that colour with another marker and line style. Labels stand where
they cover no point, bar, line or other label. Needs matplotlib (the extra `plot`); no display.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from PIL import Image

from d2f.files import write_beside, writing

COLORS = {
    "D2F": "#d1242f", "WeDLM": "#1a7f37", "vLLM": "#0969da", "autoregressive": "#1f2328",
    "self-drafting": "#c99700", "transformers": "#818b98", "llama.cpp": "#8a4600",
    "WINO": "#8250df", "block": "#e16f24", "threshold": "#0b97a5", "FreeDave": "#c2348f",
    "static": "#6b7a2f", "factor": "#5a96d8", "entropy": "#e07a9c",
}  # fmt: skip
"""The colour of each decoder and server. Others take those left over, from the end."""
SHADES = {
    "surer": 1, "one process": 1, "verified": 1, "leak": 1, "BF16": 1,
    "tuned": 2, "n-gram": 2, "dual": 2, "only": 2, "Q8": 2, "streamed": 3, "Q4": 3,
}  # fmt: skip
"""The shade that an entry with these words in its name always has."""
MARKERS = "osD^vPX*"
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1, 2)))
DARK, LIGHT = ("#0d1117", "#e6edf3", "#30363d"), ("#ffffff", "#1f2328", "#e3e6ea")
FAINT = "#9a9a9a"
WIDTH, DPI = 8.5, 200  # 1,700 pixels: text of 9 points is 12 pixels high at half size
SPEED = "visible tokens per second"
ACCURACY = "right, %"


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
    doubles, and bars are bands. log_up: y is logarithmic."""

    title: str
    series: Sequence[Series]
    bound: tuple[float, str] | None = None
    across: str = SPEED
    up: str = ACCURACY
    log: bool = False
    log_up: bool = False


@dataclass(frozen=True)
class Style:
    """Draw a series in a colour with a marker and a line."""

    color: str
    marker: str
    line: Any


def save(
    panels: Sequence[Panel],
    caption: str,
    stem: Path,
    *,
    columns: int | None = None,
    suffixes: Sequence[str] = (".png", ".svg"),
) -> list[Path]:
    """Draw panels and write stem.png, stem.svg and, for a dark page, stem-dark.png and
    stem-dark.svg, each whole or not at all; return their paths."""
    written = []
    # By default ids in an SVG are random, and both formats carry a date or a version.
    fixed = {"svg.hashsalt": "d2f-toolkit", "svg.fonttype": "path"}
    for dark in (False, True):
        figure = draw(panels, caption, columns=columns, dark=dark)
        for suffix in suffixes:
            path = stem.with_name(f"{stem.name}{'-dark' * dark}{suffix}")
            with matplotlib.rc_context(fixed):
                if suffix == ".svg":
                    with writing(path) as file:
                        figure.savefig(file, format="svg", metadata={"Date": None})
                else:
                    raw, small = io.BytesIO(), io.BytesIO()
                    figure.savefig(raw, format="png", dpi=DPI, metadata={"Software": None})
                    # A third of the bytes, and lines look the same.
                    Image.open(raw).convert("RGB").quantize(96).save(small, "PNG", optimize=True)
                    write_beside(path, small.getvalue())
            written.append(path)
    return written


def draw(
    panels: Sequence[Panel], caption: str, *, columns: int | None = None, dark: bool = False
) -> Figure:
    """Draw panels, by default all in a row, below a caption that says what was measured."""
    columns = columns or len(panels)
    rows = len(panels) // columns
    page, ink, grid_color = DARK if dark else LIGHT
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings = {"figure.facecolor": page, "axes.facecolor": page, "savefig.facecolor": page,
                "grid.color": grid_color, "font.size": 9, "axes.titlesize": 10}  # fmt: skip
    with matplotlib.rc_context(settings | dict.fromkeys(inked, ink)):
        size = (WIDTH, 3.1 * rows + 0.7)
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False)
        # Panels above each other share a legend, and all panels where their entries are the same.
        names = [_names(panels[column::columns]) for column in range(columns)]
        shared = all(set(own) == set(names[0]) for own in names)
        for column, own in enumerate(names):
            styles = styles_of(own, dark=dark)
            for axes, panel in zip(grid[:, column], panels[column::columns], strict=True):
                _draw(axes, panel, styles)
            found = [axes.get_legend_handles_labels() for axes in grid[:, column]]
            handles = {name: h for hs, ns in found for h, name in zip(hs, ns, strict=True)}
            labels = {p.label for panel in panels for s in panel.series for p in s.points}
            if not handles.keys() <= labels and not (shared and column):
                place: dict[str, Any] = {"loc": "outside lower center", "ncols": 4}
                if not shared:
                    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "ncols": 2}
                ((figure if shared else grid[-1, column]).legend)(
                    handles.values(), handles, fontsize=8, frameon=False, handlelength=2.6, **place
                )
        figure.suptitle(caption, fontsize=7.5, alpha=0.75)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # labels are placed in pixels: the layout is settled
        for axes, panel in zip(grid.flat, panels, strict=True):
            _place_labels(axes, panel, styles_of(_names([panel]), dark=dark), ink)
    return figure


def _names(panels: Iterable[Panel]) -> list[str]:
    """Name what has a colour of its own."""
    series = (s for panel in panels for s in panel.series if not (s.light or s.faint))
    return list(dict.fromkeys(s.name for s in series))


def styles_of(names: Sequence[str], *, dark: bool = False) -> dict[str, Style]:
    """Choose the style of each entry of a figure, or of a column of one."""
    kinds = {name: next((kind for kind in COLORS if kind in name), "") for name in names}
    fixed = {name: next((SHADES[w] for w in SHADES if w in name), None) for name in names}
    left = [kind for kind in reversed(COLORS) if kind not in kinds.values()] or list(COLORS)
    others = [name for name in names if not kinds[name]]
    found: dict[str, Style] = {}
    taken: set[tuple[str, int]] = set()
    # First those with a shade of their own, then the plainest, which has the decoder's own colour.
    for name in sorted(names, key=lambda name: (not fixed[name], len(name) * bool(kinds[name]))):
        kind, shade = kinds[name], fixed[name] or 0
        if not kind:
            number = others.index(name)
            kind, shade = left[number % len(left)], number // len(left)
        while (kind, shade) in taken:
            shade += 1
        taken.add((kind, shade))
        marker = (list(COLORS).index(kind) + 3 * shade) % len(MARKERS)
        found[name] = Style(_shade(COLORS[kind], shade, dark), MARKERS[marker], LINES[shade % 4])
    return found


def _shade(color: str, number: int, dark: bool) -> str:
    """Mix a colour with white or black: the colour itself, lighter, darker, and further."""
    mixes = ((1.0, 0.0), (1.0, 0.35), (0.0, 0.45), (1.0, 0.55), (0.0, 0.7), (1.0, 0.7))
    toward, share = mixes[min(number, 5)]
    if dark and not toward:  # near black it would not be seen
        share *= 0.7
    mixed = np.asarray(to_rgb(color)) * (1 - share) + toward * share
    if dark:  # black becomes white; the others are seen on black once they are lighter
        mixed = 1 - mixed if color == COLORS["autoregressive"] else mixed * 0.75 + 0.25
    return to_hex(tuple(mixed))


def _draw(axes: Axes, panel: Panel, styles: dict[str, Style]) -> None:
    style = Style(FAINT, "o", "-")
    for series in panel.series:
        # A light series has the colour of the one before it.
        style = styles.get(series.name, style)
        if series.points:
            _draw_series(axes, series, style, band=panel.log)
    if panel.bound is not None:
        y, name = panel.bound
        axes.axhline(y, color=FAINT, linewidth=1, linestyle=(0, (5, 3)), label=name)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.across)
    axes.set_ylabel(panel.up)
    axes.grid(linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.12)
    if panel.log_up:
        axes.set_yscale("log")
    elif panel.log:
        axes.set_ylim(bottom=0)
    if panel.log:
        levels = sorted({point.x for series in panel.series for point in series.points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, [f"{level:g}" for level in levels])
        axes.minorticks_off()


def _draw_series(axes: Axes, series: Series, style: Style, *, band: bool) -> None:
    points = sorted(series.points, key=lambda p: p.x)
    x, y = [p.x for p in points], [p.y for p in points]
    small = series.light or series.faint
    color = FAINT if series.faint else style.color
    if band:
        lows, highs = [p.low for p in points], [p.high for p in points]
        axes.fill_between(x, lows, highs, color=color, alpha=0.13, linewidth=0)
    # Not below 0, by the rounding of an interval at 100 %.
    bars = [[max(0.0, p.y - p.low) for p in points], [max(0.0, p.high - p.y) for p in points]]
    across = [[p.x - (p.left or p.x) for p in points], [(p.right or p.x) - p.x for p in points]]
    axes.errorbar(
        x,
        y,
        yerr=None if series.faint or band else bars,
        xerr=across if any(map(any, across)) else None,
        fmt="o" if small else style.marker,
        markersize=3.5 if small else 5.5,
        color=color,
        elinewidth=0.7,
        capsize=0 if small else 1.5,
        alpha=0.5 if small else 1.0,
        linestyle=style.line if series.line else "none",
        linewidth=1.3,
        label=series.name,
        zorder=2 if small else 3,
    )
    if chosen := [p for p in points if p.chosen]:
        place = [p.x for p in chosen], [p.y for p in chosen]
        ring: dict[str, Any] = {"facecolors": "none", "edgecolors": "#d1242f", "linewidths": 1.6}
        axes.scatter(*place, s=150, label="chosen", zorder=4, **ring)


# Labels: each at the nearest place around its point that is free.

Pixels = npt.NDArray[np.float64]  # [n, 2]
CELL = 3  # pixels: a figure is searched for free places in squares of so many


def _place_labels(axes: Axes, panel: Panel, styles: dict[str, Style], ink: str) -> None:
    labelled = [(s, p) for s in panel.series for p in s.points if p.label]
    if not labelled:
        return
    room = _Room(axes)
    for series in panel.series:
        points = sorted(series.points, key=lambda p: p.x)
        if not series.faint:
            for p in points:
                room.take(room.line((p.x, p.low), (p.x, p.high)))
                room.take(room.line((p.left or p.x, p.y), (p.right or p.x, p.y)))
        for a, b in pairwise(points if series.line else ()):
            room.take(room.line((a.x, a.y), (b.x, b.y)))
        for p in points:
            room.take(room.pixels((p.x, p.y)) + [shift * 8 for shift in _RING])
    if panel.bound is not None:
        room.take(room.line(*((x, panel.bound[0]) for x in axes.get_xlim())))
    places = np.array([room.pixels((p.x, p.y)) for _, p in labelled])
    # Those in a crowd first: they have the fewest places.
    crowd = [(np.hypot(*(places - place).T) < 150).sum() for place in places]
    for number in sorted(range(len(places)), key=lambda i: -crowd[i]):
        series, point = labelled[number]
        color = styles[series.name].color if series.name in styles else ink
        text = axes.text(point.x, point.y, point.label, fontsize=8, color=color, zorder=5)
        box, leader, free = room.free_place(*text.get_window_extent().size, places[number])
        if series.line and not free:  # the legend names the line
            text.remove()
            continue
        text.set(position=room.data(box[0]), ha="left", va="bottom")
        room.boxes.append(box)
        if len(leader) > 4:  # else it is plain which point is meant
            room.take(leader)
            ends = np.array([room.data(leader[0]), room.data(leader[-1])])
            axes.plot(*ends.T, color=color, linewidth=0.6, alpha=0.7, scalex=False, scaley=False)


class _Room:
    """The room that is left on axes, in pixels from their lower left corner: squares that something
    is drawn in, and the boxes of labels, [2, 2], each by its lower left and upper right."""

    def __init__(self, axes: Axes):
        box = axes.get_window_extent()
        self.to_pixels, self.origin = axes.transData, np.array([box.x0, box.y0])
        self.size = np.array([box.width, box.height])
        self.taken = np.zeros(tuple((self.size // CELL).astype(int) + 2), dtype=bool)
        self.boxes: list[Pixels] = []

    def pixels(self, point: tuple[float, float]) -> Pixels:
        return np.asarray(self.to_pixels.transform(point)) - self.origin

    def data(self, pixels: Pixels) -> tuple[float, float]:
        x, y = self.to_pixels.inverted().transform(pixels + self.origin)
        return x, y

    def line(self, start: tuple[float, float], end: tuple[float, float]) -> Pixels:
        """Return pixels of a line between two points of the data."""
        return _samples(self.pixels(start), self.pixels(end))

    def _squares(self, pixels: Pixels) -> tuple[Any, ...]:
        squares = (pixels // CELL).astype(int)
        return tuple(squares[((squares >= 0) & (squares < self.taken.shape)).all(-1)].T)

    def take(self, pixels: Any) -> None:
        self.taken[self._squares(np.asarray(pixels))] = True

    def free_place(self, width: float, height: float, point: Pixels) -> tuple[Pixels, Pixels, bool]:
        """Find the box of a label for a point, the pixels of the line that leads to it, and whether
        it covers nothing."""
        half, margin = np.array([width, height]) / 2, np.array([[-4], [4]])
        best: tuple[float, Pixels, Pixels, bool] | None = None
        for distance in (14, 22, 32, 44, 58, 76, 98, 124, 155, 190, 230):
            for shift in _RING:
                middle = point + shift * (distance + half)
                low, high = box = np.array([middle - half, middle + half])
                outside = bool((low < 0).any() or (high > self.size).any())
                (left, right), (bottom, top) = ((box + margin) // CELL).clip(0).astype(int).T
                covers = self.taken[left : right + 1, bottom : top + 1].sum() + 100 * outside
                apart = ((low - 4 > b[1]).any() or (high + 4 < b[0]).any() for b in self.boxes)
                covers += 100 * sum(not one for one in apart)
                leader = _samples(point, point.clip(low - 3, high + 3))[5:]
                crossed = self.taken[self._squares(leader)].sum() / 3
                through = (((b[0] - 2 < leader) & (leader < b[1] + 2)).all(-1) for b in self.boxes)
                crossed += 3 * sum(bool(one.any()) for one in through)
                cost = distance + 50 * covers + 15 * crossed
                if best is None or cost < best[0]:
                    best = cost, box, leader, not covers
        assert best is not None
        return best[1:]


def _samples(start: Pixels, end: Pixels) -> Pixels:
    """Return points of a line, at most `CELL` pixels apart."""
    count = int(np.hypot(*(end - start)) // CELL) + 2
    return start + np.linspace(0, 1, count)[:, None] * (end - start)


# 16 directions, to the right and above first.
_RING = [
    np.array([np.cos(turn * np.pi / 8), np.sin(turn * np.pi / 8)])
    for turn in sorted(range(16), key=lambda turn: min(abs(turn - 2), 18 - turn))
]
