"""What is here needs a CUDA device; each thing that it covers has a test on the CPU as well."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    here = [item for item in items if item.path.parent.name == "gpu"]
    for item in here:
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def nothing_falls_back(monkeypatch):
    """Each kernel is taken and each graph captured, or its warning is an error."""
    monkeypatch.delenv("D2F_GRAPHS", raising=False)
    monkeypatch.delenv("D2F_KERNELS", raising=False)
