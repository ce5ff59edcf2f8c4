"""python -m benchmarks.ablation.figures FOLDER

Draws an ablation from its report.json alone: accuracy over visible tokens a forward, a PNG and an
SVG for each setting (a column a task, a row a line of decodings, a curve a variant) and for the
untrained models. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ablation.results import Results
from d2f.checkpoint import read_object
from d2f.command import CommandParser
from d2f.errors import InputError
from decode.cli import command, require_matplotlib

if TYPE_CHECKING:
    from decode.plots import Panel, Series

INCHES = (5.0, 4.0)  # of a panel
ACROSS = "visible tokens a forward"


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """The figures of a report; their paths."""
    from decode.plots import frontier, save

    results, written = Results(report), []
    caption = (
        f"{report['title']}: accuracy and its 95 % interval over problems and seeds, on "
        f"{report['config']['problems']} {report['config']['split']} problems a task"
    )
    for name, grid in (
        *((setting or "variants", _of_variants(results, setting)) for setting in results.settings),
        ("untrained", _of_untrained(results)),
    ):
        # A row of the figure of which nothing is measured yet is left out.
        rows = [row for row in grid if any(s.points for panel in row for s in panel.series)]
        if rows:
            panels = [panel for row in rows for panel in row]
            figure = frontier(panels, caption, columns=len(results.tasks), inches=INCHES)
            written += save(figure, folder / name.replace(" ", "-"))
    return written


def _of_variants(results: Results, setting: str) -> list[list[Panel]]:
    """A row of panels for each line, a panel for each task, with a series for each variant."""
    from decode.plots import Panel

    variants = [variant["name"] for variant in results.report["config"]["variants"]]
    return [
        [
            Panel(
                f"{task}, {line}",
                [_series(results, v, v, setting, task, decodings) for v in variants],
                across=ACROSS,
            )
            for task in results.tasks
        ]
        for line, decodings in _lines(results.decodings(setting)).items()
    ]


def _of_untrained(results: Results) -> list[list[Panel]]:
    """A row of panels for each model, a panel for each task, with a series for each line of its
    decodings."""
    from decode.plots import Panel

    return [
        [
            Panel(
                f"{task}, {entry['name']}",
                [
                    _series(results, line, entry["name"], "", task, decodings)
                    for line, decodings in _lines(entry["decode"]).items()
                ],
                across=ACROSS,
            )
            for task in results.tasks
        ]
        for entry in results.report["config"]["untrained"]
    ]


def _series(
    results: Results, name: str, variant: str, setting: str, task: str, decodings: Sequence[str]
) -> Series:
    """What a variant has of some decodings; its name in the legend says of how many seeds."""
    from decode.plots import Point, Series

    every = (results.measured(variant, setting, task, decoding) for decoding in decodings)
    found = [one for one in every if one is not None]
    points = [Point(m.tokens_per_forward, m.accuracy, *m.interval) for m in found]
    trained = {len(m.counts) for m in found if None not in m.counts}
    if trained:
        name += f", seeds: {' to '.join(str(n) for n in sorted({min(trained), max(trained)}))}"
    return Series(name, points, line=len(points) > 1)


def _lines(decodings: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The names of the decodings of each line."""
    lines: dict[str, list[str]] = {}
    for one in decodings:
        lines.setdefault(one["line"] or one["name"], []).append(one["name"])
    return lines


@command(interrupted="interrupted: the same command draws them")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    parser = CommandParser("python -m benchmarks.ablation.figures", description=__doc__)
    parser.add_argument("folder", type=Path, help="the ablation's --output")
    folder = parser.parse_args(arguments).folder
    require_matplotlib()
    report = read_object(folder / "report.json")
    if "planned" not in report:
        raise InputError(f"{folder / 'report.json'}: no report that this benchmarks.ablation wrote")
    for path in draw(report, folder):
        print(path)


if __name__ == "__main__":
    sys.exit(main())
