"""LLaDA (arXiv 2502.09992): a Llama that reads both sides, under names of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig

from d2f.errors import CheckpointError
from d2f.families.family import Family, check_sizes

# LLaDA's field: LlamaConfig's.
_SAME = {
    "d_model": "hidden_size",
    "mlp_hidden_size": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_sequence_length": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}
# LLaDA's configuration can describe models that are no Llama. One with ALiBi, say, would load into
# a Llama without an error and compute something else.
_MUST_BE = {
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
_TRAINING = {  # or how it is computed
    "attention_dropout": 0.0,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "embedding_dropout": 0.0,
    "flash_attention": False,
    "init_device": "cpu",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "layer_norm_with_affine": True,
    "residual_dropout": 0.0,
    "use_cache": False,
}
_SIZES = (*_SAME, "embedding_size", "n_kv_heads", "vocab_size")


def _make_config(raw: Mapping[str, Any]) -> PretrainedConfig:
    """Turn LLaDA's config.json into a LlamaConfig. Raises CheckpointError for other variants."""
    for name, expected in _MUST_BE.items():
        if raw.get(name, expected) != expected:
            raise CheckpointError(
                f"config.json: {name} must be {expected!r} for the family llada, got {raw[name]!r}"
            )
    check_sizes(raw, tuple(name for name in _SIZES if name != "rms_norm_eps"))
    try:
        return LlamaConfig(
            # The table's rows, which may be padded beyond the vocabulary.
            vocab_size=raw.get("embedding_size") or raw["vocab_size"],
            num_key_value_heads=raw.get("n_kv_heads") or raw["n_heads"],
            rope_parameters={"rope_type": "default", "rope_theta": raw["rope_theta"]},
            tie_word_embeddings=raw.get("weight_tying", False),
            attention_bias=False,
            mlp_bias=False,
            **{name: raw.get(name) for name in ("bos_token_id", "eos_token_id", "mask_token_id")},
            **{ours: raw[theirs] for theirs, ours in _SAME.items()},
        )
    except KeyError as error:
        raise CheckpointError(f"config.json of the family llada lacks {error}") from error


def _official_config(config: PretrainedConfig) -> dict[str, Any]:
    """Turn a LlamaConfig into the fields of the published config.json."""
    return {
        **_MUST_BE,
        **_TRAINING,
        **{theirs: getattr(config, ours) for theirs, ours in _SAME.items()},
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "embedding_size": config.vocab_size,
        "eos_token_id": config.eos_token_id,
        "n_kv_heads": config.num_key_value_heads,
        "pad_token_id": config.eos_token_id,
        "rope_theta": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
        "weight_tying": config.tie_word_embeddings,
    }


# ff_proj is the gate: the MLP is ff_out(silu(ff_proj h) * up_proj h). The output head is called
# ff_out as well, so a name is told apart by its whole path.
_BLOCK = r"^model\.transformer\.blocks\.(\d+)\."
_KEYS = {
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

FAMILY = Family(
    name="llada",
    model_types=("llada",),
    architectures=("LLaDAModelLM", "LLaDAModel"),
    classes=(LlamaForCausalLM,),
    make_config=_make_config,
    knows=(
        *(*_SIZES, *_MUST_BE, *_TRAINING, "weight_tying"),
        *("alibi_bias_max", "attention_layer_norm_with_affine"),  # of what must be off
        "mlp_ratio",  # mlp_hidden_size says it
    ),
    key_mapping=_KEYS,
    logit_shift=0,
    rope_fp32=True,  # config.json: rope_full_precision
    prompt_rule="bidirectional",
    end_tokens=("<|eot_id|>",),
    scratch=LlamaForCausalLM,
    starts=("llama",),
    official_config=_official_config,
)
