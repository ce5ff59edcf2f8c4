"""Run a decoding forward in C++ on a CPU, of models in fp32 or bf16 with layers of Llama's kind.

A decoding step costs what reading the weights costs, and calling operators one by one costs a small
model more than computing them. Here one call does a whole forward, from token ids to logits, by
products that read packed weights at the speed of memory. A second call finds token and confidence
in the logits. The code is the same for every model; PyTorch's compiler builds it once for this CPU
and keeps it in its cache on disk. ``D2F_KERNELS=0`` leaves it out.

`compiled_rows` makes a model's forward; `scored` reads its logits.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from transformers import PreTrainedModel

from d2f.cache import SlotCache
from d2f.cpu.rows import NativeRows, fits, scored
from d2f.gate import Gate
from triton_kernels.dispatch import VARIABLE

__all__ = ["NativeRows", "compiled_rows", "scored"]


def compiled_rows(
    backbone: PreTrainedModel, new_cache: Callable[[int], SlotCache], gate: Gate | None = None
) -> NativeRows | None:
    """Build the model's forward in C++ and compare it with the plain one.

    Returns None for a model that it is not made for or with ``D2F_KERNELS=0``; and, with a warning,
    where it cannot be built or its results differ.
    """
    if os.environ.get(VARIABLE) == "0" or not fits(backbone, gate):
        return None
    try:
        rows = NativeRows(backbone, gate)
        rows.check(new_cache)
    except Exception as error:  # whatever a compiler or a linker raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"forwards in C++ do not work here, torch.compile is used: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return rows
