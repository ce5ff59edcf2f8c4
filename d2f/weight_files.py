"""The weight files of a checkpoint: safetensors, inside its folder, floating point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from d2f.errors import CheckpointError
from d2f.json_file import read_object
from d2f.lfs_pointer import refuse_pointer

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")


def is_weight_file(name: str) -> bool:
    """Whether a model's weights, whole or in parts, are written under that name."""
    return name == INDEX or fnmatch(name, "model*.safetensors")


@dataclass(frozen=True)
class Stored:
    """What a safetensors header says of a tensor; its data is not read."""

    shape: tuple[int, ...]
    dtype: str


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of the model in `folder`: one, or those of its index.

    Raises CheckpointError where there are none, for an index that is not one, and for a file that
    is not inside of the folder (`inside`).
    """
    # transformers would put the adapter onto the model while it loads it.
    if (folder / "config.json").is_file() and (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: holds a model and an adapter ({ADAPTER_CONFIG}): expected each in a folder "
            "of its own"
        )
    if (folder / WHOLE).exists():
        return [inside(folder, WHOLE)]
    if not (folder / INDEX).exists():
        # Pickles can run code when they are read; they are named so that the error says enough.
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.pt*")
        )
        found = f"{', '.join(others[:3])}, which is not read" if others else "none"
        raise CheckpointError(f"{folder}: expected {WHOLE}, whole or with an index, found {found}")
    where = read_object(inside(folder, INDEX), CheckpointError).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{folder / INDEX}: expected a weight_map of names, got {where!r}")
    for name, file in where.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / INDEX}: {name}: expected a safetensors file of this folder, "
                f"got {file!r}"
            )
    # The index maps each tensor to its file; a file holds many.
    return [inside(folder, file) for file in sorted(set(where.values()))]


def inside(folder: Path, name: str) -> Path:
    """The file of that name in `folder`. Raises CheckpointError, with the name, where it is
    missing or elsewhere: an absolute path, one through ``..``, or a link that leads outside. (A
    snapshot in the hub's cache is links to its repository's blobs; those are inside.)"""
    path = folder / name
    pure = PurePosixPath(name.replace("\\", "/"))  # as either system would read it
    real = folder.resolve()
    try:
        target, is_file = path.resolve(), path.is_file()
    except (OSError, ValueError) as error:  # too long, a null byte, a surrogate
        raise CheckpointError(
            f"{folder}: expected the name of a weight file, got {name[:60]!r}"
        ) from error
    # The hub's cache: models--OWNER--NAME/snapshots/COMMIT/FILE is a link to ../../blobs/HASH.
    roots = [real]
    if real.parent.name == "snapshots" and real.parents[1].name.startswith("models--"):
        roots.append((real.parents[1] / "blobs").resolve())
    outside = pure.is_absolute() or ".." in pure.parts
    if outside or not any(target.is_relative_to(root) for root in roots):
        raise CheckpointError(
            f"{folder}: the weight file {name!r} lies outside of the folder: {target}"
        )
    if not is_file:
        raise CheckpointError(f"{folder}: the weight file {name} is missing")
    return path


def stored_dtype(folder: Path) -> str:
    """The dtype of all weights of the model in `folder`, as safetensors calls it; of several F32,
    which loses nothing of them but of F64. Raises CheckpointError."""
    found = {tensor.dtype for tensor in stored(weight_files(folder)).values()}
    return found.pop() if len(found) == 1 else "F32"


def stored(files: Sequence[Path]) -> dict[str, Stored]:
    """Shape and dtype of each tensor in safetensors files, from their headers.

    Raises CheckpointError for a damaged file, a tensor that is in two of them, and one that is not
    floating point: a quantised format, or no weights at all.
    """
    found: dict[str, Stored] = {}
    for path in files:
        try:
            with safe_open(path, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    part = tensors.get_slice(name)  # of the header: no data is read
                    if name in found:
                        raise CheckpointError(f"{path}: {name} is in another weight file as well")
                    found[name] = Stored(tuple(part.get_shape()), str(part.get_dtype()))
        except SafetensorError as error:
            refuse_pointer(path, CheckpointError)
            raise CheckpointError(f"{path} is damaged or cut short: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
    for name, tensor in found.items():
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{files[0].parent}: {name}: expected weights in {', '.join(_FLOATS)}, "
                f"got {tensor.dtype}; quantised checkpoints are not read"
            )
    return found
