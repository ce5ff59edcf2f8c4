"""Dream: a Qwen2 that reads both sides and keeps the shift of its start."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from d2f.families.family import Family, renamed_config


def _official_config(config: PretrainedConfig) -> dict[str, Any]:
    """Turn a Qwen2Config into the fields of the published config.json."""
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


FAMILY = Family(
    name="dream",
    model_types=("Dream", "dream"),
    classes=(Qwen2ForCausalLM,),
    make_config=renamed_config(Qwen2Config),
    tokenizer=Qwen2Tokenizer,  # under a class of its own that only remote code provides
    logit_shift=1,
    rope_fp32=False,
    prompt_rule="bidirectional",
    end_tokens=("<|im_end|>",),
    scratch=Qwen2ForCausalLM,
    starts=("qwen2", "llama"),  # Llama's get biases of 0
    official_config=_official_config,
)
