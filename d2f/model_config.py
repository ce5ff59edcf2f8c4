"""A checkpoint's config.json as a transformers configuration that can be built, checked before
anything is allocated of what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from d2f import attention
from d2f.errors import CheckpointError
from d2f.families import Family, transformers_config
from d2f.weight_files import Stored

# longrope's frequencies depend on the longest row of the batch, and so would a request's tokens.
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")

# How transformers is to be called, not what the model is: this project says that itself; and the
# classes of a classifier, of which transformers makes a list as long as it is told.
_CALLS = ("output_attentions", "output_hidden_states", "return_dict")
_LABELS = ("num_labels", "id2label", "label2id")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


# What the fields of RoPE must be; transformers warns at most, and computes with whatever is there.
_POSITIVE = ("a number above 0", _is_positive)
_ROPE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("rope_theta", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
         "low_freq_factor", "high_freq_factor"), _POSITIVE,
    ),
    "factor": ("a number of at least 1", lambda value: _is_number(value) and value >= 1),
    "original_max_position_embeddings": (
        "a whole number of at least 1", lambda value: _is_positive(value) and isinstance(value, int)
    ),
    "partial_rotary_factor": ("1", lambda value: _is_number(value) and value == 1),
    "truncate": ("true or false", lambda value: isinstance(value, bool)),
}  # fmt: skip


def model_config(place: str, family: Family, raw: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of the family's model from a config.json. Raises CheckpointError for what
    cannot be built, or would be built and run as something else."""
    try:
        told = {k: v for k, v in raw.items() if k not in (*_CALLS, *_LABELS)}
        config = transformers_config(family, told)
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error
    except Exception as error:  # transformers raises whatever comes of values of the wrong type
        raise CheckpointError(f"{place}: config.json makes no model: {_line(error)}") from error

    def expect(name: str, what: str, came: object, is_right: bool) -> None:
        if not is_right:
            raise CheckpointError(f"{place}: config.json: {name} must be {what}, got {came!r}")

    act, eps = config.hidden_act, config.rms_norm_eps
    expect("hidden_act", f"one of {', '.join(ACT2FN)}", act, isinstance(act, str) and act in ACT2FN)
    expect("rms_norm_eps", "a number from 0 to 1", eps, _is_number(eps) and 0 <= eps <= 1)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    expect("num_key_value_heads", f"a divisor of {heads}", kv_heads, heads % kv_heads == 0)
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type", "default") if isinstance(rope, dict) else rope
    expect("rope_type", f"one of {', '.join(_ROPE_TYPES)}", rope_type, rope_type in _ROPE_TYPES)
    for name, value in rope.items():
        if name in ("rope_type", "type") or value is None:
            continue
        what, fits = _ROPE.get(name, ("absent (it is not supported)", lambda value: False))
        expect(f"RoPE's {name}", what, value, fits(value))
    length, window = config.max_position_embeddings, getattr(config, "sliding_window", None)
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        expect(
            "use_sliding_window",
            f"false, or its window at least the model's {length} positions (no layer sees less)",
            f"{', '.join(sorted(map(str, others)))}, window {window}",
            others == {"sliding_attention"} and _is_number(window) and window >= length,
        )
    return config


def empty_model(
    place: str, kind: Any, config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """The model without weights, on the meta device. Raises CheckpointError."""
    try:
        with torch.device("meta"):
            return kind._from_config(config, attn_implementation=attention.NAME, dtype=dtype)
    except Exception as error:  # of sizes and values that only building tells do not go together
        raise CheckpointError(f"{place}: config.json makes no model: {_line(error)}") from error


def check_fits_files(place: str, config: PretrainedConfig, tensors: Mapping[str, Stored]) -> None:
    """Raise CheckpointError for more layers than the weight files have tensors."""
    if config.num_hidden_layers > len(tensors):
        raise CheckpointError(
            f"{place}: config.json says {config.num_hidden_layers} layers, the weight files hold "
            f"{len(tensors)} tensors in all"
        )


def check_size(place: str, model: PreTrainedModel, tensors: Mapping[str, Stored]) -> None:
    """Raise CheckpointError where the configuration's model is more than twice as large as the
    weight files: what they lack would be allocated before it is found missing."""
    wanted = sum(parameter.numel() for parameter in model.parameters())
    held = sum(math.prod(tensor.shape) for tensor in tensors.values())
    if wanted > 2 * held:
        raise CheckpointError(
            f"{place}: config.json says a model of {wanted:,} parameters, the weight files hold "
            f"{held:,}"
        )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
