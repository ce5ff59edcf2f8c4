"""What a figure was measured on: the device, the versions, the code."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CODE = ("triton_kernels", "d2f", "decode", "distill", "benchmarks", "tests")


def device_and_versions() -> dict[str, Any]:
    """Of this process. It is called in one of its own, so that who asks takes no GPU memory."""
    import numpy
    import torch
    import transformers
    import triton

    found: dict[str, Any] = {"device": "cpu", "cuda": None}
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        found = {
            "device": facts.name,
            "capability": f"{facts.major}.{facts.minor}",
            "gib": round(facts.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    versions = (torch, triton, transformers, numpy)
    return {
        **found,
        **{package.__name__: package.__version__ for package in versions},
        "python": platform.python_version(),
    }


def code() -> str:
    """A hash of all Python files of this checkout: the same as long as none has changed, also where
    there is no git."""
    total = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        total.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return total.hexdigest()[:12]


def commit() -> str | None:
    """The commit that is checked out, `-dirty` with what was changed since; None where git or the
    repository is not there."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
    except OSError:
        return None
    return done.stdout.strip() or None
