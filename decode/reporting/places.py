"""Where a command may write: checked, and held, before any work."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from d2f.errors import InputError
from d2f.locks import locked_file


def hold_output(path: str | Path | None) -> AbstractContextManager[None]:
    """Hold the file of --output, if one is given, for this command alone. Raises InputError where
    no file can be there or another command writes it."""
    if path is None:
        return nullcontext()
    place = Path(os.path.realpath(path))
    check_place(place, "--output")
    return locked_file(place)


def check_place(path: Path, option: str) -> None:
    """Raise InputError if no file can be put at `path`."""
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: the folder {path.parent} does not exist")
    if is_there(path, option) and not path.is_file():
        raise InputError(f"{option} {path} is not a file")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{option} {path}: the folder {path.parent} cannot be written")


def check_folder(output: str | Path) -> Path:
    """The folder. Raises InputError if there is one that cannot be written, or something else."""
    if not str(output):
        raise InputError("--output is empty: expected a folder")
    try:
        str(output).encode()
    except UnicodeEncodeError:  # which reports that name it could not be written with
        raise InputError(f"--output {str(output)!r}: expected a name in UTF-8") from None
    folder = Path(os.path.realpath(output))
    if is_there(folder, "--output") and not folder.is_dir():
        raise InputError(f"--output {output}: no folder can be there: it is a file")
    if folder.exists() and not os.access(folder, os.W_OK):
        raise InputError(f"--output {output}: the folder cannot be written")
    return folder


def is_there(path: Path, option: str) -> bool:
    """Whether something is at `path`. Raises InputError where nothing can be, as with a name that
    is too long."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{option} {path}: {reason}") from error
    return True
