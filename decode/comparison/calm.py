"""Between two entries of a comparison: until what the last one leaves running is over."""

from __future__ import annotations

import time

import psutil

EVERY = 0.1  # seconds
IDLE = 0.02  # seconds of computing in so many that a server may take which waits for requests


def wait_for_calm(most: float = 5.0) -> None:
    """Wait, at most `most` seconds, until the processes that this one started compute no more: a
    server may go on for a while after its last answer, and the next entry's timed run, of a small
    model a quarter of a second, would be measured beside it."""
    end = time.monotonic() + most
    before = _computed()
    while time.monotonic() < end:
        time.sleep(EVERY)
        now = _computed()
        if now - before <= IDLE:
            return
        before = now


def _computed() -> float:
    """Seconds that these processes have computed."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
