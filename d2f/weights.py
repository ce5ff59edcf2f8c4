"""A model's weights from files and on their way to them, never twice in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import logging

from d2f.errors import CheckpointError
from d2f.write_shards import Weight

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
