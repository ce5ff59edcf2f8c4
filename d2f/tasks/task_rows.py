"""The rows of a task file's data, by split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from d2f.data_records import BadRecord, Source, Table, open_records
from d2f.errors import InputError
from d2f.tasks.splits import SPLITS
from d2f.tasks.task import ALL
from d2f.tasks.task_file import TaskFile

USUAL_PROMPTS = ("messages", "prompt", "question")
USUAL_REFERENCES = ("reference", "answer", "response")
_FILES = (".jsonl", ".json", ".parquet")
Row = Mapping[str, Any]
Place = tuple[Source, int]
"""A row: its source, and its number there."""


class TaskRows:
    """The rows of a task, read when they are first asked for. name: the task's, in errors. folder:
    beside which data may lie. columns: those that are read by name, None for all that there are."""

    def __init__(self, file: TaskFile, name: str, folder: Path, columns: set[str] | None):
        self.file, self.name, self.folder, self.columns = file, name, folder, columns
        self._sources: dict[str, Source] = {}
        self._splits: dict[str, list[Place]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which opens the data itself."""
        return {**vars(self), "_sources": {}, "_splits": {}}

    def of(self, split: str) -> list[Place]:
        """The rows of a split. Raises InputError where there is none."""
        if split not in self._splits:
            self._splits[split] = self._of(split)
        return self._splits[split]

    def _of(self, split: str) -> list[Place]:
        splits = {str(name): place for name, place in self.file.splits.items()}
        shares = {name: value for name, value in splits.items() if not isinstance(value, str)}
        if split == ALL and shares:
            return self._whole(None)
        place = splits.get(split)
        if place is None:
            known = [*splits, *([ALL] if shares else [])]
            raise InputError(
                f"{self.name} has no split {split}, it has {', '.join(known)}: `splits` of a task "
                "file says where they are"
            )
        if isinstance(place, str):
            return self._whole(place)
        # The shares lie one after the other in [0, 1): where a row's hash falls is its split.
        before = SPLITS[: SPLITS.index(split)]
        low = sum(share for name, share in shares.items() if name in before)
        whole = self._whole(None)
        rows = [row for row in whole if low <= _fraction(row) < low + place]
        if not rows:
            raise InputError(
                f"{self.name}: none of the {len(whole)} rows of {whole[0][0].name} fell into the "
                f"share {place:g} of the {split} split: give it a larger one"
            )
        return rows

    @property
    def are_shares(self) -> bool:
        """Whether the splits are parts of one whole."""
        return all(not isinstance(place, str) for place in self.file.splits.values())

    @property
    def digests(self) -> list[str]:
        """Of the data that the splits are in."""
        places = {place if isinstance(place, str) else None for place in self.file.splits.values()}
        return sorted(self._source(place).digest for place in places)

    def _whole(self, place: str | None) -> list[Place]:
        source = self._source(place)
        return [(source, number) for number in range(len(source))]

    def _source(self, place: str | None) -> Source:
        """A split of the data set, or another file; place: None for data's own."""
        kept = place or ""
        if kept not in self._sources:
            try:
                self._sources[kept] = self._open(place)
            except InputError as error:
                raise InputError(f"{self.name}: {error}") from error
        return self._sources[kept]

    def _open(self, place: str | None) -> Source:
        file = self.file
        path = self._path(file.data)
        if path is None:
            folder = self.folder / file.data
            source = open_records(
                str(folder) if folder.is_dir() else file.data,
                is_file=False,
                config=file.dataset_config,
                split=place or file.split,
            )
        elif file.dataset_config is not None or file.split is not None:
            raise InputError("dataset_config and split are for data sets, not for a file")
        else:
            other = path if place is None else self._path(place)
            if other is None:
                raise InputError(
                    f"splits: expected a share or another file, got {place!r}: {file.data} is a "
                    "file, which has no splits of its own"
                )
            source = open_records(str(other), is_file=True)
        if isinstance(source, Table):
            self._select(source)
        return source

    def _path(self, name: str) -> Path | None:
        """The file of that name, beside the task's or by its path; None where it is none."""
        for path in (self.folder / name, Path(name)):
            if path.is_file():
                return path
        if name.endswith(_FILES):
            raise InputError(f"{name}: there is no such file")
        return None

    def _select(self, table: Table) -> None:
        """Read only what is needed. Raises InputError for a column that there is not."""
        if self.columns is None:
            return
        lacking = sorted(self.columns - set(table.columns))
        if lacking:
            raise InputError(
                f"{table.name} has no column {', '.join(lacking)}, it has "
                f"{', '.join(table.columns)}"
            )
        usual = {*USUAL_PROMPTS, *USUAL_REFERENCES} & set(table.columns)
        table.select(sorted(self.columns | usual))


def read_row(place: Place) -> Row:
    """A row's columns. Raises BadRecord."""
    source, number = place
    row = source.record(number)
    if not isinstance(row, Mapping):
        raise BadRecord(f"expected an object of columns, got {str(row)[:60]!r}")
    return row


def key_of(row: Any) -> str:
    """A row's content as a hash."""
    content = json.dumps(row, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _fraction(place: Place) -> float:
    """Where in [0, 1) a row lies, by its content alone: equal rows are in one split."""
    source, number = place
    return int(key_of(source.attempt(number))[:13], 16) / 16**13
