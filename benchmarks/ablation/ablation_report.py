"""What an ablation found so far, for reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.ablation.results import Measured, Results
from decode.report import markdown_table

VARIANT_COLUMNS = (
    "variant", "what it sets", "steps", "seeds", "last loss, by seed", "seconds, by seed",
)  # fmt: skip
COLUMNS = (
    "decoding", "variant", "right, by seed", "% right", "95 %", "points more", "95 %",
    "tokens a forward", "rows a token", "p_cache",
)  # fmt: skip


def render(report: dict[str, Any]) -> str:
    """The report as Markdown: a table for each setting and task, a line for each decoding and
    variant."""
    config, results = report["config"], Results(report)
    lines = [
        f"# {report['title']}",
        "",
        f"`{report['command']}`: variants of {config['train']} with "
        f"{_settings(config['set']) or 'its own settings'}; {config['problems']} "
        f"{config['split']} problems a task, greedy, {config['batch_size']} at a time.",
        "",
        _progress(report),
        "",
        *results.environments,
        "",
        "By seed: problems right at each seed, (no ...) where not measured yet; what is not "
        "trained here has one number. The 95 % of % right covers the choice of the "
        "problems and of the seeds: Wilson's interval at the effective number of problems (an "
        "analysis of variance of problems and seeds, both random; with one seed, of the problems "
        "alone). Points more: the difference to what is named above a table, on the same problems "
        "at the same seeds, those that both have; its 95 % is Tango's score interval of a paired "
        "difference at its own effective number, so it covers problems and seeds alike and never "
        "has a width of 0. Of so many intervals one in twenty misses by chance. Tokens are the "
        "visible ones, before the first end token; a forward and the rows fed are counted for each "
        "request alone; p_cache is WeDLM's, tokens over the rows fed after the prompt's. Seconds "
        "are wall time of the training, whatever else the machine did.",
    ]
    for setting in results.settings:
        lines += ["", f"## {setting}" if setting else "## Runs"]
        trained = [_training(report, results, v, setting) for v in config["variants"]]
        lines += ["", *markdown_table(VARIANT_COLUMNS, [one for one in trained if one])]
        for task in results.tasks:
            entries = list(_arms(report, results, setting, task))
            if entries:
                lines += ["", f"### {task}", "", f"Against {config['against']}.", ""]
                lines += _table(entries)
    for entry in config["untrained"]:
        for task in results.tasks:
            entries = list(_untrained(results, entry, task))
            if entries:
                lines += ["", f"## {entry['name']}: {task}", ""]
                pairs = "; ".join(f"{one} against {base}" for one, base in entry["against"].items())
                lines += [f"{entry['model']}, not trained here. {pairs}".rstrip(), ""]
                lines += _table(entries)
    return "\n".join(lines) + "\n"


def _progress(report: dict[str, Any]) -> str:
    """How much of what is planned is measured."""
    seeds = ", ".join(str(seed) for seed in report["config"]["seeds"])
    there = sum(len(run["rows"]) for run in report["runs"])
    planned = sum(run["rows"] for run in report["planned"])
    left = "" if there == planned else "; what is left is not in this report"
    runs = f"{len(report['runs'])} of {len(report['planned'])} runs"
    return f"Seeds {seeds}. Measured: {runs}, {there} of {planned} figures{left}."


def _training(
    report: dict[str, Any], results: Results, variant: dict[str, Any], setting: str
) -> Sequence[object] | None:
    """A line on how a variant was trained; None where it is not there yet."""
    runs = [
        run
        for run in report["runs"]
        if (run["variant"], run["setting"]) == (variant["name"], setting)
    ]
    if not runs:
        return None
    sets = {**results.set_of(setting), **variant["set"]}
    about = variant["name"], _settings(sets) or "nothing"
    if not variant["trained"]:
        return *about, 0, "-", "-", "-"
    return (
        *about,
        runs[0]["steps"],
        " ".join(str(run["seed"]) for run in runs),
        " ".join(f"{run['loss']:.4f}" for run in runs),
        " ".join(f"{run['seconds']:.0f}" for run in runs),
    )


def _arms(
    report: dict[str, Any], results: Results, setting: str, task: str
) -> Iterator[Sequence[object]]:
    """A line for each decoding of each variant in a setting."""
    config = report["config"]
    for decoding in (one["name"] for one in results.decodings(setting)):
        base = results.measured(config["against"], setting, task, decoding)
        for variant in config["variants"]:
            own = results.measured(variant["name"], setting, task, decoding)
            if own is not None:
                compared = base if variant["name"] != config["against"] else None
                yield _line(decoding, variant["name"], own, compared, config["seeds"])


def _untrained(results: Results, entry: dict[str, Any], task: str) -> Iterator[Sequence[object]]:
    for decoding in entry["decode"]:
        own = results.measured(entry["name"], "", task, decoding["name"])
        if own is not None:
            base = entry["against"].get(decoding["name"])
            compared = results.measured(entry["name"], "", task, base) if base else None
            yield _line(decoding["name"], entry["name"], own, compared, ())


def _line(
    decoding: str, variant: str, own: Measured, base: Measured | None, seeds: Sequence[int]
) -> Sequence[object]:
    by_seed = " ".join(
        str(count) if (count := own.counts.get(seed)) is not None else f"(no {seed})"
        for seed in ((None,) if None in own.counts else seeds)
    )
    low, high = own.interval
    compared = None if base is None else own.against(base)
    points = ("", "")
    if base is not None and compared is not None:
        middle, (least, most), pairs = compared
        fewer = pairs < max(len(own.counts), len(base.counts))
        with_pairs = f" (of {pairs} seeds)" if fewer else ""
        points = f"{100 * middle:+.1f}{with_pairs}", f"{100 * least:+.1f} to {100 * most:+.1f}"
    return (
        decoding, variant, by_seed, f"{100 * own.accuracy:.1f}",
        f"{100 * low:.1f} to {100 * high:.1f}", *points,
        f"{own.tokens_per_forward:.2f}", f"{own.rows_per_token:.1f}",
        "" if own.p_cache is None else f"{own.p_cache:.2f}",
    )  # fmt: skip


def _table(lines: list[Sequence[object]]) -> list[str]:
    """Without the last column, p_cache, where no decoder has it."""
    if not any(line[-1] for line in lines):
        return markdown_table(COLUMNS[:-1], [line[:-1] for line in lines])
    return markdown_table(COLUMNS, lines)


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"`{key}: {_plain(value)}`" for key, value in values.items())


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_plain(v)}" for k, v in value.items()) + "}"
    return str(value)
