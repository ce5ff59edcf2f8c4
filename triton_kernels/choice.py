"""Which computation runs: the Triton kernel or the plain one beside it."""

from __future__ import annotations

import os

import torch
from torch import Tensor

VARIABLE = "D2F_KERNELS"


def use_kernel(x: Tensor, wanted: bool | None = None) -> bool:
    """Whether the kernel computes on x. wanted: None is on CUDA where the environment says
    ``D2F_KERNELS=1``; until the kernels have passed their tests on a GPU that is not the default.
    fp64 is never for a kernel."""
    if x.dtype == torch.float64:
        return False
    if wanted is None:
        return x.is_cuda and os.environ.get(VARIABLE) == "1"
    return wanted
