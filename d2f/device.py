"""Choose devices, dtypes and threads by name, with errors that say what there is.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from d2f.errors import InputError, not_one_of, repr_of

if TYPE_CHECKING:
    import torch

MOST_THREADS = 4096
DEVICE = r"^(cpu|cuda|mps|xpu)(:[0-9]{1,3})?$"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def parse_device(device: torch.device | str | None) -> torch.device:
    """Return a device that is there; for None CUDA where there is one, else the CPU.

    Raises InputError for a bad name and for a device that this machine does not have.
    """
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        known = "cpu" + "".join(f", cuda:{i}" for i in range(count))
        raise InputError(
            f"device {device}: no such device here, expected {known}: {reason}"
        ) from error
    return found


def as_current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU this thread's current one: Triton starts its kernels there, wherever their tensors
    are."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def parse_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """Return a torch dtype from its name. Raises InputError.

    None is fp32 on a CPU and bf16 elsewhere. ``auto`` is bf16 also on a CPU with AMX or
    AVX512-BF16; other CPUs emulate its products.
    """
    import torch

    if dtype == "auto" and device.type == "cpu":
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    if dtype in (None, "auto"):
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, torch.dtype):
        return dtype
    known = ["auto", *_DTYPES.values(), *_DTYPES]
    if dtype not in known:
        raise InputError(f"dtype: {not_one_of(dtype, known)}")
    found: torch.dtype = getattr(torch, _DTYPES.get(dtype, dtype))
    return found


def parse_threads(threads: int | str | None) -> int:
    """Choose the number of threads of a forward on a CPU. Raises InputError.

    N is taken as it is, ``auto`` is every processor that the process may use, None no more than
    torch is set to (OMP_NUM_THREADS). Where other programs keep these processors busy it is one:
    threads that wait for each other at every loop would be far slower.
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
    """Measure for a tenth of a second whether other programs keep the usable processors busy."""
    import psutil

    shares = psutil.cpu_percent(0.1, percpu=True)
    if hasattr(os, "sched_getaffinity"):
        shares = [shares[cpu] for cpu in os.sched_getaffinity(0) if cpu < len(shares)]
    return bool(shares) and sum(shares) / len(shares) >= 90.0


def usable_cpus(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the processors that the process may use, at most the quota of its container: with a
    quota of two and a half it is two. groups: where Linux has the control groups."""
    affine = getattr(os, "sched_getaffinity", None)
    count = len(affine(0)) if affine is not None else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # no such version, or "max": no limit
            quota, period = (
                int(n) for n in " ".join((groups / f).read_text() for f in files).split()
            )
            if quota > 0:  # -1: no limit
                return max(1, min(count, quota // period))
    return count


# Between two parallel loops OpenMP's threads spin, each on a core, to be ready at once. Where
# something else wants these cores, a thread with work waits until a spinning one is moved away, in
# every loop of every layer: decoding slows down many times. Threads that sleep at once have to be
# woken for each loop, which costs a quarter of the speed on an idle machine. So they spin for some
# microseconds, as long as the gaps between the loops of a forward, and then sleep.
_SPINS = "GOMP_SPINCOUNT"  # of GNU's runtime, which PyTorch's wheels for CPUs bring
_said = False


def spin_briefly() -> None:
    """Let waiting threads sleep soon. The runtime reads this from the environment when torch is
    loaded; where torch came first, or the user said how threads wait, nothing changes."""
    global _said
    said_by_user = _SPINS in os.environ or "OMP_WAIT_POLICY" in os.environ
    if "torch" not in sys.modules and not said_by_user:
        os.environ[_SPINS] = "10000"
        _said = True


def users_environment() -> Mapping[str, str]:
    """Return the environment without this module's addition, for other projects' programs."""
    return {name: text for name, text in os.environ.items() if not (_said and name == _SPINS)}


# This process among those that hold a model together, by torchrun's environment.


def rank() -> int:
    """Return this process's number, 0 where it was started alone."""
    return _number("RANK", 0)


def check_processes(size: int) -> None:
    """Raise InputError unless torchrun started this process as one of `size`."""
    count = _number("WORLD_SIZE", 1)
    if count != size or not 0 <= rank() < size:
        raise InputError(
            f"tensor parallel {size} needs {size} processes, got {count}: start them with "
            f"torchrun --nproc-per-node {size} -m COMMAND --tensor-parallel {size}"
        )


def _number(variable: str, default: int) -> int:
    found = os.environ.get(variable, "")
    return int(found) if found.isdecimal() else default
