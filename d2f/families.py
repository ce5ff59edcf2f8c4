"""The model families as data: weight names, configuration, ids, logit shift, RoPE precision.

A family says which of transformers' own classes runs its weights unchanged. The facts are read
from the published checkpoints' configurations and weight indexes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from d2f.errors import CheckpointError

_NATIVE_CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    model_types: values of ``model_type`` in an official config.json. logit_shift: 1 where row p-1
    predicts position p. prompt_rule: what a prompt attends before D2F training
    (``bidirectional``, ``block_causal``, ``causal``). key_mapping: official weight name (regex
    with one group) to transformers' name. adapter_modules: official LoRA module name to
    transformers'. end_tokens: tokens that end a response besides the configured eos.
    make_config: official config.json to a transformers configuration. starts: transformers' model
    types of autoregressive models whose weights a model of the family can begin with.
    """

    name: str
    model_types: tuple[str, ...]
    logit_shift: int
    rope_fp32: bool
    prompt_rule: str
    needs_mask: bool
    make_config: Callable[[Mapping[str, Any]], PretrainedConfig]
    key_mapping: Mapping[str, str] = field(default_factory=dict)
    adapter_modules: Mapping[str, str] = field(default_factory=dict)
    end_tokens: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()


_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
_SIZES = (*_NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")
_LLADA_SIZES = (
    "d_model", "embedding_size", "max_sequence_length", "mlp_hidden_size", "n_heads",
    "n_kv_heads", "n_layers", "vocab_size",
)  # fmt: skip
_MOST = {"num_hidden_layers": 10_000, "n_layers": 10_000}


def _check_sizes(raw: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise CheckpointError for a size that none can be, before anything is made of it."""
    for name in names:
        size, most = raw.get(name), _MOST.get(name, 2**31 - 1)
        if size is not None and (
            isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most
        ):
            raise CheckpointError(
                f"config.json: {name} must be a whole number from 1 to {most}, got {size!r}"
            )


def _complete(raw: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a size that transformers would fill with a default of its own."""
    lacking = [name for name in _NEEDED if name not in raw]
    if lacking:
        raise CheckpointError(f"config.json lacks {', '.join(lacking)}")
    _check_sizes(raw, _SIZES)


def _native_config(raw: Mapping[str, Any]) -> PretrainedConfig:
    """The transformers configuration of a folder that is already in transformers' format."""
    _complete(raw)
    kind = _NATIVE_CONFIGS.get(raw.get("model_type", ""))
    if kind is None:
        raise CheckpointError(
            f"config.json: model_type must be one of {sorted(_NATIVE_CONFIGS)}, "
            f"got {raw.get('model_type')!r}"
        )
    return kind.from_dict(dict(raw))


_LLADA_MUST_BE = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "rope_full_precision": True,
    "alibi": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
}


def _llada_config(raw: Mapping[str, Any]) -> PretrainedConfig:
    """LLaDA's config.json as a LlamaConfig; a variant that Llama cannot express is an error."""
    if raw.get("model_type") in _NATIVE_CONFIGS:
        return _native_config(raw)
    for name, expected in _LLADA_MUST_BE.items():
        if name in raw and raw[name] != expected:
            raise CheckpointError(
                f"config.json: {name} must be {expected!r} for the family llada, got {raw[name]!r}"
            )
    _check_sizes(raw, _LLADA_SIZES)
    try:
        return LlamaConfig(
            vocab_size=raw.get("embedding_size") or raw["vocab_size"],
            hidden_size=raw["d_model"],
            intermediate_size=raw["mlp_hidden_size"],
            num_hidden_layers=raw["n_layers"],
            num_attention_heads=raw["n_heads"],
            num_key_value_heads=raw.get("n_kv_heads") or raw["n_heads"],
            max_position_embeddings=raw["max_sequence_length"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": raw["rope_theta"]},
            tie_word_embeddings=raw.get("weight_tying", False),
            attention_bias=False,
            mlp_bias=False,
            bos_token_id=raw.get("bos_token_id"),
            eos_token_id=raw.get("eos_token_id"),
            mask_token_id=raw.get("mask_token_id"),
        )
    except KeyError as error:
        raise CheckpointError(f"config.json of the family llada lacks {error}") from error


def _renamed_config(kind: type[PretrainedConfig]) -> Callable[[Mapping[str, Any]], Any]:
    """For families whose config.json has the fields of `kind` under another model_type."""

    def make(raw: Mapping[str, Any]) -> PretrainedConfig:
        if raw.get("model_type") in _NATIVE_CONFIGS:
            return _native_config(raw)
        _complete(raw)
        drop = ("model_type", "architectures", "auto_map", "pad_token_id", "transformers_version")
        return kind.from_dict({k: v for k, v in raw.items() if k not in drop})

    return make


def _wedlm_config(raw: Mapping[str, Any]) -> PretrainedConfig:
    """WeDLM runs on Qwen2 (biases) or Qwen3 (QK norm), told apart by ``qk_norm``."""
    return _renamed_config(Qwen3Config if raw.get("qk_norm") else Qwen2Config)(raw)


_BLOCK = r"^model\.transformer\.blocks\.(\d+)\."
_LLADA_KEYS = {
    _BLOCK + r"attn_norm": r"model.layers.\1.input_layernorm",
    _BLOCK + r"ff_norm": r"model.layers.\1.post_attention_layernorm",
    _BLOCK + r"q_proj": r"model.layers.\1.self_attn.q_proj",
    _BLOCK + r"k_proj": r"model.layers.\1.self_attn.k_proj",
    _BLOCK + r"v_proj": r"model.layers.\1.self_attn.v_proj",
    _BLOCK + r"attn_out": r"model.layers.\1.self_attn.o_proj",
    _BLOCK + r"ff_proj": r"model.layers.\1.mlp.gate_proj",
    _BLOCK + r"up_proj": r"model.layers.\1.mlp.up_proj",
    _BLOCK + r"ff_out": r"model.layers.\1.mlp.down_proj",
    r"^model\.transformer\.wte": "model.embed_tokens",
    r"^model\.transformer\.ln_f": "model.norm",
    r"^model\.transformer\.ff_out": "lm_head",
}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "llada",
            ("llada",),
            logit_shift=0,
            rope_fp32=True,
            prompt_rule="bidirectional",
            needs_mask=True,
            make_config=_llada_config,
            key_mapping=_LLADA_KEYS,
            adapter_modules={"attn_out": "o_proj"},
            end_tokens=("<|eot_id|>",),
            starts=("llama",),
        ),
        Family(
            "dream",
            ("Dream", "dream"),
            logit_shift=1,
            rope_fp32=False,
            prompt_rule="bidirectional",
            needs_mask=True,
            make_config=_renamed_config(Qwen2Config),
            end_tokens=("<|im_end|>",),
            starts=("qwen2", "llama"),  # Llama's with biases of 0
        ),
        Family(
            "sdar",
            ("sdar", "SDAR"),
            logit_shift=0,
            rope_fp32=False,
            prompt_rule="block_causal",
            needs_mask=True,
            make_config=_renamed_config(Qwen3Config),
            end_tokens=("<|im_end|>",),
            starts=("qwen3",),
        ),
        Family(
            "wedlm",
            ("wedlm",),
            logit_shift=0,
            rope_fp32=False,
            prompt_rule="causal",
            needs_mask=True,
            make_config=_wedlm_config,
            end_tokens=("<|im_end|>",),
            starts=("llama", "qwen2", "qwen3"),
        ),
        Family(
            "causal",
            ("llama", "qwen2", "qwen3"),
            logit_shift=1,
            rope_fp32=False,
            prompt_rule="causal",
            needs_mask=False,
            make_config=_native_config,
            end_tokens=("<|eot_id|>", "<|im_end|>"),
        ),
    )
}


def family_of(model_type: str | None) -> Family:
    """The family whose official checkpoints have this ``model_type``. Raises CheckpointError."""
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    known = sorted(kind for family in FAMILIES.values() for kind in family.model_types)
    raise CheckpointError(
        f"config.json: model_type must be one of {known}, got {model_type!r}; "
        "or name the family yourself"
    )


def get_family(name: str) -> Family:
    """A family by name. Raises CheckpointError that lists the known ones."""
    if name not in FAMILIES:
        raise CheckpointError(f"family must be one of {sorted(FAMILIES)}, got {name!r}")
    return FAMILIES[name]
