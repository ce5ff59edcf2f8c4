"""What a run reads: its paths, which may be spelled in several ways, and digests of their content,
so that a resume knows whether it is still the same."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from d2f.errors import InputError
from d2f.hub import folder_of
from d2f.models import resolve
from d2f.weight_files import ADAPTER_WEIGHTS
from distill.config import TrainConfig
from distill.unread_keys import value_of

_FILES = ("data.file", "noise.states", "evaluation.loss_file")
# Keys whose value is a place. All but the files may be hub names too.
PATHS = (*_FILES, "data.dataset", "init", "init_adapter", "tokenizer")


def same_place(one: str, other: str) -> bool:
    """Whether two spellings (relative, absolute, through a link) are of one file or folder."""
    return os.path.realpath(one) == os.path.realpath(other)


def digests(config: TrainConfig) -> dict[str, str]:
    """SHA-256 of what a run trains on, by its key: of files and saved data sets the content, of the
    base its weights' `fingerprint`. What only the hub has is left out. Raises InputError."""
    from d2f.adapter_base import fingerprint

    found = {}
    for key in _FILES:
        path = value_of(config, key)
        if path is not None:
            found[key] = file_digest(Path(path))
    if config.data.dataset is not None and Path(config.data.dataset).is_dir():
        found["data.dataset"] = _folder_digest(Path(config.data.dataset))
    if config.init is not None:
        # Not a digest of the whole: base weights are many gigabytes, and every start would read
        # them.
        found["init"] = fingerprint(resolve(config.init))
    if config.init_adapter is not None:
        found["init_adapter"] = file_digest(
            folder_of(resolve(config.init_adapter)) / ADAPTER_WEIGHTS
        )
    return found


def file_digest(path: Path) -> str:
    """SHA-256 of a file, which is read in pieces. Raises InputError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _folder_digest(folder: Path) -> str:
    """Of the names and contents of a data set's files, without what `datasets` caches there."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith((".", "cache-")):
            digest.update(f"{path.relative_to(folder)}\0{file_digest(path)}\n".encode())
    return digest.hexdigest()
