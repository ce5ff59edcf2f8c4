"""SDAR: a Qwen3 that decodes block after block."""

from __future__ import annotations

from transformers import Qwen3Config, Qwen3ForCausalLM

from d2f.families.family import Family, renamed_config

FAMILY = Family(
    name="sdar",
    model_types=("sdar", "SDAR"),
    classes=(Qwen3ForCausalLM,),
    make_config=renamed_config(Qwen3Config),
    logit_shift=0,
    rope_fp32=False,
    prompt_rule="block_causal",
    end_tokens=("<|im_end|>",),
    starts=("qwen3",),
    keeps_class=True,
)
