"""Kernels run natively on a GPU, else in Triton's interpreter; what they allocate and do not
write is NaN."""

import pytest
import torch

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
