"""Training data: samples by index from generated tasks, files or data sets, packed into rows.

A record is a line of a file or an entry of a data set, as it lies there (a user is told of a row,
as in the keys on_bad_row and measure_rows); a sample is one record as token ids, with its tail of
end tokens; a row is what a forward is fed, `data.row_length` places that hold several samples.

Importing this package loads nothing heavy; torch comes with the first use. `python -m distill.data
--inspect` shows what a model will see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.data.samples import HeldOut, Placed, Sample
    from distill.data.stream import Plan, Stream, fill_rows, hold_out, lay_out, make_stream, plan

__all__ = [
    "HeldOut",
    "Placed",
    "Plan",
    "Sample",
    "Stream",
    "fill_rows",
    "hold_out",
    "lay_out",
    "make_stream",
    "plan",
]

_HOMES = {
    "HeldOut": "samples",
    "Placed": "samples",
    "Plan": "stream",
    "Sample": "samples",
    "Stream": "stream",
    "fill_rows": "stream",
    "hold_out": "stream",
    "lay_out": "stream",
    "make_stream": "stream",
    "plan": "stream",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distill.data' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"distill.data.{_HOMES[name]}"), name)
