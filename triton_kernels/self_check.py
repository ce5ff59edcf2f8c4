"""A quick look at each kernel on the device that it is about to run on: a small random problem, the
kernel beside its reference, their errors against fp64. tests/kernels/ is the thorough one.

A kernel's own file says what is looked at, as a function under `@self_check("name")`; it raises
AssertionError where the kernel errs more than the plain computation in the same dtype does, beyond
a margin of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
