"""The weight files of a checkpoint: safetensors, inside its folder, floating point."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub import snapshot_download, split_state_dict_into_shards_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from d2f.config import FILE_SIZE
from d2f.errors import CheckpointError, InputError
from d2f.models import resolve

# JSON files of others: read in one place, so that whatever is wrong with one is the same error.


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


# Files that a clone without Git LFS has pointers in place of: the commonest of damaged ones.

_BEGINS = b"version https://git-lfs."


def refuse_pointer(path: Path, error: type[InputError] = InputError) -> None:
    """Raise `error` where the file is a pointer. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        if file.read(len(_BEGINS)) == _BEGINS:
            raise error(f"{path}: is a pointer of Git LFS: `git lfs pull` gets the file")


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


# Writing a model's weights as safetensors one tensor at a time, so that no second copy of them is
# ever in memory. safetensors itself writes a file from tensors that are all there at once.
#
# A file is the length of its header, the header, and the data, tensor after tensor by name::
#
#     8 bytes    96
#     96 bytes   {"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":...
#     8 bytes    a
#     ...

MAX_SHARD_SIZE = "50GB"  # transformers' default
_PIECE = 1 << 20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


@dataclass(frozen=True)
class Weight:
    """A tensor that is about to be written. read: computes it, or gives what is there."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def write_shards(
    weights: Mapping[str, Weight],
    folder: Path,
    dtype: torch.dtype,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write weights by name in `dtype` to `folder`: ``model.safetensors``, or files of at most
    `max_shard_size` (bytes, or as ``5GB``; a larger tensor has a file of its own) with their index.

    Raises CheckpointError for values that are not finite in `dtype`, as training gone wrong leaves
    them or a dtype without room, and InputError for a size that is none; neither leaves a file.
    """
    pattern = FILE_SIZE if isinstance(max_shard_size, str) else "[1-9][0-9]*"
    if not re.fullmatch(pattern, str(max_shard_size)):
        raise InputError(
            f"max_shard_size must be a number of bytes, or as 5GB, got {max_shard_size!r}"
        )
    plan = split_state_dict_into_shards_factory(
        dict(weights),
        get_storage_size=lambda weight: prod(weight.shape) * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    broken: list[str] = []
    files = plan.filename_to_tensors
    try:
        for name, members in files.items():
            broken += _write(folder / name, {one: weights[one] for one in members}, dtype)
        if broken:
            raise CheckpointError(
                f"{folder}: expected finite weights, got NaN or infinity in {len(broken)} of "
                f"{len(weights)} tensors in {str(dtype).removeprefix('torch.')}, first "
                f"{broken[0]}; nothing was written"
            )
    except BaseException:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")


def _write(path: Path, weights: Mapping[str, Weight], dtype: torch.dtype) -> list[str]:
    """Write one file; the names of what is not finite."""
    names, broken = sorted(weights), []
    with path.open("wb") as file:
        file.write(_header({name: weights[name].shape for name in names}, names, dtype))
        for name in names:
            value = weights[name].read().detach().to("cpu", dtype).contiguous()
            flat = value.reshape(-1)
            # In the dtype that is written: what fp32 holds may be infinity in fp16. A piece at a
            # time: looking takes as much memory again.
            if not all(piece.isfinite().all() for piece in flat.split(_PIECE)):
                broken.append(name)
            file.write(flat.view(torch.uint8).numpy().data)
    return broken


def _header(
    shapes: Mapping[str, tuple[int, ...]], names: Sequence[str], dtype: torch.dtype
) -> bytes:
    """The length of the header and the header, as safetensors writes them."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        first, end = end, end + prod(shapes[name]) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype], "shape": shapes[name], "data_offsets": [first, end],
        }  # fmt: skip
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text


# A model's weights from files and on their way to them, never twice in memory.

_BASE = ".base_layer.weight"  # of a layer that PEFT has put a LoRA on


def weights_of(backbone: Any) -> dict[str, Weight]:
    """A model's weights by transformers' names; output weights that are the embeddings are left
    out. With an adapter they are what merging gives, computed in fp32 as they are read: the model
    stays as it is."""
    tied = backbone.config.tie_word_embeddings
    found = {}
    for name, value in backbone.state_dict().items():
        # One tensor under two names, which safetensors does not write; loading ties them again.
        if ".lora_" in name or (tied and name == "lm_head.weight"):
            continue
        read = partial(Tensor.detach, value)
        if name.endswith(_BASE):
            layer = backbone.get_submodule(name.removesuffix(_BASE))
            read = partial(_merged, layer, layer.base_layer.weight)
        found[name.replace(".base_layer.", ".")] = Weight(tuple(value.shape), read)
    return found


def read_weights(files: Sequence[Path], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in safetensors files by name, in `dtype`. What is stored in it is a view of its
    file, of which nothing is read yet."""
    found = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in logging.tqdm(file.keys(), desc="Reading weights"):
                value = file.get_tensor(name)
                if value.dtype != dtype:
                    # By a view of its own, that goes when it is converted. What was read by that
                    # of the others would stay in memory until all are.
                    with safe_open(path, framework="pt") as once:
                        value = once.get_tensor(name).to(dtype)
                found[name] = value
    return found


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors by name as safetensors. Raises CheckpointError, before anything is written, for
    values that are not finite, as training gone wrong leaves them."""
    broken = [name for name, value in weights.items() if not value.isfinite().all()]
    if broken:
        dtype = str(weights[broken[0]].dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{path}: expected finite weights, got NaN or infinity in {len(broken)} of "
            f"{len(weights)} tensors in {dtype}, first {broken[0]}; nothing was written"
        )
    save_file(dict(weights), path, metadata={"format": "pt"})


def _merged(layer: Any, base: Tensor) -> Tensor:
    """W + scale * B A of a layer as PEFT merges it, on the CPU whatever it was trained on."""
    a, b = (part["default"].weight.detach() for part in (layer.lora_A, layer.lora_B))
    delta = (b.cpu().float() @ a.cpu().float()) * layer.scaling["default"]
    return base.detach().cpu().float() + delta


# Where a checkpoint is: a folder here, or one that the hub has.


def folder_of(place: str, *, weights: bool = True) -> Path:
    """The folder that `place` names, fetched from the hub where it is not one here; without
    `weights` all but the weight files.

    Raises CheckpointError where there is neither.
    """
    try:
        if Path(place).is_dir():
            return Path(place)
        # Formats that are never read here (`d2f.checkpoint`) are not worth their download.
        ignored = ["*.bin", "*.pth", "*.gguf", *([] if weights else ["*.safetensors"])]
        return Path(snapshot_download(place, ignore_patterns=ignored))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{place}: no such folder or hub name: {error}") from error


def base_of_adapter(place: str) -> str | None:
    """The base that the adapter in a folder names, None where the folder holds no adapter alone.
    Raises CheckpointError where it names none."""
    path = Path(place) / "adapter_config.json"
    # Beside a model it is no adapter alone: `weight_files` refuses the pair by name.
    if path.with_name("config.json").is_file() or not path.is_file():
        return None
    base = read_object(path, CheckpointError).get("base_model_name_or_path")
    if not isinstance(base, str) or not base or resolve(base) == place:
        raise CheckpointError(f"{path} names no base: give the base as model, and this as adapter")
    return base
