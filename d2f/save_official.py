"""Save a model in its family's own format: what the published checkpoints look like, so that the
family's own code, and everything built on it, reads the result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from d2f.errors import CheckpointError
from d2f.families import FAMILIES, transformers_config
from d2f.json_file import read_object
from d2f.model_parts import ModelParts
from d2f.save_tokenizer import save_tokenizer
from d2f.weights import weights_of
from d2f.write_shards import MAX_SHARD_SIZE, write_shards


def save_official(
    model: ModelParts,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write a model to `folder`: config.json and weights in `dtype` as the family publishes them,
    those of an adapter merged into them as by `save_model`, tokenizer, contract. From an official
    base, its own config.json and the code files that it names come along.

    Raises CheckpointError for a family whose format is not known or a model that it cannot say,
    and as `save_model`.
    """
    values = official_config(model)  # raises before the folder is made
    folder.mkdir(parents=True, exist_ok=True)
    official_name = FAMILIES[model.family].official_name
    weights = {official_name(k): value for k, value in weights_of(model.backbone).items()}
    write_shards(weights, folder, dtype, max_shard_size)
    values["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if model.tokenizer is not None:
        save_tokenizer(model.tokenizer, folder)
    for path in _code(model, values):
        shutil.copy(path, folder)
    model.contract.save(folder)


def check_official(model: ModelParts) -> None:
    """Raise CheckpointError unless `save_official` can write the model."""
    official_config(model)
    for name in weights_of(model.backbone):
        FAMILIES[model.family].official_name(name)


def official_config(model: ModelParts) -> dict[str, Any]:
    """The model's config.json in the family's own fields: that of the base where it is an official
    one, else made from transformers' configuration. Raises CheckpointError."""
    family = FAMILIES[model.family]
    if family.official_config is None:
        known = sorted(name for name, other in FAMILIES.items() if other.official_config)
        raise CheckpointError(
            f"the official format is known for {' and '.join(known)}, got the family {model.family}"
        )
    raw = _raw_config(model)
    values = raw if raw is not None else family.official_config(model.backbone.config)
    # The contract is what the model was trained with, whatever its base says.
    values["mask_token_id"] = model.contract.mask_id
    # It would name files of code that are not written beside it.
    if values.get("auto_map") and not _code(model, values):
        del values["auto_map"]
    # Read back as a loader would: the family's fields may have no word for what transformers' have,
    # such as a bias, and the export would be another model.
    # Of a copy, as transformers writes into the dictionaries that it is given.
    made = transformers_config(family, deepcopy(values)).to_dict()
    ours = model.backbone.config.to_dict()
    differ = [k for k in _SHAPE if made.get(k) != ours.get(k)]
    if differ:
        raise CheckpointError(
            f"the family {model.family} cannot say what this model is: "
            + "; ".join(f"{k}: expected {ours.get(k)!r}, got {made.get(k)!r}" for k in differ)
        )
    return values


# What decides a forward; a configuration that is read back must give the same.
_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "max_position_embeddings",
)  # fmt: skip


def _raw_config(model: ModelParts) -> dict[str, Any] | None:
    """The base's config.json where it is an official one of the model's family."""
    path = Path(model.path or "") / "config.json"
    if model.path is None or not path.is_file():
        return None
    raw = read_object(path, CheckpointError)
    return raw if raw.get("model_type") in FAMILIES[model.family].model_types else None


def _code(model: ModelParts, values: Mapping[str, Any]) -> list[Path]:
    """The files of the base's own code, where its config.json names any of them."""
    return sorted(Path(model.path or "").glob("*.py")) if values.get("auto_map") else []
