"""The log of a run: a line of JSON at a time, whole after a kill or a full disk."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from d2f.files import GrowingFile, write_beside
from d2f.json_file import parse
from d2f.write_errors import says_what_is_kept


class Log:
    """Appends to a file. Raises OutputError where it cannot be written."""

    def __init__(self, path: Path):
        self.path = path
        with self._kept():
            self._file = GrowingFile(path)

    def write(self, values: dict[str, Any]) -> None:
        with self._kept():
            self._file.write(json.dumps(values) + "\n")

    def close(self) -> None:
        self._file.close()

    def _kept(self) -> contextlib.AbstractContextManager[None]:
        kept = "the same command goes on from the newest checkpoint"
        return says_what_is_kept(self.path, kept)


def keep_lines(path: Path, step: int) -> None:
    """Keep the lines of a log up to a step; a torn line is dropped too."""
    if path.is_file():
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            # A line that a kill cut short is not JSON.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if parse(line, nan=True)["step"] <= step:
                    kept.append(line + "\n")
        write_beside(path, "".join(kept))
