"""WeDLM (arXiv 2512.22737): a Qwen2 or Qwen3 that predicts masks under causal attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from d2f.families.family import Family, keys_of, renamed_config


def _make_config(raw: Mapping[str, Any]) -> PretrainedConfig:
    """Qwen2 (biases) or Qwen3 (QK norm), told apart by ``qk_norm``."""
    return renamed_config(Qwen3Config if raw.get("qk_norm") else Qwen2Config)(raw)


FAMILY = Family(
    name="wedlm",
    model_types=("wedlm",),
    architectures=("WeDLMForCausalLM",),
    classes=(Qwen2ForCausalLM, Qwen3ForCausalLM),
    make_config=_make_config,
    mask_id=151665,
    knows=(*keys_of(Qwen2Config, Qwen3Config), "qk_norm"),
    logit_shift=0,
    rope_fp32=False,
    prompt_rule="causal",
    end_tokens=("<|im_end|>",),
    scratch=Qwen2ForCausalLM,
    starts=("llama", "qwen2", "qwen3"),
    keeps_class=True,
)
