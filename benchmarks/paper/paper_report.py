"""A measured table beside the published one, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode.report import markdown_table

COUNTED = (
    "As the paper counts: a response's special tokens are taken out, its text is cut at the stop "
    "strings and tokenized again; TPS is the sum of these tokens over the seconds of all "
    "responses, latency seconds a response, speed-up the ratio to the first row. The paper gives "
    "no tokens a forward. Right is of the visible text in both tables.",
    "As this project counts: visible tokens, those before the first end token and stop string. "
    "Points against the first row are of the same problems, right is the share of right responses, "
    "each with its 95 % interval (paired score test; Wilson).",
    "One response at a time, seconds of decoding alone, after a warm-up.",
)
ENDED = {
    True: "Every response ends with its end token or stop string (--end-early); the paper's codes "
    "decode on, so that their speed-ups are higher where the first row does so.",
    False: "Every method decodes on behind end token and stop string, as the papers' codes do (D2F "
    "finishes the blocks that are open); --end-early ends them there.",
}


def render(report: dict[str, Any]) -> str:
    """The report of `benchmarks.paper.run_table.run`."""
    about = report["environment"]
    lines = [
        f"# {report['title']}",
        "",
        f"`{report['command']}`: {report['model']}, adapter {report['adapter'] or 'none'}. Beside "
        f"each figure that of {report['source']}.",
        "",
        "{date}, {device}, {dtype}, torch {torch}, transformers {transformers}, "
        "Python {python}.".format(**about),
        "",
        *(f"- {note}" for note in (*COUNTED, ENDED[report["end_early"]], *report["notes"])),
    ]
    for name, rows in report["tasks"].items():
        lines += ["", f"## {name}", "", f"{rows[0]['problems']} problems.", ""]
        lines += markdown_table(PUBLISHED, [_published(row, rows[0]) for row in rows])
        lines += ["", *markdown_table(VISIBLE, [_visible(row) for row in rows])]
    return "\n".join(lines) + "\n"


PUBLISHED = (
    "as the paper counts", "right", "95 %", "paper", "TPS", "paper", "latency, s", "paper",
    "tokens", "paper", "tokens a forward", "speed-up: TPS", "paper", "speed-up: latency", "paper",
)  # fmt: skip
VISIBLE = (
    "visible tokens", "tokens a second", "tokens", "tokens a forward", "forwards a problem",
    "speed-up", "points against the first", "95 %",
)  # fmt: skip


def _published(row: dict[str, Any], first: dict[str, Any]) -> Sequence[str]:
    own, paper, base = row["figures"], row["paper"], first["paper"]
    counted, against = own["published"], row["against"]
    return (
        row["title"],
        f"{row['accuracy']:.1%}", f"{row['accuracy_low']:.1%} to {row['accuracy_high']:.1%}",
        f"{paper['score']:.1f} %",
        f"{counted['tps']:.1f}", f"{paper['tps']:.1f}",
        f"{own['latency']:.2f}", f"{paper['latency']:.1f}",
        f"{counted['length']:.0f}", f"{paper['length']:.0f}",
        f"{counted['tokens_per_forward']:.2f}",
        _times(against["published"]), _times(paper["tps"] / base["tps"]),
        _times(against["latency"]), _times(base["latency"] / paper["latency"]),
    )  # fmt: skip


def _visible(row: dict[str, Any]) -> Sequence[str]:
    visible, against = row["figures"]["visible"], row["against"]
    points, low, high = against["points"]
    return (
        row["title"], f"{visible['tps']:.1f}", f"{visible['length']:.0f}",
        f"{visible['tokens_per_forward']:.2f}",
        f"{row['figures']['forwards'] / row['problems']:.1f}",
        _times(against["visible"]), f"{points:+.1f}", f"{low:+.1f} to {high:+.1f}",
    )  # fmt: skip


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}x"
