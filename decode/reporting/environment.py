"""The machine and the versions that something was measured on."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from d2f.model import DiffusionModel


def environment(model: DiffusionModel) -> dict[str, Any]:
    """What the numbers were measured on."""
    cuda = model.device.type == "cuda"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": model.threads,
        "dtype": model.precision,
        "compiled": model.is_compiled,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """The CPU's name."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for entry in information.read_text().splitlines():
            if entry.startswith("model name"):
                return entry.partition(":")[2].strip()
    return platform.processor() or platform.machine()
