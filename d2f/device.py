"""Devices and dtypes by name, checked where they come in."""

from __future__ import annotations

import torch

from d2f.errors import InputError

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def parse_device(device: torch.device | str | None) -> torch.device:
    """A device that is there; None is CUDA where there is one, else the CPU.

    Raises InputError for a name that is none, and for a device that this machine does not have.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"device {device}: no such device here, expected {_available()}: {reason}"
        ) from error
    return found


def parse_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """A torch dtype from its name; None is fp32 on a CPU and bf16 elsewhere."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise InputError(f"dtype must be one of {sorted(_DTYPES)}, got {dtype!r}")
    return _DTYPES[dtype]


def _available() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "cpu" + "".join(f", cuda:{i}" for i in range(count))
