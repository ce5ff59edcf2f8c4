"""Of rows of logits on a CPU the chosen token and how sure the model is of it, in one call of C++
(confidence.cpp), for compiled models in fp32.

The plain computation, `triton_kernels.confidence.confidence_reference`, goes over the vocabulary
about ten times, this one twice (`python -m benchmarks.confidence` has both). Built, looked at and
left out as `d2f.native` says.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from d2f.native import built
from triton_kernels.choice import VARIABLE
from triton_kernels.confidence import confidence_reference
from triton_kernels.self_check import compare, random_inputs


class _Scored(ctypes.Structure):
    """`Scored` of confidence.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "named", "table")),
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary", "mask", "threads")),
    )


@cache
def library() -> Any:
    """The compiled code. Raises whatever a compiler may."""
    return built("span_attention.cpp", "confidence.cpp")


def can_score() -> bool:
    """Whether the code is wanted, can be built here and gives what the plain computation gives;
    warns, once, where it is and does not."""
    return os.environ.get(VARIABLE) != "0" and _is_sound()


@cache
def _is_sound() -> bool:
    try:
        with torch.inference_mode(False):
            _check()
    except Exception as error:  # whatever a compiler or the linker may raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(
            f"confidence in C++ does not work here, the plain one is used: {reason[0]}",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


def scored(logits: Tensor, mask_id: int | None, named: Tensor | None) -> Tensor:
    """An fp64 table ``[2, N]`` of logits ``[N, V]``, fp32 on a CPU: token and probability as
    `triton_kernels.confidence` has them; with named, int64 ``[N]``, ``[6, N]``: also named,
    named_log, entropy and margin."""
    logits, rows = logits.contiguous(), len(logits)
    table = torch.empty(2 if named is None else 6, rows, dtype=torch.float64)
    given = _Scored(
        logits.data_ptr(), None if named is None else named.data_ptr(), table.data_ptr(),
        rows, logits.shape[1], -1 if mask_id is None else mask_id, torch.get_num_threads(),
    )  # fmt: skip
    library().score(ctypes.byref(given))
    return table


def _check() -> None:
    """Rows that do not fill a vector, a mask id, equal logits."""
    (logits,) = random_inputs([(5, 43)], torch.float32, torch.device("cpu"))
    logits[1, 7] = logits[1, 30] = 9.0
    named = torch.tensor([0, 7, 3, 42, 5])

    def compute(given: Sequence[Tensor], kernel: bool) -> list[Tensor]:
        if kernel:
            return list(scored(given[0], 3, named))
        found = confidence_reference(given[0], mask_id=3, named=named)
        assert found.named is not None and found.named_log is not None
        columns = [found.token, found.probability, found.named, found.named_log]
        return [column.double() for column in (*columns, found.entropy, found.margin)]

    compare("confidence in C++", [logits], compute)
