"""Devices by name, checked where they come in."""

from __future__ import annotations

import torch

from d2f.errors import InputError


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


def _available() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "cpu" + "".join(f", cuda:{i}" for i in range(count))
