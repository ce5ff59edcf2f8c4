"""A results file as Markdown: for every run what it was measured on, a line a measurement, and the
rows of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.results_file import DONE
from decode.report import markdown_table

NOTHING = "Nothing has been measured."


def markdown(runs: list[dict[str, Any]]) -> str:
    """All runs."""
    return "\n\n".join("\n\n".join(_run(run)) for run in runs) or NOTHING


def _run(run: dict[str, Any]) -> Iterator[str]:
    facts, measured = dict(run["facts"]), run["measured"]
    dates, commits = (
        sorted({entry[of] for entry in measured.values() if entry[of]}) for of in ("date", "commit")
    )
    dry = "Dry run: no figure here means anything. " if facts.pop("dry_run") else ""
    yield f"**{facts.pop('device')}, {' and '.join(dates) or 'not yet'}**"
    said = [f"{name} {value}" for name, value in facts.items() if value is not None]
    said += [f"commit {name}" for name in commits]
    yield f"{dry}{', '.join(said)}."
    lines = []
    for name, entry in measured.items():
        state = entry["state"] + (f": {entry['why']}" if entry["why"] else "")
        lines.append((name, _cell(state), _cell(entry["seconds"]), _warned(entry)))
    yield "\n".join(markdown_table(("measured", "state", "seconds", "warned of"), lines))
    for name, entry in measured.items():
        tables = list(_tables(entry["found"]))
        if tables:
            warned = f" **With a fallback: {_warned(entry)}.**" if entry["warnings"] else ""
            whole = "" if entry["state"] == DONE else f" ({entry['state']}: what there is of it)"
            yield f"{name}{whole}: `python -m {' '.join(entry['command'])}`{warned}"
            yield from tables


def _warned(entry: dict[str, Any]) -> str:
    return "; ".join(_cell(warning) for warning in entry["warnings"])


def _tables(found: dict[str, Any]) -> Iterator[str]:
    """What a benchmark wrote: lists of rows, or rows by name, among its facts (`measured`); rows by
    name and nothing else; a report that is Markdown already."""
    by_name = found and all(isinstance(row, dict) for row in found.values())
    for value in [found] if by_name and "measured" not in found else found.values():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            yield _table(value)
        elif isinstance(value, dict) and value:
            yield _table([_named(name, row) for name, row in value.items()])
    if "report" in found:
        yield found["report"].replace("\n#", "\n###").removeprefix("# ").strip()


def _named(name: str, row: dict[str, Any] | None) -> dict[str, Any]:
    return {"": name, **row} if row is not None else {"": f"{name}: no memory"}


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(markdown_table(columns, cells))


def _cell(value: Any) -> str:
    """A value in a table: four digits of a number, nothing that would end the cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")
