"""Save a model in transformers' format, with its contract."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from d2f.model_parts import ModelParts
from d2f.save_tokenizer import save_tokenizer
from d2f.weights import weights_of, write_weights


def save_model(model: ModelParts, folder: Path, *, dtype: torch.dtype, **contract: object) -> None:
    """Write a model without adapter to `folder`: config, weights in `dtype`, tokenizer, and its
    contract with the given fields changed. Raises ValueError for a model with an adapter,
    CheckpointError for weights that are not finite in `dtype`."""
    if model.adapter is not None:
        raise ValueError("merge the adapter before saving the model, or save the adapter alone")
    folder.mkdir(parents=True, exist_ok=True)
    # A copy: the model in memory keeps its dtype.
    config = type(model.backbone.config).from_dict(model.backbone.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(model.backbone).__name__]
    config.save_pretrained(folder)
    write_weights(weights_of(model.backbone, dtype), folder / "model.safetensors")
    if model.tokenizer is not None:
        save_tokenizer(model.tokenizer, folder)
    dataclasses.replace(model.contract, **contract).save(folder)  # type: ignore[arg-type]
