"""JSON files of others: read in one place, so that whatever is wrong with one is the same error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from d2f.errors import InputError


def read_object(path: str | Path, error: type[InputError] = InputError) -> dict[str, Any]:
    """The JSON object in a file. Raises `error`, which names the file, where it cannot be read, is
    not JSON (NaN and Infinity are not), is nested too deep, or holds something else."""
    try:
        values = parse(Path(path).read_text(encoding="utf-8"))
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror or cause}") from cause
    except ValueError as cause:
        raise error(f"{path} is not JSON: {cause}") from cause
    if not isinstance(values, dict):
        raise error(f"{path} must be a JSON object, got {type(values).__name__}")
    return values


def parse(text: str | bytes, *, nan: bool = False) -> Any:
    """The value of a JSON text. nan: NaN and Infinity too, which Python writes. Raises ValueError
    for all that is none, deep nesting included."""
    try:
        return json.loads(text, parse_constant=None if nan else _refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
