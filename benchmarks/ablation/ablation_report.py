"""What an ablation found: means over seeds with their intervals, and a readable report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from decode.reporting.intervals import wilson

Row = dict[str, Any]


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % interval of the mean (Student's t over the values); nan without two values."""
    from scipy.stats import t

    mean, count = sum(values) / len(values), len(values)
    if count < 2:
        return mean, math.nan, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (count - 1))
    half = float(t.ppf(0.975, count - 1)) * deviation / math.sqrt(count)
    return mean, mean - half, mean + half


def render(report: dict[str, Any]) -> str:
    """The report as Markdown: a table for each decoding and task, a line for each variant."""
    config = report["config"]
    against = config["against"]
    seeds = ", ".join(str(seed) for seed in config["seeds"])
    lines = [
        f"# {report['title']}",
        "",
        f"`{report['command']}`: variants of {config['train']} with "
        f"{_settings(config['set']) or 'its own settings'}, seeds {seeds}; "
        f"{config['problems']} {config['split']} problems a task, greedy, "
        f"{config['batch_size']} at a time. Visible tokens are those before the first end token.",
        "",
        *environments(report),
        "",
        "Right: the mean over seeds, with the 95 % interval of that mean over seeds (Student's t). "
        "All seeds decode the same problems, so it leaves out what other problems would give; "
        "where all seeds agree, and for a model that was not trained here, the interval is that of "
        f"the share of the problems instead (Wilson). Against {against}: points of accuracy, the "
        "mean difference at the same seed and its 95 % interval over seeds; none (-) where one "
        "seed, or the same difference at every seed, leaves no spread to take it from. Of so many "
        "intervals some miss by chance: one in twenty. Seconds are wall time of the training, "
        "whatever else the machine did.",
        "",
        "| variant | what it sets | steps | last loss, by seed | seconds, by seed |",
        "|---|---|---|---|---|",
    ]
    for variant in config["variants"]:
        runs = [run for run in report["runs"] if run["variant"] == variant["name"]]
        losses = " ".join(f"{run['loss']:.4f}" for run in runs)
        seconds = " ".join(f"{run['seconds']:.0f}" for run in runs)
        lines.append(
            f"| {variant['name']} | {_settings(variant['set']) or 'nothing'} | {runs[0]['steps']} "
            f"| {losses} | {seconds} |"
        )
    for task in config["tasks"]:
        lines += ["", f"## {task}", ""]
        lines += [
            f"| decoding | variant | right of {config['problems']} | 95 % | by seed "
            f"| against {against} | 95 % | tokens a forward | forwards |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for decoding in decodings(report):
            lines += _table(report, task, decoding)
    return "\n".join(lines) + "\n"


def environments(report: dict[str, Any]) -> list[str]:
    """A line for each date and machine that rows were measured on."""
    runs = (*report["untrained"], *report["runs"])
    return list(
        dict.fromkeys(
            "{date}, {device}, {dtype}, torch {torch}, transformers {transformers}, "
            "Python {python}.".format(**row["environment"])
            for run in runs
            for row in run["rows"]
        )
    )


def decodings(report: dict[str, Any]) -> list[str]:
    """The names of all decodings, each once."""
    rows = (row for run in (*report["untrained"], *report["runs"]) for row in run["rows"])
    return list(dict.fromkeys(row["decoding"] for row in rows))


def rows_of(report: dict[str, Any], variant: str, task: str, decoding: str) -> list[Row]:
    """The rows of a variant, a seed each in the order of the seeds, or of an untrained model."""
    runs = [r for r in (*report["untrained"], *report["runs"]) if r["variant"] == variant]
    return [
        row
        for run in runs
        for row in run["rows"]
        if (row["task"], row["decoding"]) == (task, decoding)
    ]


def _table(report: dict[str, Any], task: str, decoding: str) -> Iterable[str]:
    config = report["config"]
    trained = {variant["name"] for variant in config["variants"]}
    base = [row["right"] for row in rows_of(report, config["against"], task, decoding)]
    names = [entry["name"] for entry in (*config["untrained"], *config["variants"])]
    for name in names:
        rows = rows_of(report, name, task, decoding)
        if not rows:
            continue
        count, right = rows[0]["problems"], [row["right"] for row in rows]
        mean, low, high = mean_interval(right)
        low, high = max(0.0, low), min(count, high)
        if name not in trained or len(set(right)) == 1:
            low, high = (count * share for share in wilson(right[0], count))
        compared = "| | "
        if base and name != config["against"] and name in trained:
            points = [100 * (r - b) / count for r, b in zip(right, base, strict=True)]
            middle, least, most = mean_interval(points)
            spread = f"{least:+.1f} to {most:+.1f}" if least < most else "-"
            compared = f"| {middle:+.1f} | {spread} "
        speed = sum(r["visible_tokens"] for r in rows) / sum(r["forwards"] for r in rows)
        forwards = sum(r["forwards"] for r in rows) / (count * len(rows))
        yield (
            f"| {decoding} | {name} | {mean:.1f} | {low:.1f} to {high:.1f} "
            f"| {' '.join(str(r) for r in right) if name in trained else ''} "
            f"{compared}| {speed:.2f} | {forwards:.1f} |"
        )


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"`{key}: {_plain(value)}`" for key, value in values.items())


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_plain(v)}" for k, v in value.items()) + "}"
    return str(value)
