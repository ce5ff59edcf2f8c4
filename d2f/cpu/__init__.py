"""Run a decoding forward in C++ on an x86 CPU: fp32 models with Llama's, Qwen2's or Qwen3's layers.

Calling a small model's operators one by one takes longer than computing them, even through
`torch.compile`. Here one call runs all layers: oneDNN's matrix products through PyTorch's C
interface and, between them, norms, RoPE, the cache, attention over spans and SwiGLU. A second call
finds token and confidence in the logits. The code is the same for every model; PyTorch's compiler
builds it once and keeps it in its cache on disk. ``D2F_KERNELS=0`` leaves it out.

`compiled_rows` makes a model's forward; `scored` reads its logits.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from transformers import PreTrainedModel

from d2f.cache import SlotCache
from d2f.cpu.rows import NativeRows, fits, scored
from triton_kernels.dispatch import VARIABLE

__all__ = ["NativeRows", "compiled_rows", "scored"]


def compiled_rows(
    backbone: PreTrainedModel, new_cache: Callable[[int], SlotCache]
) -> NativeRows | None:
    """Build the model's forward in C++ and compare it with the plain one.

    Returns None for a model that it is not made for or with ``D2F_KERNELS=0``; and, with a warning,
    where it cannot be built or its results differ.
    """
    if os.environ.get(VARIABLE) == "0" or not fits(backbone):
        return None
    try:
        rows = NativeRows(backbone)
        rows.check(new_cache)
    except Exception as error:  # whatever a compiler or a linker raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"forwards in C++ do not work here, torch.compile is used: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    rows.warm_up()
    return rows
