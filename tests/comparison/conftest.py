"""A Python that seems to have vLLM."""

import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_vllm.py")


@pytest.fixture
def fake_python(tmp_path):
    """Runs fake_vllm.py in place of vLLM's server; `-c` succeeds, as the check of it wants."""
    path = tmp_path / "python"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exit 0; fi\nexec {sys.executable} {FAKE} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)
