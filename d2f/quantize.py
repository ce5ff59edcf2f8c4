"""Quantise a model's linear layers by torchao and bitsandbytes. The output head, the embeddings
and the norms stay as they are.

    int8, int8-weight, int4-weight, fp8    torchao
    nf4                                    bitsandbytes; also the frozen base of a training (QLoRA,
                                           arXiv 2305.14314)

None of them mixes rows of a forward: quantised activations have a scale for each row, so that a
token does not depend on the rest of the batch.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from d2f.errors import InputError, not_one_of


@dataclass(frozen=True)
class Quantisation:
    """Describe one quantisation.

    weights, activations: their type in the products, for tables. library: what computes it.
    no_cpu: why a CPU does not have it, empty where it does. capability: the least compute
    capability of a CUDA GPU, None for any. bf16: it computes in bfloat16 alone.
    """

    weights: str
    activations: str
    library: str
    no_cpu: str = ""
    capability: tuple[int, int] | None = None
    bf16: bool = False


QUANTISATIONS = {
    "int8": Quantisation(
        "int8, a scale an output", "int8, a scale a row", "torchao", capability=(8, 0)
    ),
    "int8-weight": Quantisation("int8, a scale an output", "as they are", "torchao"),
    "int4-weight": Quantisation(
        "int4, a scale and a zero for each 128",
        "as they are",
        "torchao",
        no_cpu="torchao has its 4-bit products for CUDA GPUs alone (nf4 has them for CPUs)",
        capability=(8, 0),
        bf16=True,
    ),
    "nf4": Quantisation(
        "4-bit normal floats, a scale for each 64", "as they are", "bitsandbytes"
    ),
    "fp8": Quantisation(
        "float8 e4m3, a scale an output",
        "float8 e4m3, a scale a row",
        "torchao",
        no_cpu="CPUs have no float8 products",
        capability=(8, 9),
        bf16=True,
    ),
}  # fmt: skip


def check_quantize(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise InputError, with the reason, where a quantisation does not exist, does not run on this
    device or in this dtype, or needs a library that is not installed."""
    if name not in QUANTISATIONS:
        raise InputError(f"quantize: {not_one_of(name, QUANTISATIONS)}")
    reasons = {one: _refusal(found, device) for one, found in QUANTISATIONS.items()}
    if reasons[name]:
        here = ", ".join(one for one, reason in reasons.items() if not reason) or "none"
        raise InputError(
            f"quantize {name}: not on {device.type}: {reasons[name]}; expected one of {here}"
        )
    if QUANTISATIONS[name].bf16 and dtype != torch.bfloat16:
        raise InputError(f"quantize {name}: computes in bfloat16 alone, got the dtype {dtype}")
    require(QUANTISATIONS[name].library, f"quantize {name}")


def _refusal(quantisation: Quantisation, device: torch.device) -> str:
    """Say why a device does not have a quantisation; empty where it does."""
    if device.type == "cpu":
        return quantisation.no_cpu
    if device.type != "cuda":
        return "quantised weights are for CPUs and CUDA GPUs"
    here, least = torch.cuda.get_device_capability(device), quantisation.capability or (0, 0)
    if here >= least:
        return ""
    needed, got = (".".join(map(str, pair)) for pair in (least, here))
    return f"it needs compute capability {needed}, this GPU has {got}"


def require(library: str, what: str) -> None:
    """Raise InputError where a library of the extra ``quantize`` is not installed."""
    if importlib.util.find_spec(library) is None:
        raise InputError(
            f"{what} needs {library}, which is not installed: pip install 'd2f-toolkit[quantize]'"
        )


def slowness(name: str, device: torch.device) -> str:
    """Say why a quantisation is slow on this device; empty where it is not."""
    fast = torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported()
    if name != "int8" or device.type != "cpu" or fast:
        return ""
    return (
        "int8 is slower than no quantisation here: PyTorch has fast int8 products for CPUs with "
        "AVX512-VNNI or AMX, and this one has neither"
    )


def loading_settings(name: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return options of `from_pretrained` that quantise each weight as it is read: the whole model
    is never in memory unquantised. dtype: that of the computation."""
    if QUANTISATIONS[name].library == "torchao":
        from transformers import TorchAoConfig

        settings: Any = TorchAoConfig(torchao_config(name))
    else:
        from transformers import BitsAndBytesConfig

        # Kept as bytes of `dtype`, so that FSDP can shard it in training.
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,
        )
    return {"quantization_config": settings, "device_map": {"": device}}


def torchao_config(name: str) -> Any:
    """Return torchao's own name of a quantisation."""
    from torchao import quantization as ao

    kind, options = {
        "int8": (ao.Int8DynamicActivationInt8WeightConfig, {"granularity": ao.PerRow()}),
        "int8-weight": (ao.Int8WeightOnlyConfig, {}),
        "int4-weight": (
            ao.Int4WeightOnlyConfig,
            {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"},
        ),
        "fp8": (ao.Float8DynamicActivationFloat8WeightConfig, {"granularity": ao.PerRow()}),
    }[name]
    # set_inductor_config would change torch.compile for every model of the process.
    return kind(**options, set_inductor_config=False)


def keep_differentiable(network: nn.Module) -> None:
    """Keep 4-bit layers of `network` from packing their weights for inference on a CPU.
    bitsandbytes does so at the first forward outside training (of the teacher, of an evaluation),
    and packed layers have no gradient."""
    for module in network.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # Its own switch, which bitsandbytes sets where the CPU has the instructions.
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (no module's own)
