"""Errors of writing (a full disk, a folder that cannot be written) that say what there still is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from d2f.errors import OutputError


@contextmanager
def says_what_is_kept(place: Path, kept: str) -> Iterator[None]:
    """Around the writing of `place`: its errors become OutputError that names what could not be
    written, why, and in `kept` what there still is. Nothing else that may fail belongs inside."""
    try:
        yield
    except OutputError as error:
        raise OutputError(f"{error}; {kept}") from error
    except (OSError, SafetensorError) as error:
        what = getattr(error, "filename", None) or place
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{what} could not be written: {reason}; {kept}") from error
