"""Files that are whole or not there."""

from __future__ import annotations

from pathlib import Path


def write_beside(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    beside = path.with_name(path.name + ".writing")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
