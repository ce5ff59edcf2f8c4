"""SDAR and TraDo: a Qwen3 that decodes block after block."""

from __future__ import annotations

from transformers import Qwen3Config, Qwen3ForCausalLM

from d2f.families.family import Family, keys_of, renamed_config

_TRAINING = (
    "debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep",
)  # fmt: skip

FAMILY = Family(
    name="sdar",
    model_types=("sdar", "SDAR"),
    architectures=("SDARForCausalLM",),
    classes=(Qwen3ForCausalLM,),
    make_config=renamed_config(Qwen3Config),
    mask_id=151669,
    knows=(*keys_of(Qwen3Config), "block_size", *_TRAINING),
    logit_shift=0,
    rope_fp32=False,
    prompt_rule="block_causal",
    end_tokens=("<|im_end|>",),
    starts=("qwen3",),
    keeps_class=True,
)
