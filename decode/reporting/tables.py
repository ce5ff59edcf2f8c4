"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], entries: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table, an entry a line."""
    lines = [columns, *([str(cell) for cell in entry] for entry in entries)]
    head, *rest = ["| " + " | ".join(cells) + " |" for cells in lines]
    return [head, "|---" * len(columns) + "|", *rest]
