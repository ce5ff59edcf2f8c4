"""The output file: a header line, then a line a result; it can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from d2f.errors import InputError
from d2f.files import GrowingFile, write_beside
from d2f.json_file import parse
from decode.reporting.places import check_place
from decode.reporting.record import Record

NOT_OURS = (ValueError, TypeError, LookupError, ArithmeticError)
"""What a line raises, read as one of ours, that is none."""


class Output:
    """JSONL at `path` of the run described by `run`.

    Opening reads what is there and changes nothing: `records` are the results already there,
    `torn` says that a half-written last line will be dropped. Entering writes the header. Raises
    InputError if the file is not the output of this very run.
    """

    def __init__(self, path: str, run: dict[str, Any], ids: Collection[int | str]):
        self.path = Path(os.path.realpath(path))
        check_place(self.path, "--output")
        self.header = {"run": json.loads(json.dumps(run))}
        self.records: list[Record] = []
        self.torn = False
        self._file: GrowingFile | None = None
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error
        if data:
            self._read(data, set(ids))

    def _read(self, data: bytes, ids: set[int | str]) -> None:
        first, *lines = data.split(b"\n")
        self._check_header(first)
        self.torn = bool(lines and lines.pop())
        for number, line in enumerate(lines, 2):
            try:
                record = Record.from_json(parse(line, nan=True))
                ids.remove(record.id)
            except NOT_OURS as error:
                raise InputError(
                    f"{self.path}, line {number} is not a result of this run, or its second one"
                ) from error
            self.records.append(record)

    def _check_header(self, line: bytes) -> None:
        try:
            run = parse(line, nan=True)["run"]
            there = dict(run)
        except NOT_OURS as error:
            raise InputError(
                f"{self.path} exists and is not an output of this command; nothing was written"
            ) from error
        here = self.header["run"]
        refuse_another_run(self.path, there, here)

    def __enter__(self) -> Output:
        if self.torn or not self.path.exists() or not self.path.stat().st_size:
            lines = [self.header, *(record.to_json() for record in self.records)]
            write_beside(self.path, "".join(map(json_line, lines)))
        self._file = GrowingFile(self.path)
        return self

    def write(self, record: Record) -> None:
        """Append a result. Raises OutputError."""
        assert self._file is not None
        self._file.write(json_line(record.to_json()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()


def json_line(values: dict[str, Any]) -> str:
    """A line of JSONL."""
    return json.dumps(values) + "\n"


def refuse_another_run(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise InputError, naming the differences, unless the file's run is this one."""
    different = [
        f"{key} was {there.get(key)!r}, now {here.get(key)!r}"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
    if different:
        raise InputError(
            f"{path} is the output of another run: {'; '.join(different)}; nothing was "
            "written, give another --output"
        )
