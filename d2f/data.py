"""Read rows from a file (JSONL, parquet, CSV) or a Hugging Face data set, by `datasets`."""

from __future__ import annotations

import glob
import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.errors import InputError, one_line

if TYPE_CHECKING:
    from datasets import Dataset

LINE = "JSON line"
_LONGEST = 400  # characters of why a record is bad
_UNPACKED = 2**30  # bytes that any parquet file may unpack to


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
    if is_file:
        found = _load_file(path)
    elif any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        if config is not None:
            raise InputError(f"dataset_config: {place} is a saved data set, which has none")
        found = _load_saved(place, split)
    else:
        for file in path.rglob("*.parquet") if path.is_dir() else ():
            _check_unpacked(file)
        found = _read(place, place, name=config, split=split or "train")
    if len(found) == 0:
        raise InputError(f"{place}: expected at least one row, got none")
    return found


def _load_file(path: Path) -> Dataset:
    try:
        with path.open("rb") as file:
            first = file.read(4096).lstrip()[:1]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if not first:
        raise InputError(f"{path}: expected at least one row, got none")
    # The path itself: it may have the characters of a pattern.
    options = {"data_files": glob.escape(str(path)), "split": "train"}
    kind = {".parquet": "parquet", ".csv": "csv"}.get(path.suffix)
    if kind is None and path.suffix == ".json" and first == b"[":
        kind = "json"
    if kind == "parquet":
        _check_unpacked(path)
    if kind is not None:
        return _read(kind, path, **options)
    # Bytes that are not UTF-8 become an escape that JSON does not know.
    coded = {"encoding": "utf-8-sig", "encoding_errors": "backslashreplace"}
    return _read("text", path, **options, **coded).rename_column("text", LINE)


def _check_unpacked(path: Path) -> None:
    """Raise InputError for a parquet file, as small as it may be, that unpacks to very much:
    `datasets` would write all of it to its cache."""
    from pyarrow import ArrowException, parquet

    most, size = max(_UNPACKED, 100 * path.stat().st_size), 0
    with suppress(OSError, ArrowException), parquet.ParquetFile(path) as file:  # `_read` says why
        for batch in file.iter_batches(batch_size=16):  # a value may be long
            size += batch.nbytes
            if size > most:
                break
    if size > most:
        raise InputError(
            f"{path}: expected at most {most:,} bytes of rows, the file of {path.stat().st_size:,} "
            "bytes unpacks to more: take JSONL, or several files"
        )


def _load_saved(place: str, split: str | None) -> Dataset:
    datasets = _library()
    try:
        saved = datasets.load_from_disk(place)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{place}: the saved data set cannot be read: {_first(error)}") from error
    # A single saved data set stands for the split that it names, or for the one asked for.
    if not isinstance(saved, datasets.DatasetDict):
        saved = {str(saved.split or split): saved}
    only = next(iter(saved)) if split is None and len(saved) == 1 else "train"
    if (split or only) not in saved:
        raise InputError(f"{place}: expected split among {', '.join(saved)}, got {split}")
    found: Dataset = saved[split or only]
    return found


def _read(kind: str, place: str | Path, **options: Any) -> Dataset:
    datasets = _library()
    try:
        found: Dataset = datasets.load_dataset(kind, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise InputError(f"{place}: cannot be loaded as a data set: {_first(cause)}") from error
    return found


def _library() -> Any:
    """Import `datasets`; its bars are for a terminal."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def _first(error: BaseException) -> str:
    """Join the first lines of an error."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _cut(numbers: Sequence[int], part: str, place: str) -> list[int]:
    """Take the rows of a part, such as test[:500], of those with these numbers."""
    name = part.partition("[")[0]
    try:
        cuts = _library().ReadInstruction.from_spec(part).to_absolute({name: len(numbers)})
    except ValueError as error:
        raise InputError(f"{place}: expected a part such as {name}[:500], got {part}") from error
    return [number for cut in cuts for number in numbers[cut.from_ : cut.to]]


class Source:
    """Give the rows of a file or data set by number, as Python values.

    name: what errors call it. digest: of its content. columns: of a table; None for lines of JSON,
    of which blank ones are no rows. The arguments are those of `load_rows`. parts: the rows to
    keep, as `datasets` writes it, test[:500]; each is a part of what the one before it keeps.
    """

    def __init__(
        self,
        place: str,
        *,
        is_file: bool,
        config: str | None = None,
        split: str | None = None,
        parts: Sequence[str] = (),
    ):
        self._rows = self._read = load_rows(place, is_file=is_file, config=config, split=split)
        self.name = place if is_file else f"{place} ({split or 'train'})"
        self.digest = str(self._rows._fingerprint)
        if is_file:
            with Path(place).open("rb") as file:
                self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.columns: list[str] | None = None
        self._numbers: Sequence[int] = range(len(self._rows))
        if self._rows.column_names != [LINE]:
            self.columns = self._rows.column_names
        else:
            self._numbers = [i for i, line in enumerate(self._rows[LINE]) if line.strip()]
        for part in parts:
            self._numbers = _cut(self._numbers, part, place)
            self.digest += f" {part}"
        if not self._numbers:
            where = " of ".join([*parts[::-1], place])
            raise InputError(f"{where}: expected at least one row, got none")

    def __len__(self) -> int:
        return len(self._numbers)

    def where(self, number: int) -> str:
        """Say where a row is found."""
        row = self._numbers[number]
        place = f"row {row}" if self.columns else f"line {row + 1}"
        return f"{self.name}, {place}"

    def select(self, columns: Sequence[str]) -> None:
        """Read only these columns: others (images, embeddings) are not decoded with each row."""
        self._read = self._rows.select_columns(list(columns))

    def record(self, number: int) -> Any:
        """Read row `number`, counted from 0. Raises BadRecord."""
        try:
            row = self._read[self._numbers[number]]
        except (OSError, ValueError) as error:  # as Arrow's errors are; text that is not UTF-8
            raise BadRecord(f"cannot be read: {_first(error)}") from error
        if self.columns is not None:
            return row
        try:
            # NaN and Infinity, which Python writes and JSON has not, are null.
            return json.loads(row[LINE], parse_constant=lambda name: None)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"not JSON ({error}): {row[LINE][:60]!r}") from error

    def attempt(self, number: int) -> Any:
        """Read row `number`, a BadRecord where it cannot be read."""
        try:
            return self.record(number)
        except BadRecord as error:
            return error

    def arrow(self, numbers: Sequence[int]) -> Any:
        """Take rows of a table as they are stored, all columns of them: a `pyarrow.Table`."""
        rows = self._rows.with_format("arrow")[list(numbers)]
        return rows.replace_schema_metadata(None)  # which says what `datasets` makes of columns
