"""Files that a clone without Git LFS has pointers in place of: the commonest of damaged ones."""

from __future__ import annotations

from pathlib import Path

from d2f.errors import InputError

_BEGINS = b"version https://git-lfs."


def refuse_pointer(path: Path, error: type[InputError] = InputError) -> None:
    """Raise `error` where the file is a pointer. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        if file.read(len(_BEGINS)) == _BEGINS:
            raise error(f"{path}: is a pointer of Git LFS: `git lfs pull` gets the file")
