"""Dream: a Qwen2 that reads both sides and keeps the shift of its start."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from d2f.families.family import Family, keys_of, renamed_config

_KEPT = (
    "attention_dropout", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size",
    "initializer_range", "intermediate_size", "max_position_embeddings", "max_window_layers",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
    "tie_word_embeddings", "vocab_size",
)  # fmt: skip


def _official_config(config: PretrainedConfig) -> dict[str, Any]:
    """Turn a Qwen2Config into the fields of the published config.json."""
    scaling = {k: v for k, v in config.rope_parameters.items() if k != "rope_theta"}
    return {name: getattr(config, name) for name in _KEPT} | {
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "pad_token_id": config.eos_token_id,
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": None,
        "use_cache": False,
        "use_sliding_window": False,
    }


FAMILY = Family(
    name="dream",
    model_types=("Dream", "dream"),
    architectures=("DreamModel",),  # DreamForCausalLM is DreamReasoner, which has Qwen3's norms
    classes=(Qwen2ForCausalLM,),
    make_config=renamed_config(Qwen2Config),
    knows=keys_of(Qwen2Config),
    tokenizer=Qwen2Tokenizer,  # under a class of its own that only remote code provides
    logit_shift=1,
    rope_fp32=False,
    prompt_rule="bidirectional",
    end_tokens=("<|im_end|>",),
    scratch=Qwen2ForCausalLM,
    starts=("qwen2", "llama"),  # Llama's get biases of 0
    official_config=_official_config,
)
