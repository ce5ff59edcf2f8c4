"""The records of the section `data`: its file or data set, and the columns that are read."""

from __future__ import annotations

from d2f.data_records import Source, Table, open_records
from d2f.errors import InputError
from distill.data.columns import needed
from distill.data.data_config import Columns, Data

_USUAL = ("prompt", "response", "messages")


def open_source(data: Data) -> Source:
    """The records of `data.file` or `data.dataset`. Raises InputError that says what there is."""
    place = data.file or data.dataset
    assert place is not None
    source = open_records(
        place, is_file=data.file is not None, config=data.dataset_config, split=data.split
    )
    if isinstance(source, Table):
        _select(source, data.layout)
    return source


def _select(table: Table, columns: Columns | None) -> None:
    there = table.columns
    wanted = needed(columns) if columns else [c for c in _USUAL if c in there]
    lacking = [column for column in wanted if column not in there]
    if lacking or (columns is None and "messages" not in wanted and len(wanted) < 2):
        expected = " and ".join(wanted if columns else ("prompt", "response"))
        raise InputError(
            f"{table.name}: expected the columns {expected}{'' if columns else ', or messages'}, "
            f"got {', '.join(there)}; data.columns names others"
        )
    table.select(wanted)
