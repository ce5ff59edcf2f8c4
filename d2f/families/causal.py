"""Plain autoregressive models in transformers' format: baselines, and starts of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaForCausalLM, PretrainedConfig, Qwen2ForCausalLM, Qwen3ForCausalLM

from d2f.errors import CheckpointError
from d2f.families.family import Family, keys_of

_TYPES = ("llama", "qwen2", "qwen3")
_CLASSES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


def _make_config(raw: Mapping[str, Any]) -> PretrainedConfig:
    """Raise CheckpointError: these models have no format of their own, and transformers' is read
    before this is called."""
    raise CheckpointError(
        f"config.json: model_type must be one of {list(_TYPES)}, got {raw.get('model_type')!r}"
    )


FAMILY = Family(
    name="causal",
    model_types=_TYPES,
    architectures=(),
    classes=_CLASSES,
    make_config=_make_config,
    knows=(
        *keys_of(*(kind.config_class for kind in _CLASSES)),
        *("is_llama_config", "transformers.js_config"),  # SmolLM's notes for others
    ),
    logit_shift=1,
    rope_fp32=False,
    prompt_rule="causal",
    needs_mask=False,
    end_tokens=("<|eot_id|>", "<|im_end|>"),
    scratch=LlamaForCausalLM,
)
