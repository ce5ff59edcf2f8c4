"""A process that gets so many seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

POLL = 0.5  # seconds between looks at what it has written
GRACE = 5.0  # for ending by itself, as what has started a server must


def run_until(
    command: Sequence[str],
    deadline: float,
    log: Path,
    look: Callable[[], None],
    *,
    cwd: Path,
    environment: dict[str, str],
) -> int | None:
    """The exit status of a command; None where it still ran at the deadline (`time.monotonic`) and
    was ended with the processes that it had started, within `GRACE` seconds. What it prints goes to
    `log`; `look` is called while it runs and at its end."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, process_group=0,
        )  # fmt: skip
        try:
            while (left := deadline - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(POLL, left))
                look()
            return None
        finally:
            with suppress(ProcessLookupError):  # nothing of its group is left
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            look()
