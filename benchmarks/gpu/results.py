"""The file of what was measured on GPUs, and its tables.

{"runs": [{"facts":    {"device": ..., "torch": ..., "code": ...},   what all of it was run on
           "measured": {"LLaDA-8B, matrix products": {
                "state":    done | failed | cut | not run
                "why":      why it failed or did not run; else empty
                "command", "date", "commit", "seconds",
                "warnings": those after which figures are of the plain computation
                "found":    what the benchmark wrote, or had written when it was cut off
                "output":   the end of what it printed}}}]}
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from d2f.errors import InputError
from d2f.files import write_beside

DONE, FAILED, CUT, NOT_RUN = "done", "failed", "cut", "not run"
NOTHING = "Nothing has been measured."


class Results:
    """The file at `path`, and in it the run of these facts, begun or gone on with."""

    def __init__(self, path: Path, facts: dict[str, Any]):
        self.path = path
        self.runs: list[dict[str, Any]] = read_runs(path) if path.exists() else []
        same = [run for run in self.runs if run["facts"] == facts]
        run = same[-1] if same else {"facts": facts, "measured": {}}
        if not same:
            self.runs.append(run)
        self.facts: dict[str, Any] = run["facts"]
        self.measured: dict[str, dict[str, Any]] = run["measured"]

    def save(self, name: str, entry: dict[str, Any]) -> None:
        """Keep a measurement, in place of an earlier one."""
        self.measured[name] = entry
        write_beside(self.path, json.dumps({"runs": self.runs}, indent=1) + "\n")

    def seconds(self, name: str) -> float | None:
        """Return what a measurement last took on this device, by any code: half as much again if it
        was cut off, None if it was not measured."""
        for run in reversed(self.runs):
            alike = all(run["facts"][key] == self.facts[key] for key in ("device", "dry_run"))
            entry = run["measured"].get(name)
            if alike and entry is not None and entry["state"] in (DONE, CUT):
                return float(entry["seconds"]) * (1.5 if entry["state"] == CUT else 1.0)
        return None


def device_and_versions() -> dict[str, Any]:
    """Collect the facts of this process; called in one of its own, it frees the GPU's memory."""
    import numpy
    import torch
    import transformers
    import triton

    found: dict[str, Any] = {"device": "cpu", "cuda": None}
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        found = {
            "device": facts.name,
            "capability": f"{facts.major}.{facts.minor}",
            "gib": round(facts.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    versions = {p.__name__: p.__version__ for p in (torch, triton, transformers, numpy)}
    return {**found, **versions, "python": platform.python_version()}


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Read the runs in a file. Raises InputError."""
    try:
        runs: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
        if all({"device", "dry_run"} <= run["facts"].keys() and run["measured"] for run in runs):
            return runs
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise InputError(f"{path}: expected a file that python -m benchmarks.gpu has written")


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Show every run: what it was measured on, a line a measurement, and the rows of each."""
    return "\n\n".join("\n\n".join(_run(run)) for run in runs) or NOTHING


def _run(run: dict[str, Any]) -> Iterator[str]:
    facts, measured = dict(run["facts"]), run["measured"]
    dates = sorted({entry["date"] for entry in measured.values()})
    commits = sorted({entry["commit"] for entry in measured.values() if entry["commit"]})
    dry = "Dry run: no figure here means anything. " if facts.pop("dry_run") else ""
    yield f"**{facts.pop('device')}, {' and '.join(dates) or 'not yet'}**"
    said = [f"{name} {value}" for name, value in facts.items() if value is not None]
    yield f"{dry}{', '.join([*said, *(f'commit {name}' for name in commits)])}."
    rows = []
    for name, entry in measured.items():
        state = entry["state"] + (f": {entry['why']}" if entry["why"] else "")
        row = {"measured": name, "state": state, "seconds": entry["seconds"]}
        rows.append({**row, "warned of": "; ".join(entry["warnings"])})
    yield _table(rows)
    for name, entry in measured.items():
        tables = [rows for rows in entry["found"].values() if _are_rows(rows)]
        if tables:
            warned = f" **With a fallback: {'; '.join(entry['warnings'])}.**" * bool(
                entry["warnings"]
            )
            whole = "" if entry["state"] == DONE else f" ({entry['state']}: what there is of it)"
            yield f"{name}{whole}: `python -m {' '.join(entry['command'])}`{warned}"
            yield from map(_table, tables)
        if "report" in entry["found"]:  # Markdown already
            yield entry["found"]["report"].replace("\n#", "\n###").removeprefix("# ").strip()


def _are_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    """Show four digits of a number, and nothing that would end the cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")
