"""The runs of a comparison on disk as they come, so that a killed command goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from d2f.files import write_beside
from d2f.json_file import parse
from decode.comparison.records import Key, Record, as_json, from_json
from decode.reporting.ledger import Ledger, json_line


class RunsLedger(Ledger[Key, Record]):
    """The records of a comparison, and in `resumed` the times that it went on before."""

    FILE = "exists and is not of this command"
    ENTRY = "a run of this comparison"
    SYNC = True

    def __init__(self, path: Path, run: dict[str, Any]):
        self.resumed: list[dict[str, Any]] = []
        super().__init__(path, run)
        self.found = bool(self.done)
        if not self.found:
            self.resumed = []

    @property
    def records(self) -> list[Record]:
        return list(self.done.values())

    def key(self, entry: Record) -> Key:
        return entry.key

    def line(self, entry: Record) -> str:
        return json_line(as_json([entry]))

    def parsed(self, line: bytes, where: str) -> Record | None:
        values = parse(line, nan=True)
        if "resumed" in values:
            self.resumed.append(values["resumed"])
            return None
        (record,) = from_json(values)
        return record

    def begin(self, entries: Collection[str]) -> None:
        """Keep what is complete, and write it. A repetition is complete if each of the entries had
        its turn: they are compared with each other, so one that was cut short is measured anew.
        """
        before = self.done
        self.done = {
            key: record
            for key, record in before.items()
            # The pass that only judges compares no times: it is kept as it is.
            if record.repetition is None or all((*key[:3], entry) in before for entry in entries)
        }
        if self.found:
            date, kept = time.strftime("%Y-%m-%d %H:%M:%S %z"), len(self.done)
            self.resumed.append({"date": date, "kept": kept, "dropped": len(before) - kept})
        first = map(json_line, [{self.HEADER: self.run}, *({"resumed": t} for t in self.resumed)])
        write_beside(self.path, "".join([*first, *map(self.line, self.records)]))
        self._ready = True
