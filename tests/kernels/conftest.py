"""Kernels run natively on a GPU, else in Triton's interpreter; what they allocate and do not
write is NaN."""

import numpy as np
import pytest
import torch

from d2f import spans as sp
from d2f.spans import shadow_spans

CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True)  # fills torch.empty
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device():
    return "cuda" if CUDA else "cpu"


@pytest.fixture(params=["float32", "float16", pytest.param("bfloat16", marks=pytest.mark.skipif(
    not CUDA, reason="the interpreter's bf16 dot is wrong"))])  # fmt: skip
def dtype(request):
    return getattr(torch, request.param)


def _with_shadow(cached: int, block: int) -> torch.Tensor:
    """A block that is being decoded and, behind it, its shadow, as WINO feeds them."""
    n = np.arange(block)
    end, ends = cached + block, np.full(block, cached + block)
    own = shadow_spans(ends, ends, ends, 0, 0)
    shadow = shadow_spans(cached + n, cached + n + 1, ends, end, end + block)
    return torch.from_numpy(np.concatenate((own, shadow))).to(torch.int32)


MASKS = {  # spans and keys; odd lengths, and more rows than a tile of the kernel has
    "D2F": (sp.block_causal(75, 20, 16), 75),
    "D2F, packed and padded": (
        sp.pack([sp.block_causal(40, 9, 8), sp.block_causal(21, 5, 16)], 75), 75,
    ),
    "bidirectional, packed and padded": (
        sp.pack([sp.bidirectional(40), sp.bidirectional(30)], 75), 75,
    ),
    "WINO": (_with_shadow(60, 9), 78),
    "WeDLM's training": (sp.wedlm_training(30, 8), 60),
}  # fmt: skip


@pytest.fixture(params=MASKS)
def mask(request):
    """Spans of a mask that decoding or training uses, and the number of its keys."""
    return MASKS[request.param]
