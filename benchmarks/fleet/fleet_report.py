"""What `benchmarks.fleet` found: a table, and the rate a replica against their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from decode.plots import COLORS, MARKERS, dress, new_figure
from decode.report import markdown_table

COLUMNS = (
    "way", "arrivals", "router", "replicas", "requests/s a replica", "of its capacity", "busy",
    "requests a forward", "answer, ms (95 %)", "first token, ms (95 %)",
)  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a table in Markdown."""
    return markdown_table(COLUMNS, map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[str]:
    named = [row["way"], row["arrivals"], row["router"], f"{row['replicas']:,}"]
    seen = row["seen"]
    if seen is None:
        return [*named, "none meets the target", *[""] * 5]
    return [
        *named,
        f"{row['rate']:,.1f}",
        f"{row['rate'] / row['capacity']:.0%}",
        f"{seen['busy']:.0%}",
        f"{seen['in_forward']:.1f}",
        f"{seen['latency_50']:.0f} ({seen['latency_95']:.0f})",
        f"{seen['first_50']:.0f} ({seen['first_95']:.0f})",
    ]


def fleet_figure(rows: Sequence[dict[str, Any]], caption: str) -> Figure:
    """A panel a kind of arrivals, a line a way; the router that does not look is dashed."""
    kinds = list(dict.fromkeys(row["arrivals"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    routers = list(dict.fromkeys(row["router"] for row in rows))
    figure, panels = new_figure(len(kinds), caption)
    for axes, kind in zip(panels, kinds, strict=True):
        for number, way in enumerate(ways):
            for router, style in zip(routers, ("-", "--"), strict=False):
                key = kind, way, router
                own = [r for r in rows if (r["arrivals"], r["way"], r["router"]) == key]
                axes.plot(
                    [row["replicas"] for row in own],
                    [row["rate"] for row in own],
                    style,
                    label=f"{way}, {router}",
                    color=COLORS[number],
                    marker=MARKERS[number],
                    markersize=5,
                )  # fmt: skip
        axes.set_xscale("log")
        ticks = sorted({row["replicas"] for row in rows})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_ylabel("requests a second and replica at the target")
        dress(axes, kind, "replicas")
    panels[0].legend(frameon=False, fontsize=8)
    return figure
