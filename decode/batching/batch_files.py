"""The files that a batch job leaves, written when every row has been looked at:

rows {"id": "a", "prompt": "2 + 3"}     ->  answers.jsonl  {"id": "a", "prompt": "2 + 3",
     {"id": "b", "promt": "2 + 4"}              "row": 0, "text": "5", "tokens": [12], ...}
                                            bad.jsonl      {"row": 1, "where": "sums.jsonl, line 2",
                                                            "error": "expected ...", "input": {...}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from d2f.data_records import BadRecord, Source, Table
from d2f.errors import InputError
from d2f.files import writing
from decode.batching.batch_ledger import BatchLedger
from decode.batching.batch_rows import FIELDS, Answer, renamed
from decode.reporting.ledger import json_line

LEDGER, BAD = "ledger.jsonl", "bad.jsonl"
_CHUNK = 1000  # rows


def answers_name(source: Source) -> str:
    """Of the kind that the rows came in; a data set's are parquet, which is one to those who load
    it."""
    return "answers.parquet" if isinstance(source, Table) else "answers.jsonl"


def check_names(source: Source) -> None:
    """Raise InputError where a table's columns cannot stand beside ours."""
    if isinstance(source, Table):
        try:
            renamed(source.columns)
        except BadRecord as error:
            raise InputError(f"{source.name}: {error}") from error


def check_free(source: Source, folder: Path) -> None:
    """Raise InputError where a file of another command, perhaps the input itself, is in the place
    of one of ours, which are there with their ledger alone."""
    for name in (answers_name(source), BAD):
        if (folder / name).exists() and not (folder / LEDGER).exists():
            raise InputError(
                f"{folder / name} exists and is not of this command; nothing was written, give "
                "another --output"
            )


def write_files(ledger: BatchLedger, source: Source, folder: Path) -> None:
    """Write the answers in the order of the rows, and the bad rows. Raises OutputError."""
    good = (answer for answer in ledger.answers() if answer.error is None)
    if isinstance(source, Table):
        _write_parquet(good, source, folder / answers_name(source))
    else:
        _write_lines((_line(answer, source) for answer in good), folder / answers_name(source))
    bad = (answer for answer in ledger.answers() if answer.error is not None)
    _write_lines((_bad_line(answer, source) for answer in bad), folder / BAD)


def _line(answer: Answer, source: Source) -> str:
    row = source.record(answer.row)
    own = dict(zip(renamed(list(row)), row.values(), strict=True))
    return json_line(_of_json(own) | _fields(answer))


def _of_json(value: Any) -> Any:
    """The same, with None for the numbers that JSON has not: NaN, and what is read as infinite."""
    if isinstance(value, dict):
        return {key: _of_json(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_of_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fields(answer: Answer) -> dict[str, Any]:
    values = asdict(answer)
    return {name: values[name] for name in FIELDS}


def _bad_line(answer: Answer, source: Source) -> str:
    row = source.attempt(answer.row)
    values = {"row": answer.row, "where": source.where(answer.row), "error": answer.error}
    return (
        json.dumps(
            values | ({} if isinstance(row, BadRecord) else {"input": _of_json(row)}), default=str
        )
        + "\n"
    )


def _write_lines(lines: Iterable[str], path: Path) -> None:
    with writing(path) as file:
        for line in lines:
            file.write(line.encode())


def _write_parquet(answers: Iterator[Answer], source: Table, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    ours = pa.schema(
        [
            ("row", pa.int64()),
            ("text", pa.string()),
            ("tokens", pa.list_(pa.int32())),
            ("forwards", pa.int32()),
            ("finish_reason", pa.string()),
            ("seed", pa.uint64()),
        ]
    )

    def joined(some: Sequence[Answer]) -> Any:
        table = source.arrow([answer.row for answer in some])
        table = table.rename_columns(renamed(table.column_names))
        for name, column in zip(
            FIELDS, pa.Table.from_pylist([_fields(a) for a in some], ours).columns, strict=True
        ):
            table = table.append_column(ours.field(name), column)
        return table

    with writing(path) as file:
        first = joined(list(islice(answers, _CHUNK)))
        with pq.ParquetWriter(file, first.schema) as writer:
            writer.write_table(first)
            while some := list(islice(answers, _CHUNK)):
                writer.write_table(joined(some))
