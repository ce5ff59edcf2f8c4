"""Small random models of the families that block and streaming decoders serve."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from tiny import fresh_model, random_model, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from d2f import attention
from d2f.adapters import new_lora
from d2f.families import get_family
from d2f.model import DiffusionModel
from distill.objectives.self_draft import make_self_drafting


@cache
def sdar(block_size: int, seed: int) -> DiffusionModel:
    """Block-causal on absolute blocks."""
    return _with_qk_norm("sdar", seed, block_size=block_size)


@cache
def student(family: str, block_size: int, seed: int) -> DiffusionModel:
    """As D2F leaves a model of the family: block-causal from the prompt's end."""
    model = random_model(family, seed)
    contract = replace(model.contract, objective="d2f", block_size=block_size)
    return DiffusionModel(model.backbone, contract, tokenizer=model.tokenizer)


@cache
def wedlm(qk_norm: bool, seed: int) -> DiffusionModel:
    """Causal with a mask id and no shift, on Qwen3 or on Qwen2."""
    if qk_norm:
        return _with_qk_norm("wedlm", seed)
    return _of_family("wedlm", fresh_model("dream", seed).backbone)


def _with_qk_norm(family: str, seed: int, **contract: object) -> DiffusionModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
    )
    backbone = Qwen3ForCausalLM._from_config(
        config, attn_implementation=attention.NAME, dtype=torch.float32
    )
    for parameter in backbone.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return _of_family(family, backbone.eval(), **contract)


def _of_family(name: str, backbone: torch.nn.Module, **contract: object) -> DiffusionModel:
    family = get_family(name)
    made = replace(
        random_model("llada").contract,
        family=name,
        logit_shift=family.logit_shift,
        rope_fp32=family.rope_fp32,
        prompt_rule=family.prompt_rule,
        **contract,
    )
    return DiffusionModel(backbone, made, tokenizer=tokenizer())


LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def drafting(drafts: int = 3, dtype: torch.dtype = torch.float32, targets=LAYERS) -> DiffusionModel:
    """The random causal model with an adapter that is not 0."""
    model = fresh_model("causal")
    new_lora(model, r=3, alpha=6, dropout=0.0, targets=targets)
    torch.manual_seed(1)
    for name, parameter in model.backbone.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    make_self_drafting(model)
    model.contract = replace(model.contract, objective="self_draft", block_size=drafts)
    model.backbone.to(dtype).eval()
    return model
