"""Throughput and time to the first token against the rate of requests, a line a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decode.plots import COLORS, MARKERS, dress, legend_above, new_figure

SHOWN = (
    ("tokens_per_second", "tokens a second", "linear"),
    ("first_ms", "first token after, ms (median; band to 95 %)", "log"),
)


def load_figure(points: Sequence[dict[str, Any]], caption: str) -> Figure:
    """A row a tool: tokens a second, then the time to the first token."""
    tools = list(dict.fromkeys(point["tool"] for point in points))
    servers = list(dict.fromkeys(point["server"] for point in points))
    panels = len(tools) * len(SHOWN)
    figure, grid = new_figure(panels, caption, columns=len(SHOWN), inches=(5.6, 4.2))
    for row, tool in enumerate(tools):
        for column, (value, label, scale) in enumerate(SHOWN):
            axes = grid[row * len(SHOWN) + column]
            for i, server in enumerate(servers):
                own = [p for p in points if (p["tool"], p["server"]) == (tool, server)]
                _line(axes, sorted(own, key=lambda p: p["rate"]), value, i)
            axes.set_xscale("log", base=2)
            axes.set_yscale(scale)
            ticks = sorted({point["rate"] for point in points})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_ylabel(label)
            dress(axes, tool, "requests a second")
    legend_above(figure, grid[0])
    return figure


def _line(axes: Axes, own: Sequence[dict[str, Any]], value: str, number: int) -> None:
    rates = [point["rate"] for point in own]
    found = [point[value] for point in own]
    color = COLORS[number % len(COLORS)]
    marker = MARKERS[number % len(MARKERS)]
    name = own[0]["server"] if own else ""
    axes.plot(rates, found, label=name, color=color, marker=marker, markersize=5)
    if value == "first_ms":
        high = [point["first_ms_95"] for point in own]
        axes.fill_between(rates, found, high, color=color, alpha=0.15, linewidth=0)
