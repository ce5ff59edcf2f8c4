"""A run's file of results, so that the same command goes on where a stopped one was.

JSONL: a line that says whose results they are, then a row for each result as it comes.

    {"run": {"model": "tiny-d2f", "seed": 0}}
    {"id": "story-1", "right": true}
    {"id": "story-2", "ri                           <- killed here: dropped, and decoded again
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from d2f.command import say
from d2f.errors import InputError
from d2f.files import GrowingFile, locked_file, write_beside

Row = dict[str, Any]
Self = TypeVar("Self", bound="Ledger")

NEEDS_WEIGHTS = {"weights", "adapter", "merged", "dtype", "device", "threads", "compiled"}
"""Settings of a run that are known only once its model is loaded."""


class Ledger:
    """Open the results of a run, and hold them for this process until `close`.

    Opening writes nothing: the header is written with the first row, or by `start`. A header
    without rows belongs to nobody and is replaced.

    rows: by key, in the order of the file.
    torn: the last line was cut short and is dropped.

    Args:
        path: of the file; its folder must exist.
        run: the settings that decide the results.
        key: the field that names a row.
        header: the key of the first line.
        fields: the fields of a row to keep in memory, by default all.
        ignored: settings in which the file's run may differ.
        sync: flush each row to the disk, against power cuts; a killed process loses none anyway.

    Raises:
        InputError: the file is not of this run; the differing settings are named.
        OutputError: another process holds it, or it cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        run: dict[str, Any],
        *,
        key: str = "id",
        header: str = "run",
        fields: Collection[str] | None = None,
        ignored: Collection[str] = (),
        sync: bool = False,
    ):
        self.path = Path(os.path.realpath(path))
        # Compare in the form that comes back from the file: tuples are lists, keys are text.
        self.run = json.loads(json.dumps(run))
        self.rows: dict[Any, Row] = {}
        self.torn = False
        self._whole = 0  # bytes of whole lines
        self._key, self._header, self._fields, self._sync = key, header, fields, sync
        check_place(self.path)
        self._lock = ExitStack()
        self._lock.enter_context(locked_file(self.path))
        try:
            self._read(set(ignored))
        except BaseException:
            self.close()
            raise
        self._started = bool(self.rows)

    def _read(self, ignored: set[str]) -> None:
        if not self.path.exists():
            return
        there: dict[str, Any] = {}
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if number == 1:
                        there = dict(json.loads(line)[self._header])
                    elif line.endswith(b"\n"):
                        self._keep(json.loads(line))
                    else:
                        self.torn = True
                        break
                except (ValueError, LookupError, TypeError) as error:
                    self._refuse_another_run(there or self.run, ignored)  # the likely reason
                    raise InputError(
                        f"{self.path}, line {number}, is not an output of this command; nothing "
                        "was written"
                    ) from error
                self._whole += len(line)
        if self.rows:
            self._refuse_another_run(there, ignored)

    def _refuse_another_run(self, there: dict[str, Any], ignored: set[str]) -> None:
        different = [
            f"{name} was {there.get(name)!r}, now {self.run.get(name)!r}"
            for name in sorted((there.keys() | self.run.keys()) - ignored)
            if there.get(name) != self.run.get(name)
        ]
        if different:
            raise InputError(
                f"{self.path} is the output of another run: {'; '.join(different)}; nothing was "
                "written, give another --output"
            )

    def _keep(self, row: Row) -> None:
        kept = row if self._fields is None else {name: row[name] for name in self._fields}
        self.rows[row[self._key]] = kept

    def say_what_is_there(self, count: int, what: str) -> None:
        """Say on standard error what of the `count` results is not decoded again."""
        if self.torn:
            say(f"notice: {self.path}: its last line was cut short and is decoded again")
        if self.rows:
            say(f"notice: {len(self.rows)} of {count} {what} are already in {self.path}")

    def start(self) -> None:
        """Write the header if it is missing, and cut off a torn line."""
        if not self._started:
            write_beside(self.path, json_line({self._header: self.run}))
            self._started = True
        elif self.torn:
            os.truncate(self.path, self._whole)
        self.torn = False  # else the next row would be cut off in turn

    def add(self, row: Row) -> None:
        """Append a row. Raises OutputError; the rows before it stay."""
        self.start()
        with GrowingFile(self.path) as file:
            file.write(json_line(row), sync=self._sync)
        self._keep(row)

    def close(self) -> None:
        """Let other processes have the file."""
        self._lock.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def refuse_early(path: str | Path, run: dict[str, Any], **options: Any) -> None:
    """Raise InputError, before any weights are read, if the file has rows of another run, and
    OutputError if another process holds it. options: of `Ledger`."""
    Ledger(path, run, ignored=NEEDS_WEIGHTS, **options).close()


def json_line(values: dict[str, Any]) -> str:
    """Format a line of JSONL."""
    return json.dumps(values) + "\n"


def check_place(path: Path, option: str = "--output") -> None:
    """Raise InputError if no file can be put at `path`."""
    if not os.access(path.parent, os.W_OK) or (path.exists() and not path.is_file()):
        raise InputError(f"{option} {path}: expected a file in a folder that can be written")


def check_folder(output: str | Path) -> Path:
    """Return the real path of an output folder. Raises InputError if it cannot be one."""
    folder = Path(os.path.realpath(output))
    if not str(output) or (
        folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK))
    ):
        raise InputError(f"--output {output}: expected a folder that can be written")
    return folder
