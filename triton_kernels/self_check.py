"""A quick look at each kernel on the device that it is about to run on: a small random problem, the
kernel beside its reference, their errors against fp64. tests/kernels/ is the thorough one.

Each check raises AssertionError where a kernel errs more than the plain computation in the same
dtype does, beyond a margin of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triton_kernels.confidence import confidence_of_logits
from triton_kernels.masked_kl import masked_linear_kl
from triton_kernels.span_attention import HEAD_DIMS, span_attention, write_slots

Check = Callable[[torch.dtype, torch.device, int], None]
_MARGIN = 16  # times the dtype's rounding unit and the largest value


def check_span_attention(dtype: torch.dtype, device: torch.device, dim: int) -> None:
    """Forward and backward, two to a key head, few rows on many keys and the other way round."""
    if dim not in HEAD_DIMS:
        raise AssertionError(f"its head dimension must be one of {HEAD_DIMS}, got {dim}")
    for queries, slots in ((5, 300), (70, 70)):
        ends = torch.arange(1, queries + 1) * slots // queries
        spans = torch.stack((ends // 3, ends), -1)[:, None].to(device, torch.int32)
        shapes = ((queries, 4, dim), (2, slots, dim), (2, slots, dim))
        inputs = _random(shapes, dtype, device)

        def compute(given: Sequence[Tensor], kernel: bool, where: Tensor = spans) -> list[Tensor]:
            q, k, v = (x.detach().requires_grad_() for x in given)
            out = span_attention(q, k, v, where, kernel=kernel)
            return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]

        _compare("span attention", inputs, compute)


def check_write_slots(dtype: torch.dtype, device: torch.device, dim: int) -> None:
    """What is written is there, and nothing else has changed."""
    keys, values, k, v = _random(
        ((2, 3, dim), (2, 3, dim), (2, 9, dim), (2, 9, dim)), dtype, device
    )
    slots = torch.tensor([7, 0, 4], device=device)
    found = []
    for kernel in (True, False):
        own_k, own_v = k.clone(), v.clone()
        write_slots(own_k, own_v, slots, keys, values, kernel=kernel)
        found.append(torch.stack((own_k, own_v)))
    if not torch.equal(*found):
        raise AssertionError("the slots hold something else than was written")


def check_confidence(dtype: torch.dtype, device: torch.device, dim: int) -> None:
    """The same tokens, ties included, and the same probabilities."""
    logits = 3 * _random(((6, 5000),), dtype, device)[0]
    logits[0, 30] = logits[0, 4000] = logits.max() + 1
    named = torch.arange(6, device=device)
    ours, plain = (
        confidence_of_logits(logits, mask_id=7, named=named, kernel=kernel)
        for kernel in (True, False)
    )
    if not torch.equal(ours.token, plain.token):
        raise AssertionError("it chooses other tokens than the plain computation")
    for name in ("probability", "entropy", "margin", "named"):
        difference = (getattr(ours, name) - getattr(plain, name)).abs().max().item()
        if not difference < 1e-4:
            raise AssertionError(f"its {name} differs by {difference:.2g} from the plain one")


def check_masked_kl(dtype: torch.dtype, device: torch.device, dim: int) -> None:
    """The loss and its gradient, over several tiles."""
    inputs = _random(((9, 64), (9, 64), (700, 64)), dtype, device)

    def compute(given: Sequence[Tensor], kernel: bool) -> list[Tensor]:
        student, teacher, head = given
        student = student.detach().requires_grad_()
        weight = torch.linspace(0, 1, 9, device=device)
        loss = masked_linear_kl(student, teacher, head, weight, columns=256, kernel=kernel)
        return [loss.detach()[None], *torch.autograd.grad(loss, [student])]

    _compare("the masked KL", inputs, compute)


CHECKS: dict[str, Check] = {
    "span_attention": check_span_attention,
    "write_slots": check_write_slots,
    "confidence": check_confidence,
    "masked_kl": check_masked_kl,
}


def _random(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes]


def _compare(
    name: str, inputs: Sequence[Tensor], compute: Callable[[Sequence[Tensor], bool], list[Tensor]]
) -> None:
    truths = compute([x.double() for x in inputs], False)
    plain, ours = compute(inputs, False), compute(inputs, True)
    unit = torch.finfo(inputs[0].dtype).eps
    for got, theirs, truth in zip(ours, plain, truths, strict=True):
        largest = max(1.0, truth.abs().max().item())
        allowed = (theirs.double() - truth).abs().max().item() + _MARGIN * unit * largest
        error = (got.double() - truth).abs().max().item()
        if not error <= allowed:  # NaN is not
            raise AssertionError(f"{name} errs by {error:.2g}, where {allowed:.2g} is allowed")
