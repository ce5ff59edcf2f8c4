"""The file of what was measured. It is whole after every row, and a later call goes on with it:

{"runs": [{"facts":    {"device": ..., "torch": ..., "code": ...},   what all of it was run on
           "measured": {"LLaDA-8B, matrix products": {
                "state":    done | failed | cut | not run
                "why":      of what it failed, or why it did not run; else empty
                "command", "date", "commit", "seconds",
                "warnings": those until then after which figures are of the plain computation
                "found":    what the benchmark wrote, or had written when it was cut off
                "output":   the end of what it printed}}}]}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from d2f.errors import InputError
from d2f.files import write_beside

DONE, FAILED, CUT, NOT_RUN = "done", "failed", "cut", "not run"


class ResultsFile:
    """Results at a path: those that are there, and a run of these facts, begun or gone on with."""

    def __init__(self, path: Path, facts: dict[str, Any]):
        self.path = path
        self.runs: list[dict[str, Any]] = read_runs(path) if path.exists() else []
        same = [run for run in self.runs if run["facts"] == facts]
        self._run = same[-1] if same else {"facts": facts, "measured": {}}
        if not same:
            self.runs.append(self._run)

    @property
    def facts(self) -> dict[str, Any]:
        """What this run is measured on."""
        found: dict[str, Any] = self._run["facts"]
        return found

    @property
    def measured(self) -> dict[str, dict[str, Any]]:
        """What was measured in this run, by name."""
        found: dict[str, dict[str, Any]] = self._run["measured"]
        return found

    def save(self, name: str, entry: dict[str, Any]) -> None:
        """Put a measurement there, in place of an earlier one. Raises OutputError."""
        self.measured[name] = entry
        write_beside(self.path, json.dumps({"runs": self.runs}, indent=1) + "\n")

    def seconds(self, name: str) -> float | None:
        """What it took when it was last measured on this device, by any code; of one that was cut
        off, half as much again. None where it was not measured."""
        for run in reversed(self.runs):
            alike = all(run["facts"][key] == self.facts[key] for key in ("device", "dry_run"))
            entry = run["measured"].get(name)
            if alike and entry is not None and entry["state"] in (DONE, CUT):
                return float(entry["seconds"]) * (1.5 if entry["state"] == CUT else 1.0)
        return None


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The runs in a file. Raises InputError."""
    try:
        runs: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
        known = ({"device", "dry_run"} <= run["facts"].keys() and run["measured"] for run in runs)
        if all(isinstance(measured, dict) for measured in known):
            return runs
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    raise InputError(f"{path}: expected a file that python -m benchmarks.gpu has written")
