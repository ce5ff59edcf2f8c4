"""Which computation runs: the Triton kernel or the plain one beside it.

On CUDA the kernels are chosen of themselves, each after it has given what its reference gives on
this device and in this dtype (`triton_kernels.dispatch`); one that does not is left out with a
warning. The environment variable ``D2F_KERNELS`` overrides that: ``0`` takes the plain computation,
``1`` the kernels without asking.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version

import torch
from torch import Tensor

# A quick look at each kernel on the device that it is about to run on: a small random problem, the
# kernel beside its reference, their errors against fp64. tests/kernels/ is the thorough one.
#
# A kernel's own file says what is looked at, as a function under `@self_check("name")`; it raises
# AssertionError where the kernel errs more than the plain computation in the same dtype does,
# beyond
# a margin of rounding.

Check = Callable[[torch.dtype, torch.device, int], None]  # the last: the head dimension, if any
CHECKS: dict[str, Check] = {}  # of the kernels whose files are imported
_MARGIN = 16  # times the dtype's rounding unit and the largest value


def self_check(name: str) -> Callable[[Check], Check]:
    """Make a function the check of the kernel `name`."""

    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


def random_inputs(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Normal tensors of these shapes, the same each time."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes]


def compare(
    name: str, inputs: Sequence[Tensor], compute: Callable[[Sequence[Tensor], bool], list[Tensor]]
) -> None:
    """Raise AssertionError unless ``compute(inputs, kernel=True)`` is as near to the plain
    computation in fp64 as the plain one in the inputs' dtype is, beyond the margin."""
    truths = compute([x.double() for x in inputs], False)
    plain, ours = compute(inputs, False), compute(inputs, True)
    unit = torch.finfo(inputs[0].dtype).eps
    for got, theirs, truth in zip(ours, plain, truths, strict=True):
        largest = max(1.0, truth.abs().max().item())
        allowed = (theirs.double() - truth).abs().max().item() + _MARGIN * unit * largest
        error = (got.double() - truth).abs().max().item()
        if not error <= allowed:  # NaN is not
            raise AssertionError(f"{name} errs by {error:.2g}, where {allowed:.2g} is allowed")


VARIABLE = "D2F_KERNELS"


def use_kernel(name: str, x: Tensor, wanted: bool | None = None) -> bool:
    """Whether the kernel `name` (one of `self_check.CHECKS`) is to compute on x, whose last
    dimension is the head dimension where the kernel has one. wanted: the caller's own choice; None
    chooses as this module says. fp64 is always for the plain computation.

    Raises ValueError for another value of ``D2F_KERNELS``.
    """
    if x.dtype == torch.float64:
        return False
    if wanted is not None:
        if wanted and os.environ.get("TRITON_INTERPRET") == "1":
            check_interpreter()
        return wanted
    if not x.is_cuda:  # on a CPU there is only the interpreter, which the tests ask for by `wanted`
        return False
    told = os.environ.get(VARIABLE, "")
    if told not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, or not set, got {told!r}")
    if told:
        return told == "1"
    return is_sound(name, x.dtype, x.device, x.shape[-1])


@cache
def check_interpreter() -> None:
    """Raise RuntimeError where Triton's interpreter, which runs the kernels on a CPU, does not work
    with the numpy that is installed: up to 3.6 it converts arrays of one element as numpy 2.4 no
    longer does. Kernels on a GPU need no numpy."""
    triton, numpy = version("triton"), version("numpy")
    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        raise RuntimeError(
            f"Triton {triton} interprets kernels with numpy below 2.4, this is {numpy}: "
            "pip install 'numpy<2.4'"
        )


def _release(name: str) -> tuple[int, int]:
    major, minor = name.split(".")[:2]
    return int(major), int(minor)


@cache
def is_sound(name: str, dtype: torch.dtype, device: torch.device, dim: int) -> bool:
    """Whether the kernel gives what its reference gives there; asked once, warns where not."""
    check = CHECKS[name]
    try:
        # The first call may come from a decoder's inference mode; the masked KL's needs gradients.
        with torch.inference_mode(False), torch.enable_grad():
            check(dtype, device, dim)
    except Exception as error:  # whatever a compiler or a driver may raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(
            f"the Triton kernel {name} does not work in {dtype} on {device}, the plain computation "
            f"is used: {reason[0]}",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True
