"""What a run shows on its way: a bar on a terminal, else lines, and at its end what to do with the
result."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from d2f.checkpoint import parse
from d2f.files import GrowingFile, says_what_is_kept, write_beside
from distill.config import TrainConfig

APART = 30.0  # seconds between lines, at least


class Progress:
    """Shows steps `done` to `steps` on the process that is shown; the others count nothing.

    Where standard error is no terminal, `report` prints the first values that it gets, then those
    of at least `APART` seconds later, and the last.
    """

    def __init__(
        self, done: int, steps: int, *, shown: bool, clock: Callable[[], float] = time.monotonic
    ):
        self.start, self.steps, self.clock = done, steps, clock
        self.began = clock()
        self.bar = tqdm(total=steps, initial=done, disable=not shown or not sys.stderr.isatty())
        self._prints = shown and self.bar.disable
        self._next = -float("inf")

    def step(self) -> None:
        """A step is done."""
        self.bar.update()

    def report(self, step: int, loss: float, rate: float, *, last: bool) -> None:
        """Show what `step` (counted from 1) gave; rate: of learning."""
        self.bar.set_postfix(loss=f"{loss:.4f}")
        now = self.clock()
        if not self._prints or (now < self._next and not last):
            return
        # The first report is printed at once, as `_next` begins before any time.
        self._next = now + APART
        speed = (step - self.start) / max(now - self.began, 1e-9)
        left = duration((self.steps - step) / speed)
        print(
            f"step {step:,} of {self.steps:,}: loss {loss:.4f}, lr {rate:.2e}, "
            f"{speed:.3g} steps/s, {left} left",
            flush=True,
        )

    def say(self, text: str) -> None:
        """Show a line that is no step's."""
        with self.bar.external_write_mode():
            print(text, flush=True)

    def close(self) -> None:
        self.bar.close()


def duration(seconds: float) -> str:
    """As a person says it: ``42 s``, ``7 min``, ``3 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def result_text(config: TrainConfig, folders: list[str]) -> str:
    """Where a finished run's result is, and the command that decodes with it."""
    model = shlex.quote(f"{config.output}/model")
    prompt = "" if config.data.tasks is not None else ' --prompt "..."'
    others = "".join(f", {config.output}/{name}" for name in folders if name != "model")
    return (
        f"finished after {config.steps:,} steps: {config.output}/model{others}\n"
        f"to decode with it: python -m decode.pipeline --model {model}{prompt}"
    )


def extension_text(config: TrainConfig, more: dict[str, int]) -> str:
    """What more steps mean for the rate."""
    schedule = config.optimizer.schedule
    curve = f"the {schedule} of {more['to']:,} steps" if schedule == "cosine" else "constant"
    return (
        f"extended at step {more['step']:,} from {more['from']:,} to {more['to']:,} steps: "
        f"from there on the learning rate is {curve}"
    )


# The log of a run: a line of JSON at a time, whole after a kill or a full disk.


class Log:
    """Appends to a file. Raises OutputError where it cannot be written."""

    def __init__(self, path: Path):
        self.path = path
        with self._kept():
            self._file = GrowingFile(path)

    def write(self, values: dict[str, Any]) -> None:
        with self._kept():
            self._file.write(json.dumps(values) + "\n")

    def close(self) -> None:
        self._file.close()

    def _kept(self) -> contextlib.AbstractContextManager[None]:
        kept = "the same command goes on from the newest checkpoint"
        return says_what_is_kept(self.path, kept)


def keep_lines(path: Path, step: int) -> None:
    """Keep the lines of a log up to a step; a torn line is dropped too."""
    if path.is_file():
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            # A line that a kill cut short is not JSON.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if parse(line, nan=True)["step"] <= step:
                    kept.append(line + "\n")
        write_beside(path, "".join(kept))
