"""Records by number from a JSONL file, a parquet file or a Hugging Face data set."""

from __future__ import annotations

import glob
import hashlib
import json
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from d2f.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

_CHUNK = 1000
_LONGEST = 400  # characters of why a record is bad


class BadRecord(Exception):
    """A record that cannot be used, and why, in one line that can be printed; who reads the record
    knows where it is."""

    def __init__(self, why: str):
        # Records hold anything: no line break and no half surrogate may reach a terminal or a log.
        line = " ".join(why.split())
        super().__init__(line.encode("utf-8", "backslashreplace").decode()[:_LONGEST])


class Source(ABC):
    """Records by number, kept on disk. name: what to call it. digest: of its content."""

    name: str
    digest: str

    @abstractmethod
    def __len__(self) -> int:
        """The number of records."""

    @abstractmethod
    def record(self, number: int) -> Any:
        """Record `number`, counted from 0. Raises BadRecord."""

    def where(self, number: int) -> str:
        """How to find a record."""
        return f"{self.name}, row {number}"

    def records(self) -> Iterator[list[Any]]:
        """All records in chunks, a BadRecord in the place of one that cannot be read."""
        for start in range(0, len(self), _CHUNK):
            yield [self.attempt(i) for i in range(start, min(start + _CHUNK, len(self)))]

    def attempt(self, number: int) -> Any:
        """Record `number`, a BadRecord where it cannot be read."""
        try:
            return self.record(number)
        except BadRecord as error:
            return error


class JsonLines(Source):
    """A JSONL file: only where its lines begin is in memory. Blank lines are no records. It is read
    and not mapped into memory, where a file that shrinks would end the process (SIGBUS)."""

    def __init__(self, path: Path):
        self.name = str(path)
        starts, numbers, position = [], [], 0
        digest = hashlib.sha256()
        try:
            with path.open("rb") as file:
                # One pass over the file: where each record begins, its line number for errors, the
                # digest.
                for number, line in enumerate(file, 1):
                    digest.update(line)
                    if line.strip():
                        starts.append(position)
                        numbers.append(number)
                    position += len(line)
                if not starts:
                    raise InputError(f"{path}: expected at least one line, got none")
            # Kept open for the run: a record is one seek and one read.
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error
        self.digest = digest.hexdigest()
        self._starts = np.array([*starts, position], dtype=np.int64)
        self._numbers = np.array(numbers, dtype=np.int64)
        weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return len(self._numbers)

    def where(self, number: int) -> str:
        return f"{self.name}, line {self._numbers[number]}"

    def record(self, number: int) -> Any:
        # From its own beginning to that of the next record; blank lines between are stripped.
        line = self._bytes(int(self._starts[number]), int(self._starts[number + 1])).strip()
        try:
            return json.loads(line.decode("utf-8-sig"))
        except ValueError as error:  # of the JSON, of the encoding, or a number of 5000 digits
            raise BadRecord(f"not JSON ({error}): {line[:60]!r}") from error
        except RecursionError as error:
            raise BadRecord(f"JSON that is nested too deeply: {line[:60]!r}") from error

    def _bytes(self, start: int, end: int) -> bytes:
        """The file between two places. Raises InputError where it has become shorter."""
        try:
            self._file.seek(start)
            data = self._file.read(end - start)
        except OSError as error:
            raise InputError(f"{self.name}: cannot be read: {error.strerror}") from error
        if len(data) < end - start:
            raise InputError(
                f"{self.name} has become shorter while it is read: expected {end - start} bytes "
                f"from {start} on, got {len(data)}; put it back as it was, the same command goes on"
            )
        return data


class Table(Source):
    """A `datasets.Dataset`. columns: those that are there, of which `select` says which are
    read."""

    def __init__(self, dataset: Any, name: str, digest: str | None = None):
        self.name, self.digest = name, digest or str(dataset._fingerprint)
        self.columns: list[str] = dataset.column_names
        if len(dataset) == 0:
            raise InputError(f"{name}: expected at least one row, got none")
        self._dataset = self._whole = dataset

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns: others (images, embeddings) are not decoded with each record."""
        self._dataset = self._dataset.select_columns(list(columns))

    def arrow(self, numbers: Sequence[int]) -> Any:
        """Rows as they are stored, all columns of them: a `pyarrow.Table`."""
        rows = self._whole.with_format("arrow")[list(numbers)]
        return rows.replace_schema_metadata(None)  # which says what `datasets` makes of columns

    def __len__(self) -> int:
        return len(self._dataset)

    def record(self, number: int) -> Any:
        try:
            return self._dataset[number]
        except (OSError, ValueError) as error:  # as Arrow's errors are; text that is not UTF-8
            raise BadRecord(f"cannot be read: {_first(error)}") from error

    def records(self) -> Iterator[list[Any]]:
        for start in range(0, len(self), _CHUNK):
            numbers = range(start, min(start + _CHUNK, len(self)))
            try:
                chunk = self._dataset[numbers.start : numbers.stop]
            except (OSError, ValueError):  # one of them cannot be read
                yield [self.attempt(number) for number in numbers]
                continue
            columns = zip(*chunk.values(), strict=True)
            yield [dict(zip(chunk, values, strict=True)) for values in columns]


LINE = "JSON line"


def load_rows(
    place: str, *, is_file: bool, config: str | None = None, split: str | None = None
) -> Dataset:
    """Load the rows of a file (JSONL; parquet, CSV or a list in JSON by its ending), or of a data
    set: a folder of save_to_disk, or what load_dataset finds.

    A line of JSONL is a row with the one column `LINE`, as it stands there: so a broken line is
    one broken row and not a broken file. config, split: of a data set; the split is by default
    train. Raises InputError that says what there is.
    """
    path = Path(place)
    if path.exists() and not path.is_file() and (is_file or not path.is_dir()):
        raise InputError(f"{path}: expected a file of rows, got a folder, a pipe or a device")
    if not is_file:
        found = _load(place, config, split)
    else:
        try:
            with path.open("rb") as file:
                first = file.read(4096).lstrip()[:1]
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error
        if not first:
            raise InputError(f"{place}: expected at least one row, got none")
        kind = {".parquet": "parquet", ".csv": "csv"}.get(path.suffix, "text")
        if path.suffix == ".json" and first == b"[":
            kind = "json"
        # What is not UTF-8 becomes an escape that JSON does not have.
        coded = {"encoding": "utf-8-sig", "encoding_errors": "backslashreplace"}
        # The path itself: it may have the characters of a pattern.
        files = {"data_files": glob.escape(str(path))}
        found = _read(kind, path, **files, **(coded if kind == "text" else {}))
        if kind == "text":
            found = found.rename_column("text", LINE)
    if len(found) == 0:
        raise InputError(f"{place}: expected at least one row, got none")
    return found


def open_records(
    place: str, *, is_file: bool, config: str | None = None, split: str | None = None
) -> Source:
    """The records of a file (JSONL; parquet by its ending), or of a data set: a folder of
    save_to_disk, or what load_dataset finds. config, split: of a data set; the split is by default
    train. Raises InputError that says what there is."""
    path = Path(place)
    if path.exists() and not path.is_file() and (is_file or not path.is_dir()):
        raise InputError(f"{path}: expected a file of rows, got a folder, a pipe or a device")
    if not is_file:
        return Table(_load(place, config, split), f"{place} ({split or 'train'})")
    try:
        if path.suffix != ".parquet":
            return JsonLines(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return Table(_read("parquet", path, data_files=str(path)), str(path), digest)


def _load(place: str, config: str | None, split: str | None) -> Any:
    """A data set saved with save_to_disk, or one that load_dataset finds."""
    folder = Path(place)
    if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return _read(place, place, name=config, split=split or "train")
    if config is not None:
        raise InputError(f"dataset_config: {place} is a saved data set, which has none")
    datasets = _library()
    try:
        saved = datasets.load_from_disk(place)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{place}: the saved data set cannot be read: {_first(error)}") from error
    # A single saved data set stands for the split that it names, or for the one asked for.
    if not isinstance(saved, datasets.DatasetDict):
        saved = {str(saved.split or split): saved}
    if (split or "train") in saved:
        return saved[split or "train"]
    if split is None and len(saved) == 1:
        return next(iter(saved.values()))
    raise InputError(f"{place}: expected split among {', '.join(saved)}, got {split}")


def _read(kind: str, place: str | Path, **options: Any) -> Any:
    datasets = _library()
    try:
        return datasets.load_dataset(kind, **({"split": "train"} | options))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise InputError(f"{place}: cannot be loaded as a data set: {_first(cause)}") from error


def _library() -> Any:
    """Import `datasets`; its bars are for a terminal."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _first(error: BaseException) -> str:
    """The first lines of an error, in one."""
    return " ".join(str(error).split())[:300] or type(error).__name__
