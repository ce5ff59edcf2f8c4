"""The JSON of a benchmark, whole after each row: what is measured stays if a later row fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from d2f.files import write_beside


class RowFile:
    """Rows of a benchmark beside the facts that hold for all of them, as
    ``{**facts, "measured": [row, ...]}`` in the file `path` (None: nowhere)."""

    def __init__(self, path: Path | None, facts: dict[str, Any]):
        self.path, self.facts = path, facts
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Take a row and write all of them. Raises OutputError."""
        self.rows.append(row)
        if self.path is not None:
            write_beside(self.path, json.dumps({**self.facts, "measured": self.rows}) + "\n")
