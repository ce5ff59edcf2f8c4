"""Importing a package starts nothing heavy: a command's --help does not wait for torch."""

import subprocess
import sys

import pytest

PACKAGES = ["d2f", "decode", "distill", "triton_kernels"]
HEAVY = ["torch", "transformers", "accelerate", "peft", "triton"]


@pytest.mark.parametrize(
    "packages", [*([name] for name in PACKAGES), PACKAGES, ["decode.decoders"]]
)
def test_importing_brings_nothing_heavy(packages):
    code = f"import sys, {', '.join(packages)}; print(*set(sys.modules) & set({HEAVY}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_public_names_are_there_when_asked_for():
    import d2f
    from d2f.contract import Contract
    from d2f.loading import load
    from d2f.model import DiffusionModel

    assert d2f.load is load
    assert d2f.Contract is Contract
    assert d2f.DiffusionModel is DiffusionModel
    assert all(hasattr(d2f, name) for name in d2f.__all__)


def test_a_name_that_is_not_there():
    import d2f

    with pytest.raises(AttributeError, match="no attribute 'lood'"):
        _ = d2f.lood
