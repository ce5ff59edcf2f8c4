"""Read rows from a file (JSONL, parquet, CSV) or a Hugging Face data set, by `datasets`."""

from __future__ import annotations

import glob
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.errors import InputError, one_line

if TYPE_CHECKING:
    from datasets import Dataset

LINE = "JSON line"
_LONGEST = 400  # characters of why a record is bad


class BadRecord(Exception):
    """A row that cannot be used, and why; the reader of the row knows where it is."""

    def __init__(self, why: str):
        super().__init__(one_line(" ".join(why.split()))[:_LONGEST])


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


class Source:
    """Give rows by number, as Python values. name: what errors call it. digest: of its content."""

    def __init__(self, rows: Dataset, name: str, digest: str | None = None):
        self.name, self.digest = name, digest or str(rows._fingerprint)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, number: int) -> Any:
        """Read row `number`, counted from 0. Raises BadRecord."""
        try:
            return self._rows[number]
        except (OSError, ValueError) as error:  # as Arrow's errors are; text that is not UTF-8
            raise BadRecord(f"cannot be read: {_first(error)}") from error

    def attempt(self, number: int) -> Any:
        """Read row `number`, a BadRecord where it cannot be read."""
        try:
            return self.record(number)
        except BadRecord as error:
            return error

    def where(self, number: int) -> str:
        """Say where a row is found."""
        return f"{self.name}, row {number}"


class Table(Source):
    """Give the rows of a table. columns: all that are there."""

    def __init__(self, rows: Dataset, name: str, digest: str | None = None):
        super().__init__(rows, name, digest)
        self.columns: list[str] = rows.column_names
        self._whole = rows

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns: others (images, embeddings) are not decoded with each row."""
        self._rows = self._rows.select_columns(list(columns))

    def arrow(self, numbers: Sequence[int]) -> Any:
        """Take rows as they are stored, all columns of them: a `pyarrow.Table`."""
        rows = self._whole.with_format("arrow")[list(numbers)]
        return rows.replace_schema_metadata(None)  # which says what `datasets` makes of columns


class JsonLines(Source):
    """Give the lines of a JSONL file, but for blank ones."""

    def __init__(self, path: Path, rows: Dataset | None = None):
        rows = load_rows(str(path), is_file=True) if rows is None else rows
        with path.open("rb") as file:
            super().__init__(rows, str(path), hashlib.file_digest(file, "sha256").hexdigest())
        self._numbers = [i for i, line in enumerate(rows[LINE]) if line.strip()]
        if not self._numbers:
            raise InputError(f"{path}: expected at least one row, got none")

    def __len__(self) -> int:
        return len(self._numbers)

    def where(self, number: int) -> str:
        return f"{self.name}, line {self._numbers[number] + 1}"

    def record(self, number: int) -> Any:
        line = self._rows[self._numbers[number]][LINE]
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"not JSON ({error}): {line[:60]!r}") from error


def open_records(
    place: str, *, is_file: bool, config: str | None = None, split: str | None = None
) -> Source:
    """Open the rows that `load_rows` finds. Raises InputError."""
    rows = load_rows(place, is_file=is_file, config=config, split=split)
    if not is_file:
        return Table(rows, f"{place} ({split or 'train'})")
    if rows.column_names == [LINE]:
        return JsonLines(Path(place), rows)
    with Path(place).open("rb") as file:
        return Table(rows, place, hashlib.file_digest(file, "sha256").hexdigest())


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
    """Join the first lines of an error."""
    return " ".join(str(error).split())[:300] or type(error).__name__
