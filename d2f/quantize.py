"""4-bit base weights through bitsandbytes (QLoRA, arXiv 2305.14314): the frozen linear layers in
NF4, the output head and the embeddings as they are."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from d2f.errors import InputError


def require_bitsandbytes() -> None:
    """Raise InputError where bitsandbytes is not installed."""
    if not _is_installed():
        raise InputError(
            "a 4-bit base needs bitsandbytes, which is not installed: "
            "pip install 'd2f-toolkit[4bit]', or set quantize: none"
        )


def four_bits(dtype: torch.dtype) -> Any:
    """transformers' settings for a 4-bit model that computes in `dtype`: NF4 with double
    quantisation, kept as bytes of `dtype` so that FSDP can shard it.

    Raises InputError where bitsandbytes is not installed.
    """
    require_bitsandbytes()
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def keep_differentiable(network: torch.nn.Module) -> None:
    """Let no 4-bit layer of `network` pack its weights for inference on a CPU: bitsandbytes does
    so at the first forward that is not of training (of the teacher, of an evaluation), and what
    packed layers compute has no gradient."""
    for module in network.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Its own switch, which bitsandbytes sets where the CPU has the instructions.
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (no module's own)


def _is_installed() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None
