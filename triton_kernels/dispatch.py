"""Choose between a Triton kernel and the plain computation beside it.

On CUDA a kernel is taken once it has agreed with its reference on this device and in this dtype;
one that does not agree is left out with a warning. The environment variable ``D2F_KERNELS``
overrides that: ``0`` takes the plain computation, ``1`` the kernels without comparing.

A torch for CUDA brings Triton. Without it the kernels' files are read all the same, and every
computation is the plain one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    triton = tl = None

VARIABLE = "D2F_KERNELS"
# A kernel's own file has its check: a small random problem, the kernel against its reference.
# (tests/kernels/ is thorough.) The int is the head dimension, where the kernel has one.
Check = Callable[[torch.dtype, torch.device, int], None]
CHECKS: dict[str, Check] = {}  # of the kernels whose files are imported
_MARGIN = 16  # times the dtype's rounding unit and the largest value


def use_kernel(name: str, x: Tensor, wanted: bool | None = None) -> bool:
    """Decide whether the kernel `name` computes on x, whose last dimension is the head dimension
    where the kernel has one. fp64 is always the plain computation's.

    wanted: the caller's own choice, None for the rule above. Raises ValueError for another value of
    ``D2F_KERNELS``, ModuleNotFoundError where a kernel is asked for and Triton is not installed.
    """
    if x.dtype == torch.float64:
        return False
    if wanted is None:
        if not x.is_cuda:  # a CPU has only the interpreter, which the tests ask for by `wanted`
            return False
        setting = os.environ.get(VARIABLE, "")
        if setting not in ("", "0", "1"):
            raise ValueError(f"{VARIABLE} must be 0 or 1, or not set, got {setting!r}")
        if not setting:
            return is_sound(name, x.dtype, x.device, x.shape[-1])
        wanted = setting == "1"
    if wanted and triton is None:
        raise ModuleNotFoundError("a kernel needs Triton, which is missing: pip install triton")
    return wanted


def jit(kernel: Any) -> Any:
    """Make a function a Triton kernel, where Triton is installed."""
    return kernel if triton is None else triton.jit(kernel)


@cache
def is_sound(name: str, dtype: torch.dtype, device: torch.device, dim: int) -> bool:
    """Run the kernel's check once; warn where it fails."""
    try:
        # The first call may come from a decoder's inference mode; the masked KL's needs gradients.
        with torch.inference_mode(False), torch.enable_grad():
            CHECKS[name](dtype, device, dim)
    except Exception as error:  # whatever a compiler or a driver raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"the Triton kernel {name} does not work in {dtype} on {device}, the plain computation "
            f"is used: {reason}",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


def self_check(name: str) -> Callable[[Check], Check]:
    """Make a function the check of the kernel `name`. It raises AssertionError where the kernel
    errs by more than the plain computation in the same dtype and a margin of rounding."""

    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


def check_alike(named: str, same: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Raise ValueError unless `same` share a floating dtype, and a device with the others."""
    dtypes = sorted({str(x.dtype).removeprefix("torch.") for x in same})
    if len(dtypes) > 1 or not same[0].is_floating_point():
        raise ValueError(f"{named} must share one floating dtype, got {', '.join(dtypes)}")
    devices = sorted({str(x.device) for x in (*same, *others)})
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {', '.join(devices)}")


def random_inputs(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Draw normal tensors of these shapes, the same each time."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes]


def compare(
    name: str, inputs: Sequence[Tensor], compute: Callable[[Sequence[Tensor], bool], list[Tensor]]
) -> None:
    """Raise AssertionError unless ``compute(inputs, kernel=True)`` is as near to the plain
    computation in fp64 as the plain one in the inputs' dtype is, within the margin."""
    truths = compute([x.double() for x in inputs], False)
    plain, ours = compute(inputs, False), compute(inputs, True)
    unit = torch.finfo(inputs[0].dtype).eps
    for got, theirs, truth in zip(ours, plain, truths, strict=True):
        largest = max(1.0, truth.abs().max().item())
        allowed = (theirs.double() - truth).abs().max().item() + _MARGIN * unit * largest
        error = (got.double() - truth).abs().max().item()
        if not error <= allowed:  # NaN is not
            raise AssertionError(f"{name} errs by {error:.2g}, where {allowed:.2g} is allowed")
