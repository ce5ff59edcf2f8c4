"""python -m benchmarks.figures [NAME ...]

Draw the figures of benchmarks/results again, light and dark, from the summaries beside them:
comparisons, ablations, the forwards of llada-1b by rows, and the servers under load. NAMEs are
folders there, by default all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from benchmarks import parser
from decode.compare.report import Report, draw
from decode.report import wilson

if TYPE_CHECKING:
    from decode.plots import Point, Series

RESULTS = Path(__file__).parent / "results"
PNG = (".png",)
Row = dict[str, Any]


def comparison(folder: Path) -> None:
    """Draw what `d2f compare` draws."""
    draw(Report(**_read(folder / "summary.json")), folder, PNG, COMPARISONS[folder.name])


def ablation(folder: Path) -> None:
    """Draw accuracy over tokens a forward, a column a task: a figure for each setting, with a row
    for each line of decodings and a curve for each variant; and, as untrained, a row for each model
    that was measured as it is, with a curve for each line of its decodings."""
    from decode.plots import Panel, save

    summary = _read(folder / "summary.json")
    config, rows = summary["config"], summary.get("rows", [])
    for run in summary.get("runs", ()):  # as benchmarks.ablation wrote them until November 2026
        rows += [{k: v for k, v in run.items() if k != "rows"} | row for row in run["rows"]]
    parts = [config, *config["settings"], *config["variants"], *config["untrained"]]
    line_of = {d["name"]: d["line"] or d["name"] for part in parts for d in part["decode"]}
    for row in rows:
        row["line"] = line_of[row["decoding"]]
        if not row["setting"]:  # its size of blocks is in the title
            row["line"] = re.sub(r" \d+", "", row["line"])
    caption = f"{config['problems']} held-out problems a task; 95 % intervals, of several seeds all"
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = [row for row in rows if row["setting"] == setting]
        by, curve = ("line", "variant") if setting else ("variant", "line")
        panels = [
            Panel(
                f"{task}, {place}",
                _curves([r for r in own if (r["task"], r[by]) == (task, place)], curve),
                across="visible tokens a forward",
            )
            for place in dict.fromkeys(row[by] for row in own)
            for task in dict.fromkeys(row["task"] for row in own)
            if len({r["decoding"] for r in own if r[by] == place}) > 1  # one point says little
        ]
        name = (setting or "untrained").replace(" ", "-")
        save(panels, caption, folder / name, columns=2, suffixes=PNG)


def _curves(rows: Sequence[Row], key: str) -> list[Series]:
    """Make a curve for each value of `key`, through its decodings; the mean of their seeds."""
    from decode.plots import Point, Series

    curves: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        curves.setdefault(row[key], {}).setdefault(row["decoding"], []).append(row)
    found = []
    for name, decodings in curves.items():
        points = []
        for seeds in decodings.values():
            ends = [wilson(row["right"], row["problems"]) for row in seeds]
            points.append(
                Point(
                    mean(row["tokens_per_forward"] for row in seeds),
                    100 * mean(row["right"] / row["problems"] for row in seeds),
                    100 * min(low for low, _ in ends),
                    100 * max(high for _, high in ends),
                )
            )
        found.append(Series(name, points, line=len(points) > 1))
    return found


def forward(folder: Path) -> None:
    """Draw milliseconds of a forward by its rows, for each precision."""
    from decode.plots import Panel, Point, Series, save

    report, series = _read(folder / "report.json"), []
    for one in report["precisions"]:
        rows = [(row["rows"], row["ms"]) for row in one["forwards"]]
        floor = [(r["rows"], max(r["bytes_ms"], r["operations_ms"])) for r in one["forwards"]]
        for name, points in ((one["precision"], rows), (f"{one['precision']}, floor", floor)):
            line = [Point(x, y, y, y) for x, y in points]
            series.append(Series(name, line, line=True, light=points is floor))
    about = report["about"]
    caption = f"{report['shape']}, random weights, {about['processor']}, {about['device']}"
    panel = Panel("", series, across="rows of a forward", up="milliseconds")
    save([panel], caption, folder / "rows", suffixes=PNG)


def load(folder: Path) -> None:
    """Draw tokens a second and the time to the first token, over the requests a second."""
    from decode.plots import Panel, Point, Series, save

    lines = (folder / "load.jsonl").read_text(encoding="utf-8").splitlines()
    run, *rows = map(json.loads, lines)
    panels = []
    for tool in dict.fromkeys(row["tool"] for row in rows):
        own = [row for row in rows if row["tool"] == tool and row["error"] is None]
        for up, keys in (
            ("tokens a second", ["tokens_per_second"] * 3),
            ("first token after, ms", ["first_ms", "first_ms", "first_ms_95"]),
        ):
            curves: dict[str, list[Point]] = {}
            for row in own:
                point = Point(row["rate"], *(row[key] for key in keys))
                curves.setdefault(row["server"], []).append(point)
            series = [Series(name, points, line=True) for name, points in curves.items()]
            log_up = up.endswith("ms")
            across = "requests a second"
            panels.append(Panel(tool, series, across=across, up=up, log=True, log_up=log_up))
    caption = (
        f"{run['run']['processor']}; {run['run']['seconds']} s of arrivals at each rate, at most "
        f"{run['run']['max_tokens']} tokens; times: median, band to 95 %"
    )
    save(panels, caption, folder / "load", columns=2, suffixes=PNG)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


COMPARISONS = {
    "compare-tiny": ("throughput", "frontier"),
    "decoders-tiny": ("frontier", "forwards"),
    "frontier-code": ("frontier",),
    "frontier-tiny": ("frontier",),
    "real-smollm2": ("throughput",),
    "real-smollm2-amx": ("throughput",),
    "real-smollm2-avx2": ("throughput",),
    "real-smollm2-fp32": ("throughput",),
    "real-smollm2-ways": ("throughput",),
    "vllm-ways": ("throughput",),
    "wedlm-tiny": ("throughput", "frontier", "forwards"),
}
FIGURES: dict[str, Callable[[Path], None]] = {
    **dict.fromkeys(COMPARISONS, comparison),
    **dict.fromkeys(("ablation-plain-d2f", "ablation-plain-wino"), ablation),
    "forward/llada-1b": forward,
    "serve": load,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw them."""
    given = parser(__doc__)
    given.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    for name in given.parse_args(arguments).names or FIGURES:
        FIGURES[name](RESULTS / name)
        print(name, flush=True)


if __name__ == "__main__":
    main()
