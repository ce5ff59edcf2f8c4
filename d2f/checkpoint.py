"""Find a checkpoint's files, here or on the hub; read headers; check that weights fit."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from d2f.errors import CheckpointError, InputError, did_you_mean
from d2f.models import HERE, names, resolve

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")


def folder_of(place: str, *, weights: bool = True) -> Path:
    """Find the folder that `place` names: one here, a bundled model, or one fetched from the hub.

    weights: False fetches all but the weight files. Raises CheckpointError where there is none.
    """
    folder = Path(resolve(place))
    if folder.is_dir():
        return folder
    name = place.removesuffix("/adapter")
    near = did_you_mean(name, names())
    if near and os.sep not in name:
        raise CheckpointError(f"{place}: no such folder or bundled model{near}")
    # Formats that are never read here are not worth their download.
    ignored = ["*.bin", "*.pth", "*.gguf", *([] if weights else ["*.safetensors"])]
    try:
        return Path(snapshot_download(place, ignore_patterns=ignored))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{place}: no such folder, bundled model ({', '.join(names())}) or hub name: {error}"
        ) from error


def base_of_adapter(folder: str | Path) -> str | None:
    """Return the base that an adapter names, None for a folder that holds a model.

    Raises CheckpointError for an adapter that names no base, and for a folder with both, where
    transformers would put the adapter onto the model while it loads it.
    """
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        return None
    if (path.parent / "config.json").is_file():
        raise CheckpointError(
            f"{folder} holds a model and an adapter ({ADAPTER_CONFIG}): expected each in a folder "
            "of its own"
        )
    base = read_object(path, CheckpointError).get("base_model_name_or_path")
    if not base or Path(resolve(str(base))) == path.parent:
        raise CheckpointError(f"{path} names no base: give the base as model, and this as adapter")
    return str(base)


def base_name(path: str | None) -> str | None:
    """Return what a model in the folder `path` is called where its place says so for certain:
    owner/name for a snapshot in the hub's cache, a bundled model's name; else None."""
    if path is None:
        return None
    place = Path(path).absolute()
    repository = place.parent.parent.name
    if place.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return place.name if place.parent == HERE else None


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of the model in `folder`: one, or those of its index.

    Raises CheckpointError where there are none; pickles, which can run code, are not read.
    """
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if not (folder / INDEX).is_file():
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        found = f"{', '.join(pickles[:3])}, which is not read" if pickles else "none"
        raise CheckpointError(f"{folder}: expected {WHOLE}, whole or with an index, found {found}")
    where = read_object(folder / INDEX, CheckpointError).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{folder / INDEX}: expected a weight_map of names, got {where!r}")
    return [folder / str(file) for file in sorted(set(where.values()))]


def stored(files: Sequence[Path]) -> dict[str, str]:
    """Read each tensor's dtype from the headers of safetensors files.

    Raises CheckpointError for a missing or damaged file, and for weights that are not floating
    point: transformers would convert a quantised format's integers as if they were weights.
    """
    found: dict[str, str] = {}
    for path in files:
        try:
            with safe_open(path, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    found[name] = str(tensors.get_slice(name).get_dtype())
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path.parent}: the weight file {path.name} is missing"
            ) from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or cut short: {error}") from error
    for name, dtype in found.items():
        if dtype not in _FLOATS:
            raise CheckpointError(
                f"{files[0].parent}: {name}: expected weights in {', '.join(_FLOATS)}, got {dtype};"
                " quantised checkpoints are not read"
            )
    return found


def stored_dtype(folder: Path) -> str:
    """Return the dtype of a model's weights as safetensors calls it, F32 where there are several
    (which loses nothing of them but of F64). Raises CheckpointError."""
    found = set(stored(weight_files(folder)).values())
    return found.pop() if len(found) == 1 else "F32"


def check_fit(
    what: str,
    *,
    missing: Iterable[str],
    unexpected: Iterable[str],
    misshapen: Iterable[tuple[str, Sequence[int], Sequence[int]]] = (),
) -> None:
    """Raise CheckpointError, which begins with `what`, for weights that are missing, unexpected, or
    of another shape (name, shape that came, shape expected)."""
    problems = [
        f"{key}: expected shape {list(expected)}, got {list(came)}"
        for key, came, expected in sorted(misshapen)[:4]
    ]
    for kind, keys in (("missing", sorted(missing)), ("unexpected", sorted(unexpected))):
        if keys:
            problems.append(f"{len(keys)} {kind}: {', '.join(keys[:4])}{', ...' * (len(keys) > 4)}")
    if problems:
        raise CheckpointError(f"{what}: {'; '.join(problems)}")


def fingerprint(place: str) -> str:
    """Hash the identity of a checkpoint's weights, whatever the dtype they are loaded in: name,
    shape and up to three rows (first, middle, last) of every tensor. Raises CheckpointError."""
    entries: dict[str, bytes] = {}
    files = weight_files(folder_of(place))
    stored(files)  # raises for damaged ones
    for path in files:
        # Read, not mapped: a system may map megabytes around each row, which then count as ours.
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                shape, (begin, end) = tensor["shape"], tensor["data_offsets"]
                entries[name] = str(shape).encode()
                # Only these rows: the whole of 8B weights is 16 GB.
                rows = sorted({0, shape[0] // 2, shape[0] - 1}) if shape and shape[0] else []
                for row in rows:
                    size = (end - begin) // shape[0]
                    file.seek(8 + length + begin + row * size)
                    entries[name] += file.read(size)
    digest = hashlib.sha256()
    for name, content in sorted(entries.items()):  # however the tensors are split into files
        digest.update(name.encode() + content)
    return digest.hexdigest()


def read_object(path: str | Path, error: type[InputError] = InputError) -> dict[str, Any]:
    """Read the JSON object in a file. Raises `error`, which names the file, for anything else."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror or cause}") from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"{path} is not JSON: {cause}") from cause
    if not isinstance(values, dict):
        raise error(f"{path} must be a JSON object, got {type(values).__name__}")
    return values
