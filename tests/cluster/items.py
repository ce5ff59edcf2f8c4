"""What workers of the tests do; a module of its own, as it crosses to other processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from d2f.errors import NonFiniteLogitsError


def process(options, model, weights):
    return os.getpid()


def doubled(model, items, *, deaths: Path, kills: dict[int, int]):
    """Twice each item. kills: at which items the process is killed, so many times; `deaths` is a
    folder that counts them."""
    for key, item in items:
        for number in range(kills.get(item, 0)):
            if not (deaths / f"{item}-{number}").exists():
                (deaths / f"{item}-{number}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        yield key, 2 * item


def failing(model, items):
    for key, item in items:
        if item == 3:
            raise NonFiniteLogitsError(f"item {item}")
        yield key, item


class Deadly:
    """What ends the process that it comes to."""

    def __reduce__(self):
        return os._exit, (1,)
