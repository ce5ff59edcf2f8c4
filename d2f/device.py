"""Devices and dtypes by name, checked where they come in."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from d2f.errors import InputError, repr_of

# How many processors this process may compute on; imports no torch.

CGROUPS = Path("/sys/fs/cgroup")
MOST_THREADS = 4096


def usable_cpus(own: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS) -> int:
    """The processors that the process may run on, no more than its share of time is worth: a
    container with a quota of two and a half has two. own, root: where Linux says what group a
    process is in, and what groups may use."""
    affine = getattr(os, "sched_getaffinity", None)
    count = len(affine(0)) if affine is not None else os.cpu_count() or 1
    quota = cpu_quota(own, root)
    return count if quota is None else max(1, min(count, math.floor(quota)))


def thread_counts(most: int) -> tuple[int, ...]:
    """Numbers of threads to choose from: 1, 2, 4, ... and `most`, which is at least 1."""
    return (*(2**i for i in range((most - 1).bit_length())), most)


def cpu_quota(own: Path, root: Path) -> float | None:
    """Processors' worth of time that the process's control groups leave it; None: no limit."""
    found = [limit for folder in _groups(own, root) if (limit := _limit(folder)) is not None]
    return min(found, default=None)


def _groups(own: Path, root: Path) -> list[Path]:
    """The process's group of either version of the hierarchy, and all groups around it."""
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


# How PyTorch's threads wait for each other on a CPU; imports no torch.
#
# Between two parallel loops OpenMP's threads spin, each on a core, to be ready at once. Where
# something else wants these cores, a thread that has work waits until one that only spins is moved
# away, in every loop of every layer: decoding falls to a small part. A thread that sleeps at once
# has
# to be woken for each loop, which costs a quarter of the speed on an idle machine. So they spin for
# some microseconds, which the gaps between the loops of a forward take, and sleep then.
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


# With how many threads a forward or a step of training is computed on a CPU: measured as it goes.
#
# More threads are faster on cores that are free, and far slower on cores that are not; few rows may
# be computed fastest by one thread anywhere. So forwards of about as many rows (up to the same
# power
# of two) are tried with each count that there is to choose from, and the count of the lowest median
# is taken. One that took far longer is not tried a second time, nor at first with other numbers of
# rows. Now and then another is tried again, as what else runs comes and goes; all such trials
# together may lose `TRIALS` of the time, so one that turns out slow is not repeated soon.

LAST = 7  # forwards with a count of which the median is taken
FIRST = 3  # forwards with each before one is chosen
FAR = 1.5  # times the lowest: one forward is enough to see it
TRIALS = 0.02  # share of the time that may be lost by trying others
BETTER = 0.95  # a count takes over from the present one below this share of its time


class ThreadChoice:
    """The numbers of threads of one model's forwards. counts: to choose from, ascending, at least
    one."""

    def __init__(self, counts: Sequence[int]):
        self.counts = counts
        self._sizes: dict[int, _Size] = {}
        self._latest: _Size | None = None  # that has been tried with all counts that it would be
        self._spent = self._lost = 0.0  # seconds of all forwards; what trials took above the best

    def choose(self, rows: int) -> int:
        """The threads for a forward of so many rows, at least 1."""
        if len(self.counts) == 1:
            return self.counts[0]
        size = self._sizes.get(rows.bit_length())
        if size is None:
            out = self._latest.far_off() if self._latest is not None else []
            size = self._sizes[rows.bit_length()] = _Size(self.counts, out)
        lacking = size.lacking()
        if lacking is not None:
            return lacking
        self._latest, best = size, size.best()
        return size.oldest(besides=best) if self._lost < TRIALS * self._spent else best

    @contextmanager
    def using(self, rows: int) -> Iterator[int]:
        """Within it, torch computes with the threads of a forward of so many rows; what the process
        does besides keeps its own number. Gives that number; `note` is still to be called."""
        before, count = torch.get_num_threads(), self.choose(rows)
        torch.set_num_threads(count)  # takes a microsecond
        try:
            yield count
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def timed(self, rows: int) -> Iterator[None]:
        """The same, and what is done within it is noted as such a forward."""
        began = time.perf_counter()
        with self.using(rows) as count:
            yield
        self.note(rows, count, time.perf_counter() - began)

    def note(self, rows: int, threads: int, seconds: float) -> bool:
        """A forward of so many rows took so long with so many threads; whether these are what it
        is computed with, and not a trial."""
        self._spent += seconds
        size = self._sizes.get(rows.bit_length())
        if size is None:
            return len(self.counts) == 1
        if size.lacking() is not None:
            size.note(threads, seconds)
            return False
        best = size.best()
        if threads != best:
            self._lost += max(0.0, seconds - median(size.seconds[best]))
        size.note(threads, seconds)
        return threads == best


class _Size:
    """Forwards of about as many rows. out: counts that are not tried at first."""

    def __init__(self, counts: Sequence[int], out: Sequence[int]):
        self.seconds: dict[int, deque[float]] = {count: deque(maxlen=LAST) for count in counts}
        self._first = [count for count in counts if count not in out]
        self._noted = dict.fromkeys(counts, 0)  # when, in forwards
        self._now = 0
        self._best: int | None = None
        self._settled = False

    def note(self, threads: int, seconds: float) -> None:
        self._now += 1
        self._noted[threads] = self._now
        times = self.seconds[threads]
        # Far faster than it was: what it was measured beside is gone, and so is the measurement.
        if self._settled and times and threads != self._best and FAR * seconds < median(times):
            times.clear()
        times.append(seconds)

    def lacking(self) -> int | None:
        """A count that was tried too seldom to choose; None where there is none."""
        if not self._settled:
            far = self.far_off()
            for count in self._first:
                if len(self.seconds[count]) < (1 if count in far else FIRST):
                    return count
            self._settled = True
        return None

    def far_off(self) -> list[int]:
        """The counts with which forwards took far longer than with the best."""
        found = {count: median(times) for count, times in self.seconds.items() if times}
        lowest = min(found.values(), default=0.0)
        return [count for count, seconds in found.items() if seconds > FAR * lowest]

    def best(self) -> int:
        """The count of the lowest median; the one before it where they hardly differ."""
        found = {count: median(times) for count, times in self.seconds.items() if times}
        lowest = min(found, key=lambda count: found[count])
        if self._best is None or found[lowest] < BETTER * found[self._best]:
            self._best = lowest
        return self._best

    def oldest(self, besides: int) -> int:
        """Of the other counts the one that was not tried for longest."""
        others = (count for count in self.seconds if count != besides)
        return min(others, key=lambda count: self._noted[count])
