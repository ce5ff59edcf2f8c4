"""Plain autoregressive models in transformers' format: baselines, and starts of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaForCausalLM, PretrainedConfig, Qwen2ForCausalLM, Qwen3ForCausalLM

from d2f.errors import CheckpointError
from d2f.families.family import Family, check_complete

_TYPES = ("llama", "qwen2", "qwen3")


def _make_config(raw: Mapping[str, Any]) -> PretrainedConfig:
    """Raise CheckpointError: these models have no format of their own, and transformers' is read
    before this is called."""
    check_complete(raw)
    raise CheckpointError(
        f"config.json: model_type must be one of {list(_TYPES)}, got {raw.get('model_type')!r}"
    )


FAMILY = Family(
    name="causal",
    model_types=_TYPES,
    classes=(LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM),
    make_config=_make_config,
    logit_shift=1,
    rope_fp32=False,
    prompt_rule="causal",
    needs_mask=False,
    end_tokens=("<|eot_id|>", "<|im_end|>"),
    scratch=LlamaForCausalLM,
)
