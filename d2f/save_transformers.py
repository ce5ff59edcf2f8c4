"""Save a model in transformers' format, with its contract."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from d2f.model_parts import ModelParts
from d2f.weights import write_weights


def save_model(model: ModelParts, folder: Path, *, dtype: torch.dtype, **contract: object) -> None:
    """Write a model without adapter to `folder`: config, weights in `dtype`, tokenizer, and its
    contract with the given fields changed. Raises ValueError for a model with an adapter,
    CheckpointError for weights that are not finite in `dtype`."""
    if model.adapter is not None:
        raise ValueError("merge the adapter before saving the model, or save the adapter alone")
    folder.mkdir(parents=True, exist_ok=True)
    config = type(model.backbone.config).from_dict(model.backbone.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(model.backbone).__name__]
    config.save_pretrained(folder)
    weights = {
        name: value.detach().to("cpu", dtype).contiguous()
        for name, value in model.backbone.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    write_weights(weights, folder / "model.safetensors")
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)
    dataclasses.replace(model.contract, **contract).save(folder)  # type: ignore[arg-type]
