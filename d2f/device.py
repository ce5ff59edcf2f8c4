"""Devices and dtypes by name, checked where they come in."""

from __future__ import annotations

import contextlib

import torch

from d2f.cpus import MOST_THREADS, thread_counts, usable_cpus
from d2f.errors import InputError, repr_of

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


def as_current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Within it `device` is this thread's current GPU, where it is one: Triton starts its kernels
    there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def parse_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """A torch dtype from its name; None is fp32 on a CPU and bf16 elsewhere, ``auto`` bf16 wherever
    it is fast: also on a CPU with AMX or AVX512-BF16. On others products in bf16 are emulated."""
    if dtype == "auto" and device.type == "cpu" and _has_fast_bf16():
        return torch.bfloat16
    if dtype in (None, "auto"):
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise InputError(f"dtype must be one of {sorted(['auto', *_DTYPES])}, got {dtype!r}")
    return _DTYPES[dtype]


def parse_threads(threads: int | str | None) -> tuple[int, ...]:
    """The numbers of threads that a forward on a CPU may be computed with: N alone; for ``auto`` 1,
    2, 4, ... up to the processors that the process may use; for None up to the number that torch is
    set to, where that is lower. Raises InputError."""
    if isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= MOST_THREADS:
        return (threads,)
    if threads not in (None, "auto"):
        raise InputError(
            f"threads must be auto or a whole number from 1 to {MOST_THREADS}, got "
            f"{repr_of(threads)}"
        )
    most = usable_cpus()
    return thread_counts(most if threads == "auto" else min(most, torch.get_num_threads()))


def _has_fast_bf16() -> bool:
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def _available() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "cpu" + "".join(f", cuda:{i}" for i in range(count))
