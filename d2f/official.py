"""Save a model in its family's own format: what the published checkpoints look like, so that the
family's own code, and everything built on it, reads the result."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from d2f.errors import CheckpointError
from d2f.families import FAMILIES, Family
from d2f.json_file import read_object
from d2f.model import DiffusionModel
from d2f.weights import write_weights


def save_official(model: DiffusionModel, folder: Path, *, dtype: torch.dtype) -> None:
    """Write a model without adapter to `folder`: config.json and weights in `dtype` as the family
    publishes them, tokenizer, contract. From an official base, its own config.json and the code
    files that it names come along.

    Raises CheckpointError for a family whose format is not known or a model that it cannot say,
    ValueError for a model with an adapter.
    """
    if model.adapter is not None:
        raise ValueError("merge the adapter before saving the model")
    family, config = FAMILIES[model.family], model.backbone.config
    values = official_config(model)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        official_name(family, name): value.detach().to("cpu", dtype).contiguous()
        for name, value in model.backbone.state_dict().items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    write_weights(weights, folder / "model.safetensors")
    values["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)
    for path in _code(model, values):
        shutil.copy(path, folder)
    model.contract.save(folder)


def check_official(model: DiffusionModel) -> None:
    """Raise CheckpointError unless `save_official` can write the model."""
    official_config(model)
    for name in model.backbone.state_dict():
        official_name(FAMILIES[model.family], name)


def official_name(family: Family, name: str) -> str:
    """The family's name of a weight, from transformers' name. Raises CheckpointError."""
    if not family.key_mapping:
        return name
    for pattern, replacement in family.key_mapping.items():
        native = re.escape(replacement).replace(re.escape(r"\1"), r"(\d+)")
        official = pattern.removeprefix("^").replace(r"(\d+)", r"\1").replace(r"\.", ".")
        made, hit = re.subn(f"^{native}(?=\\.)", official, name)
        if hit and _native_name(family, made) == name:
            return made
    raise CheckpointError(f"{name}: the family {family.name} has no name for this weight")


def _native_name(family: Family, name: str) -> str:
    for pattern, replacement in family.key_mapping.items():
        made, hit = re.subn(pattern, replacement, name)
        if hit:
            return made
    return name


def official_config(model: DiffusionModel) -> dict[str, Any]:
    """The model's config.json in the family's own fields: that of the base where it is an official
    one, else made from transformers' configuration. Raises CheckpointError."""
    if model.family not in _CONFIGS:
        raise CheckpointError(
            f"the official format is known for {' and '.join(sorted(_CONFIGS))}, "
            f"got the family {model.family}"
        )
    raw = _raw_config(model)
    values = raw if raw is not None else _CONFIGS[model.family](model.backbone.config)
    values["mask_token_id"] = model.contract.mask_id
    if values.get("auto_map") and not _code(model, values):
        del values["auto_map"]
    made = FAMILIES[model.family].make_config(values).to_dict()
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


def _raw_config(model: DiffusionModel) -> dict[str, Any] | None:
    """The base's config.json where it is an official one of the model's family."""
    path = Path(model.path or "") / "config.json"
    if model.path is None or not path.is_file():
        return None
    raw = read_object(path, CheckpointError)
    return raw if raw.get("model_type") in FAMILIES[model.family].model_types else None


def _code(model: DiffusionModel, values: Mapping[str, Any]) -> list[Path]:
    """The files of the base's own code, where its config.json names any of them."""
    return sorted(Path(model.path or "").glob("*.py")) if values.get("auto_map") else []


def _llada(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "alibi": False,
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": config.hidden_size,
        "embedding_dropout": 0.0,
        "embedding_size": config.vocab_size,
        "eos_token_id": config.eos_token_id,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_device": "cpu",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "max_sequence_length": config.max_position_embeddings,
        "mlp_hidden_size": config.intermediate_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "n_layers": config.num_hidden_layers,
        "pad_token_id": config.eos_token_id,
        "residual_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": config.rope_parameters["rope_theta"],
        "scale_logits": False,
        "use_cache": False,
        "vocab_size": config.vocab_size,
        "weight_tying": config.tie_word_embeddings,
    }


def _dream(config: PretrainedConfig) -> dict[str, Any]:
    scaling = {k: v for k, v in config.rope_parameters.items() if k != "rope_theta"}
    return {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "attention_dropout": config.attention_dropout,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.max_window_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": config.eos_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


_CONFIGS: dict[str, Callable[[PretrainedConfig], dict[str, Any]]] = {
    "llada": _llada,
    "dream": _dream,
}
