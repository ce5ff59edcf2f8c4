"""What an ablation found: means over seeds with their intervals, and a readable report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from decode.reporting.intervals import mean_interval, wilson
from decode.reporting.tables import markdown_table

Measured = dict[str, Any]


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
        *markdown_table(VARIANT_COLUMNS, [_variant(report, v) for v in config["variants"]]),
    ]
    columns = (
        "decoding", "variant", f"right of {config['problems']}", "95 %", "by seed",
        f"against {against}", "95 %", "tokens a forward", "forwards",
    )  # fmt: skip
    for task in dict.fromkeys(row["task"] for run in report["runs"] for row in run["rows"]):
        entries = [e for name in decodings(report) for e in _measured(report, task, name)]
        lines += ["", f"## {task}", "", *markdown_table(columns, entries)]
    return "\n".join(lines) + "\n"


VARIANT_COLUMNS = (
    "variant", "what it sets", "steps", "last loss, by seed", "seconds, by seed",
)  # fmt: skip


def _variant(report: dict[str, Any], variant: dict[str, Any]) -> Sequence[object]:
    runs = [run for run in report["runs"] if run["variant"] == variant["name"]]
    losses = " ".join(f"{run['loss']:.4f}" for run in runs)
    seconds = " ".join(f"{run['seconds']:.0f}" for run in runs)
    sets = _settings(variant["set"]) or "nothing"
    return variant["name"], sets, runs[0]["steps"], losses, seconds


def environments(report: dict[str, Any]) -> list[str]:
    """A line for each date and machine that anything was measured on."""
    runs = (*report["untrained"], *report["runs"])
    return list(
        dict.fromkeys(
            "{date}, {device}, {dtype}, torch {torch}, transformers {transformers}, "
            "Python {python}.".format(**one["environment"])
            for run in runs
            for one in run["rows"]
        )
    )


def decodings(report: dict[str, Any]) -> list[str]:
    """The names of all decodings, each once."""
    every = (one for run in (*report["untrained"], *report["runs"]) for one in run["rows"])
    return list(dict.fromkeys(one["decoding"] for one in every))


def measured_of(report: dict[str, Any], variant: str, task: str, decoding: str) -> list[Measured]:
    """What was measured of a variant, a seed each in the order of the seeds, or of an untrained
    model."""
    runs = [r for r in (*report["untrained"], *report["runs"]) if r["variant"] == variant]
    return [
        one
        for run in runs
        for one in run["rows"]
        if (one["task"], one["decoding"]) == (task, decoding)
    ]


def _measured(report: dict[str, Any], task: str, decoding: str) -> Iterator[Sequence[object]]:
    """A line a variant of what one decoding gave on a task."""
    config = report["config"]
    trained = {variant["name"] for variant in config["variants"]}
    base = [one["right"] for one in measured_of(report, config["against"], task, decoding)]
    names = [entry["name"] for entry in (*config["untrained"], *config["variants"])]
    for name in names:
        found = measured_of(report, name, task, decoding)
        if not found:
            continue
        count, right = found[0]["problems"], [one["right"] for one in found]
        mean, low, high = mean_interval(right)
        low, high = max(0.0, low), min(count, high)
        if name not in trained or len(set(right)) == 1:
            low, high = (count * share for share in wilson(right[0], count))
        compared = ("", "")
        if base and name != config["against"] and name in trained:
            points = [100 * (r - b) / count for r, b in zip(right, base, strict=True)]
            middle, least, most = mean_interval(points)
            spread = f"{least:+.1f} to {most:+.1f}" if least < most else "-"
            compared = (f"{middle:+.1f}", spread)
        speed = sum(r["visible_tokens"] for r in found) / sum(r["forwards"] for r in found)
        forwards = sum(r["forwards"] for r in found) / (count * len(found))
        by_seed = " ".join(str(r) for r in right) if name in trained else ""
        yield (
            decoding, name, f"{mean:.1f}", f"{low:.1f} to {high:.1f}", by_seed, *compared,
            f"{speed:.2f}", f"{forwards:.1f}",
        )  # fmt: skip


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"`{key}: {_plain(value)}`" for key, value in values.items())


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_plain(v)}" for k, v in value.items()) + "}"
    return str(value)
