"""Writing a model's weights as safetensors one tensor at a time, so that no second copy of them is
ever in memory. safetensors itself writes a file from tensors that are all there at once.

A file is the length of its header, the header, and the data, tensor after tensor by name::

    8 bytes    96
    96 bytes   {"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":...
    8 bytes    a
    ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from d2f.errors import CheckpointError, InputError
from d2f.quantities import FILE_SIZE
from d2f.weight_files import INDEX

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
