"""A run's file of results: a line that says whose they are, then a line a result as it comes, so
that the same command goes on where a stopped one was.

    {"run": {"model": "tiny-d2f", "seed": 0}}
    {"id": "story-1", "right": true}
    {"id": "story-2", "ri                           <- killed here: dropped, and decoded again
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from d2f.checkpoint import parse
from d2f.errors import InputError
from d2f.files import GrowingFile, locked_file, write_beside

# Where a command may write: checked, and held, before any work.


def hold_output(path: str | Path | None) -> AbstractContextManager[None]:
    """Hold the file of --output, if one is given, for this command alone. Raises InputError where
    no file can be there or another command writes it."""
    if path is None:
        return nullcontext()
    place = Path(os.path.realpath(path))
    check_place(place, "--output")
    return locked_file(place)


def check_place(path: Path, option: str) -> None:
    """Raise InputError if no file can be put at `path`."""
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: the folder {path.parent} does not exist")
    if is_there(path, option) and not path.is_file():
        raise InputError(f"{option} {path} is not a file")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{option} {path}: the folder {path.parent} cannot be written")


def check_folder(output: str | Path) -> Path:
    """The folder. Raises InputError if there is one that cannot be written, or something else."""
    if not str(output):
        raise InputError("--output is empty: expected a folder")
    try:
        str(output).encode()
    except UnicodeEncodeError:  # which reports that name it could not be written with
        raise InputError(f"--output {str(output)!r}: expected a name in UTF-8") from None
    folder = Path(os.path.realpath(output))
    if is_there(folder, "--output") and not folder.is_dir():
        raise InputError(f"--output {output}: no folder can be there: it is a file")
    if folder.exists() and not os.access(folder, os.W_OK):
        raise InputError(f"--output {output}: the folder cannot be written")
    return folder


def is_there(path: Path, option: str) -> bool:
    """Whether something is at `path`. Raises InputError where nothing can be, as with a name that
    is too long."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{option} {path}: {reason}") from error
    return True


Entry = TypeVar("Entry")
Key = TypeVar("Key", bound=Hashable)

NOT_OURS = (ValueError, TypeError, LookupError, ArithmeticError)
"""What a line raises, read as one of ours, that is none."""
OF_WEIGHTS = ("weights", "adapter", "merged", "dtype", "device", "threads", "compiled")
"""What a run says that an outline of its model does not know (`decode.cli`)."""


class Ledger(ABC, Generic[Key, Entry]):
    """JSONL at `path` of the run described by `run`.

    Opening reads what is there and changes nothing: `done` are the entries already there, by key,
    `torn` says that a half-written last line will be dropped. Raises InputError if the file is not
    of this very run; one without entries belongs to nobody.
    """

    HEADER: ClassVar[str] = "run"
    """The key of the first line."""
    FILE: ClassVar[str]
    ENTRY: ClassVar[str]
    """What the file and a line of it are called in errors."""
    SYNC: ClassVar[bool] = False
    """Whether an entry is on disk before `add` returns; without, a killed command loses none, but
    a machine without power may."""

    def __init__(self, path: str | Path, run: dict[str, Any]):
        # Through links: what is written takes the place of `path` by a rename, which would replace
        # the link itself.
        self.path = Path(os.path.realpath(path))
        check_place(self.path, "--output")
        # As it comes back from the file (tuples as lists, keys as text), else it would differ from
        # its own header.
        self.run = json.loads(json.dumps(run))
        self.done: dict[Key, Entry] = {}
        self.torn = False
        self._whole = b""  # lines that are there
        self._ready = False  # an entry can be appended
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error
        if data:
            self._read(data)

    @abstractmethod
    def key(self, entry: Entry) -> Key:
        """What tells an entry from the others of the run."""

    @abstractmethod
    def line(self, entry: Entry) -> str:
        """An entry as a line, with its end."""

    @abstractmethod
    def parsed(self, line: bytes, where: str) -> Entry | None:
        """The entry of a line, None for a line beside the entries. Raises `NOT_OURS`, or where
        that can say more InputError that begins with `where`."""

    def kept(self, entry: Entry) -> Entry:
        """What of an entry stays in memory: here all of it."""
        return entry

    @classmethod
    def refuse_early(cls, path: str | Path, run: dict[str, Any]) -> None:
        """Raise InputError where the file has entries of another run, as far as that is known of a
        model without its weights; what else is wrong is found when it is opened. run: of a model
        that is an outline."""
        known = {key: value for key, value in run.items() if key not in OF_WEIGHTS}
        try:
            with Path(path).open("rb") as file:
                first, entry = file.readline(), file.readline()
            there = dict(parse(first, nan=True)[cls.HEADER])
        except (OSError, *NOT_OURS):
            return
        if entry:
            shared = {key: there[key] for key in there if key not in OF_WEIGHTS}
            refuse_another_run(Path(path), shared, json.loads(json.dumps(known)))

    def _read(self, data: bytes) -> None:
        first, *lines = data.split(b"\n")
        try:
            there = dict(parse(first, nan=True)[self.HEADER])
        except NOT_OURS as error:
            raise InputError(f"{self.path} {self.FILE}; nothing was written") from error
        # Behind the last newline there is nothing, unless a write was cut short.
        self.torn = not lines or bool(lines.pop())
        try:
            for number, line in enumerate(lines, 2):
                self._read_line(line, f"{self.path}, line {number}")
        except InputError:
            refuse_another_run(self.path, there, self.run)  # which says more
            raise
        # A header alone, of whatever run, holds nothing that could be lost: `start` replaces it.
        if self.done:
            refuse_another_run(self.path, there, self.run)
        if there == self.run:
            # What `start` writes back where the last line is torn.
            self._whole = data[: data.rfind(b"\n") + 1]
            self._ready = not self.torn

    def _read_line(self, line: bytes, where: str) -> None:
        try:
            entry = self.parsed(line, where)
            if entry is not None and self.key(entry) in self.done:
                raise ValueError("twice")
        except InputError:
            raise
        except NOT_OURS as error:
            raise InputError(f"{where} is not {self.ENTRY}, or its second one") from error
        if entry is not None:
            self.done[self.key(entry)] = self.kept(entry)

    def start(self) -> None:
        """Write the first line where it is missing, and drop a torn last one; `add` does so, too.
        Raises OutputError."""
        if not self._ready:
            # Before the rename the old file is there, after it the new one, without the torn line.
            write_beside(self.path, self._whole or json_line({self.HEADER: self.run}))
            self._ready = True

    def add(self, entry: Entry) -> None:
        """Append an entry. Raises OutputError."""
        self.start()
        with GrowingFile(self.path) as file:
            file.write(self.line(entry), sync=self.SYNC)
        self.done[self.key(entry)] = self.kept(entry)


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
