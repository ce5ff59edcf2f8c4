"""Save a model in transformers' format, with its contract."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from d2f.model_parts import ModelParts
from d2f.save_tokenizer import save_tokenizer
from d2f.weights import weights_of
from d2f.write_shards import MAX_SHARD_SIZE, write_shards


def save_model(
    model: ModelParts,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    **contract: object,
) -> None:
    """Write a model to `folder`: config, weights in `dtype`, those of an adapter merged into them
    (in fp32; the model stays as it is), tokenizer, and its contract with the given fields changed.
    Raises CheckpointError for weights that are not finite in `dtype`, InputError for a
    max_shard_size that is none."""
    folder.mkdir(parents=True, exist_ok=True)
    # A copy: the model in memory keeps its dtype.
    config = type(model.backbone.config).from_dict(model.backbone.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(model.backbone).__name__]
    config.save_pretrained(folder)
    write_shards(weights_of(model.backbone), folder, dtype, max_shard_size)
    if model.tokenizer is not None:
        save_tokenizer(model.tokenizer, folder)
    dataclasses.replace(model.contract, **contract).save(folder)  # type: ignore[arg-type]
