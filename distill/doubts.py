"""What a run is warned of before it begins: it goes on, and may not be what was meant."""

from __future__ import annotations

import torch

from distill.config import TrainConfig
from distill.objectives import OBJECTIVES


def doubts(config: TrainConfig) -> list[str]:
    """A line for each: of the objective (`Objective.doubt`), and of bf16 on a CPU that has none."""
    found = [OBJECTIVES[config.objective].doubt(config), _emulated_bf16(config)]
    return [line for line in found if line is not None]


def _emulated_bf16(config: TrainConfig) -> str | None:
    if config.mixed_precision != "bf16" or torch.accelerator.is_available() or cpu_has_bf16():
        return None
    return (
        "warning: this CPU has no bf16 arithmetic, so that mixed_precision bf16 is several times "
        "slower here than fp32: --mixed_precision no"
    )


def cpu_has_bf16() -> bool:
    """Whether matrices of bf16 are multiplied as such: without AVX-512 or AMX a CPU goes through
    fp32, number by number."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
