"""The runs of a comparison on disk as they come, so that a killed command goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from d2f.errors import InputError
from d2f.files import GrowingFile, write_beside
from d2f.json_file import parse
from decode.comparison.records import Key, Record, as_json, from_json
from decode.reporting.output_file import NOT_OURS, json_line, refuse_another_run


class Ledger:
    """The records in the file at `path` of the comparison that `run` describes.

    Opening reads what a killed command left and changes nothing: `records` and, of the times that
    it went on before, `resumed`; a half-written last line is left out. Raises InputError if the
    file is not of this very comparison, unless no run is in it: then it is as good as none.
    """

    def __init__(self, path: Path, run: dict[str, Any]):
        self.path = path
        self.header = {"run": json.loads(json.dumps(run))}
        self.records: list[Record] = []
        self.resumed: list[dict[str, Any]] = []
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error
        if data:
            self._read(data)
        self.found = bool(self.records)

    def _read(self, data: bytes) -> None:
        first, *lines = data.split(b"\n")
        try:
            there = dict(parse(first, nan=True)["run"])
        except NOT_OURS as error:
            raise InputError(
                f"{self.path} exists and is not of this command; nothing was written"
            ) from error
        resumed = []
        for number, line in enumerate(lines[:-1], 2):  # what follows the last line end is torn
            try:
                values = parse(line, nan=True)
                if "resumed" in values:
                    resumed.append(values["resumed"])
                    continue
                (record,) = from_json(values)
                if record.key in self.done:
                    raise ValueError("measured twice")
            except NOT_OURS as error:
                raise InputError(
                    f"{self.path}, line {number} is not a run of this comparison, or its second one"
                ) from error
            self.records.append(record)
        if self.records:
            refuse_another_run(self.path, there, self.header["run"])
            self.resumed = resumed

    @property
    def done(self) -> set[Key]:
        return {record.key for record in self.records}

    def begin(self, entries: Collection[str]) -> None:
        """Keep what is complete, and write it. A repetition is complete if each of the entries had
        its turn: they are compared with each other, so one that was cut short is measured anew.
        """
        before = len(self.records)
        done = self.done
        self.records = [
            r
            for r in self.records
            if r.repetition is None
            or all((r.workload, r.concurrency, r.repetition, e) in done for e in entries)
        ]
        if self.found:
            date, kept = time.strftime("%Y-%m-%d %H:%M:%S %z"), len(self.records)
            self.resumed.append({"date": date, "kept": kept, "dropped": before - kept})
        runs = [as_json([record]) for record in self.records]
        lines = [self.header, *({"resumed": times} for times in self.resumed), *runs]
        write_beside(self.path, "".join(map(json_line, lines)))

    def add(self, record: Record) -> None:
        """Add a record, on disk before this returns. Raises OutputError."""
        with GrowingFile(self.path) as file:
            file.write(json_line(as_json([record])), sync=True)
        self.records.append(record)
