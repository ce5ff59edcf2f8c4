"""Devices and dtypes by name, checked where they come in."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from d2f.errors import InputError, repr_of

if TYPE_CHECKING:
    import torch

# How many processors this process may compute on; imports no torch.

CGROUPS = Path("/sys/fs/cgroup")
MOST_THREADS = 4096
_LOOK_SECONDS, _BUSY_PERCENT = 0.1, 90.0


def usable_cpus(own: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> int:
    """Count the processors that the process may run on, no more than its share of time is worth: a
    container with a quota of two and a half has two. own, root: where Linux says what group a
    process is in, and what groups may use."""
    affine = getattr(os, "sched_getaffinity", None)
    count = len(affine(0)) if affine is not None else os.cpu_count() or 1
    quota = cpu_quota(own, root)
    return count if quota is None else max(1, min(count, math.floor(quota)))


def cpu_quota(own: Path, root: Path) -> float | None:
    """Find how many processors' worth of time the process's control groups leave it, None where
    they set no limit."""
    found = [limit for folder in _groups(own, root) if (limit := _limit(folder)) is not None]
    return min(found, default=None)


def _groups(own: Path, root: Path) -> list[Path]:
    """List the process's group of either version of the hierarchy, and all groups around it."""
    folders = [root, root / "cpu"]  # in a container its own group is mounted as the root
    for line in (_read(own) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            base = root
        elif "cpu" in controllers.split(","):
            base = root / "cpu"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        folders += [base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def _limit(folder: Path) -> float | None:
    # Version 2: "max 100000" or "250000 100000"; version 1: a file each, -1 for no limit.
    text = _read(folder / "cpu.max")
    if text is None:
        text = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    try:
        quota, period = (float(word) for word in text.split())
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}


def parse_device(device: torch.device | str | None) -> torch.device:
    """A device that is there; None is CUDA where there is one, else the CPU.

    Raises InputError for a name that is none, and for a device that this machine does not have.
    """
    import torch

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
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def parse_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """A torch dtype from its name; None is fp32 on a CPU and bf16 elsewhere, ``auto`` bf16 wherever
    it is fast: also on a CPU with AMX or AVX512-BF16. On others products in bf16 are emulated."""
    import torch

    if dtype == "auto" and device.type == "cpu" and _has_fast_bf16():
        return torch.bfloat16
    if dtype in (None, "auto"):
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise InputError(f"dtype must be one of {sorted(['auto', *_DTYPES])}, got {dtype!r}")
    found: torch.dtype = getattr(torch, _DTYPES[dtype])
    return found


def parse_threads(threads: int | str | None) -> int:
    """Choose how many threads a forward on a CPU is computed with. Raises InputError.

    N is taken as it is, ``auto`` is the processors that the process may use, None no more than
    torch is set to (OMP_NUM_THREADS). Where other programs keep all of these processors busy, it is
    one: threads that wait for each other at every loop would be far slower than it.
    """
    import torch

    if isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= MOST_THREADS:
        return threads
    if threads not in (None, "auto"):
        raise InputError(
            f"threads must be auto or a whole number from 1 to {MOST_THREADS}, got "
            f"{repr_of(threads)}"
        )
    most = usable_cpus()
    if threads is None:
        most = min(most, torch.get_num_threads())
        if "OMP_NUM_THREADS" in os.environ:
            return most
    return 1 if most > 1 and busy() else most


def busy() -> bool:
    """Say whether other programs keep the processors busy that this process may use; takes a tenth
    of a second."""
    import psutil

    shares = psutil.cpu_percent(_LOOK_SECONDS, percpu=True)
    affine = getattr(os, "sched_getaffinity", None)
    usable = affine(0) if affine is not None else range(len(shares))
    own = [shares[cpu] for cpu in usable if cpu < len(shares)]
    return bool(own) and sum(own) / len(own) >= _BUSY_PERCENT


def _has_fast_bf16() -> bool:
    import torch

    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def _available() -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "cpu" + "".join(f", cuda:{i}" for i in range(count))


# How PyTorch's threads wait for each other on a CPU; imports no torch.
#
# Between two parallel loops OpenMP's threads spin, each on a core, to be ready at once. Where
# something else wants these cores, a thread that has work waits until one that only spins is moved
# away, in every loop of every layer: decoding falls to a small part. A thread that sleeps at once
# has to be woken for each loop, which costs a quarter of the speed on an idle machine. So they spin
# for some microseconds, which the gaps between the loops of a forward take, and sleep then.
#
# The runtime reads it from the environment when torch is loaded. So this package says it when it is
# imported, which is before torch in all our commands; where torch came first, or the user said
# something, it stays as it is.

SPINS = "GOMP_SPINCOUNT"  # of GNU's runtime, which PyTorch's wheels for CPUs bring
COUNT = "10000"
_USERS = (SPINS, "OMP_WAIT_POLICY")
_said = False


def spin_briefly() -> None:
    """Let waiting threads sleep soon, unless the user's environment says how they wait."""
    global _said
    if "torch" not in sys.modules and not any(name in os.environ for name in _USERS):
        os.environ[SPINS] = COUNT
        _said = True


def users_environment() -> Mapping[str, str]:
    """The environment without what this module put there: for other projects' programs."""
    return {name: text for name, text in os.environ.items() if not (_said and name == SPINS)}
