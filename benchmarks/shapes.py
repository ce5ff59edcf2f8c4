"""Shapes of models with random weights for the benchmarks, and whether one fits into the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from d2f.contract import Contract
from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.quantize import quantize_layers
from decode.engine.engine import free_bytes

MASK_ID = 3
SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "LLaDA-8B": lambda: LlamaConfig(
        vocab_size=126464, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "Dream-7B": lambda: Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    # LLaDA's architecture with about 1.5 and 3 B weights, its vocabulary included. These numbers
    # are this project's choice: no configuration of such a LLaDA was at hand to hold them against.
    "llada-1b": lambda: LlamaConfig(
        vocab_size=126464, hidden_size=2048, intermediate_size=5634, num_hidden_layers=22,
        num_attention_heads=32, num_key_value_heads=4, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "llada-3b": lambda: LlamaConfig(
        vocab_size=126464, hidden_size=3072, intermediate_size=8192, num_hidden_layers=24,
        num_attention_heads=24, num_key_value_heads=8, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    # LLaDA-8B with every width, the vocabulary too, divided by eight, and four layers: for a CPU.
    "LLaDA-8B/8": lambda: LlamaConfig(
        vocab_size=15808, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    # A small model with a vocabulary of the usual size, which is then most of it.
    "small": lambda: LlamaConfig(
        vocab_size=32000, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=8192,
    ),
    "tiny": lambda: LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
    ),
}  # fmt: skip
LARGE, SMALL = (
    ("LLaDA-8B", "Dream-7B"),
    ("tiny", "small"),
)  # what a GPU and a CPU measure by default


def build(shape: str, dtype: torch.dtype, device: str) -> DiffusionModel:
    """A model of that shape with random weights."""
    config = SHAPES[shape]()
    config._attn_implementation = "span"
    with torch.device(device):
        backbone = AutoModelForCausalLM.from_config(config, dtype=dtype)
    llada = isinstance(config, LlamaConfig)
    contract = Contract(
        family="llada" if llada else "dream", mask_id=MASK_ID, end_ids=(2,),
        logit_shift=0 if llada else 1, rope_fp32=llada, prompt_rule="bidirectional",
    )  # fmt: skip
    return DiffusionModel(backbone.eval(), contract)


def build_by_layers(shape: str, dtype: torch.dtype, quantize: str | None = None) -> DiffusionModel:
    """The same on the CPU, made and quantised layer after layer: never more of it is in memory than
    what stays there and one layer in `dtype`."""
    model = build(shape, dtype, "meta")
    decoder = model.backbone.model
    for part in (decoder.embed_tokens, *decoder.layers, decoder.norm, model.backbone.lm_head):
        part.to_empty(device="cpu")
        for weight in part.parameters():
            weight.detach().normal_(std=0.02).add_(weight.dim() == 1)  # norms about 1
        if quantize is not None and part in list(decoder.layers):
            quantize_layers(part, quantize)
    # Its frequencies are no weights: they are computed when it is made.
    decoder.rotary_emb.rotary = type(decoder.rotary_emb.rotary)(model.backbone.config)
    model.backbone.quantized = quantize
    return model


def check_fits(needed: dict[str, int], device: str) -> None:
    """Raise InputError where a shape needs more bytes than are free, before any is built. needed:
    an estimate of each shape, by name."""
    free = free_bytes(device)
    for shape, size in needed.items():
        if size > free:
            raise InputError(
                f"{shape} needs about {size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on "
                f"the {device}: expected a smaller shape of {', '.join(SHAPES)}"
            )


def default_shapes(needed: dict[str, int], device: str) -> Sequence[str]:
    """The large shapes that fit on a GPU, else small ones. needed: as `check_fits` takes it."""
    fit = [shape for shape in LARGE if needed[shape] <= free_bytes(device)]
    return fit if device == "cuda" and fit else SMALL
