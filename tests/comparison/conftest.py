"""A Python that seems to have vLLM, and entries that are always calm."""

import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_vllm.py")


def make_fake_python(folder: Path) -> str:
    """Runs fake_vllm.py in place of vLLM's server; `-c` succeeds, as the check of it wants."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exit 0; fi\nexec {sys.executable} {FAKE} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def fake_python(tmp_path):
    return make_fake_python(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def calm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode.compare.entries.wait_for_calm", lambda: None)
        patch.setattr("decode.compare.server.POLL_SECONDS", 0.05)
        yield
