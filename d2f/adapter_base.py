"""Whether an adapter belongs to the base that it is put on: by hash where it carries one, else by
the name in its configuration."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from pathlib import Path

from safetensors import safe_open

from d2f.errors import CheckpointError, UnverifiedBaseWarning
from d2f.hub import folder_of
from d2f.models import HERE, resolve
from d2f.weight_files import weight_files

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]")


def base_name(path: str | None) -> str | None:
    """What a model in the folder `path` is called where its place says so for certain: owner/name
    for a snapshot in the hub's cache, a bundled model's name; None for any other folder."""
    if path is None:
        return None
    place = Path(path).absolute()
    repository = place.parent.parent.name
    if place.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return place.name if place.parent == HERE else None


def check_base(adapter: Path, named: str | None, base_hash: str | None, path: str | None) -> None:
    """Compare the base that an adapter was made for with the model in the folder `path`.

    named: the base by the adapter's configuration. base_hash: by its contract, which decides alone.
    Raises CheckpointError, with both, where they are known to differ; warns with
    UnverifiedBaseWarning where that cannot be known: a local folder may hold anything, and the name
    of a folder on the machine where the adapter was trained says little.
    """
    here = base_name(path) or path
    wanted = base_hash or _hash_of(named)
    # Hashes settle it, where both can be had; names are only the next best.
    if wanted is not None and path is not None:
        came = fingerprint(path)
        if came != wanted:
            raise CheckpointError(
                f"{adapter}: the adapter belongs to the base {named} ({wanted[:12]}), "
                f"this base is {here} ({came[:12]})"
            )
        return
    same_name = bool(named and here) and _last(str(named)) == _last(str(here))
    # Where both names are certain, different ones are an error. The name of a folder is not: there
    # the same is taken for good, and another is a warning.
    if base_name(path) is not None and named and _HUB_NAME.fullmatch(named):
        if named.lower() == str(here).lower():
            return
        if not same_name:  # another owner's copy may be of the same weights
            raise CheckpointError(
                f"{adapter}: the adapter belongs to the base {named}, this base is {here}; where "
                "they are the same weights, give the base as a folder of your own"
            )
    elif same_name:
        return
    warnings.warn(
        f"{adapter}: the base could not be verified: the adapter was made for "
        f"{named or 'a base that it does not name'}, this base is {here or 'not from a folder'}; "
        "on another base it gives wrong answers",
        UnverifiedBaseWarning,
        stacklevel=2,
    )


def _hash_of(named: str | None) -> str | None:
    """The fingerprint of a base that is a folder here or a bundled model, else None."""
    try:
        place = resolve(named or "")
        return fingerprint(place) if named and Path(place).is_dir() else None
    except (CheckpointError, OSError):  # holds something else, or no name
        return None


def fingerprint(place: str) -> str:
    """Identity of a checkpoint's weights, whatever the dtype they are loaded in: a hash over the
    name, shape and up to three rows (first, middle, last) of every tensor in its weight files.

    Raises CheckpointError where there are none.
    """
    folder = folder_of(place)
    entries: dict[str, bytes] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="np"):  # its header is looked at
            pass
        # Read, not mapped: a system may map megabytes around each row, which then count as ours.
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                shape, (begin, end) = tensor["shape"], tensor["data_offsets"]
                # Only these rows: the whole of 8B weights is 16 GB.
                rows = sorted({0, shape[0] // 2, shape[0] - 1}) if shape and shape[0] else []
                parts = [str(shape).encode()]
                for row in rows:
                    size = (end - begin) // shape[0]
                    file.seek(8 + length + begin + row * size)
                    parts.append(file.read(size))
                entries[name] = b"".join(parts)
    digest = hashlib.sha256()
    # By name: how the tensors are split into files does not matter.
    for name, content in sorted(entries.items()):
        digest.update(name.encode() + content)
    return digest.hexdigest()


def _last(name: str) -> str:
    """A model's name without owner or folder, as the hub compares names."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()
