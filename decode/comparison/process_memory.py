"""Peak memory of processes: resident bytes, read where Linux tells them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def tree(pid: int) -> list[int]:
    """A process and all that it started, and they in turn."""
    import psutil

    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def reset_peak(pids: Iterable[int]) -> None:
    """Let each process's peak begin anew."""
    for pid in pids:
        with contextlib.suppress(OSError):
            # 5 sets VmHWM, the peak, back to what is resident now (proc(5)).
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pids: Iterable[int]) -> int | None:
    """Sum of the processes' peaks (pages that two of them share count twice), None where they
    cannot be read."""
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total or None
