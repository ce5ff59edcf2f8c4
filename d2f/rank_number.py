"""Read this process's rank from torchrun's environment. Imports no torch."""

from __future__ import annotations

import os

from d2f.errors import InputError


def rank() -> int:
    """Return this process's number, 0 where it was started alone."""
    return _number("RANK", 0)


def check_processes(size: int) -> None:
    """Raise InputError unless torchrun started this process as one of `size`."""
    count = _number("WORLD_SIZE", 1)
    if count != size or not 0 <= rank() < size:
        raise InputError(
            f"tensor parallel {size} needs {size} processes, got {count}: start them with "
            f"torchrun --nproc-per-node {size} -m COMMAND --tensor-parallel {size}"
        )


def _number(variable: str, default: int) -> int:
    found = os.environ.get(variable, "")
    return int(found) if found.isdecimal() else default
