"""How many processors this process may compute on; imports no torch."""

from __future__ import annotations

import math
import os
from pathlib import Path

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
