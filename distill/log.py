"""Show a run's progress on the screen and keep its values in log.jsonl."""

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

from d2f.files import GrowingFile, says_what_is_kept, write_beside
from distill.config import TrainConfig

CURVE = "loss.png"
APART = 30.0  # seconds between printed lines, at least


class Progress:
    """Show steps `done` to `steps`: a bar on a terminal, elsewhere lines: the first, those at least
    `APART` seconds after the one before, and the last."""

    def __init__(
        self, done: int, steps: int, *, shown: bool, clock: Callable[[], float] = time.monotonic
    ):
        self.start, self.steps, self.clock, self.began = done, steps, clock, clock()
        self.bar = tqdm(total=steps, initial=done, disable=not shown or not sys.stderr.isatty())
        self._prints, self._next = shown and self.bar.disable, -float("inf")

    def report(self, step: int, loss: float, over: int, rate: float, *, last: bool) -> None:
        """Show what `step` (counted from 1) gave. loss: the mean of the last `over` steps."""
        self.bar.set_postfix_str(f"loss={loss:.4f} (mean of {over})")
        now = self.clock()
        if not self._prints or (now < self._next and not last):
            return
        self._next = now + APART
        speed = (step - self.start) / max(now - self.began, 1e-9)
        print(
            f"step {step:,} of {self.steps:,}: loss {loss:.4f} (mean of {over} steps), "
            f"lr {rate:.2e}, {speed:.3g} steps/s, "
            f"{tqdm.format_interval((self.steps - step) / speed)} left",
            flush=True,
        )

    def say(self, text: str) -> None:
        with self.bar.external_write_mode():
            print(text, flush=True)


def result_text(config: TrainConfig, folders: list[str]) -> str:
    """Say where a finished run's result is, and the command that decodes with it."""
    first = "model" if "model" in folders else "adapter"
    model = shlex.quote(f"{config.output}/{first}")
    prompt = "" if config.data.tasks is not None else ' --prompt "..."'
    others = "".join(f", {config.output}/{name}" for name in folders if name != first)
    return (
        f"finished after {config.steps:,} steps: {config.output}/{first}{others}\n"
        f"to decode with it: d2f decode --model {model}{prompt}"
    )


def extension_text(config: TrainConfig, more: dict[str, int]) -> str:
    """Say what more steps mean for the learning rate."""
    schedule = config.optimizer.schedule
    curve = f"the {schedule} of {more['to']:,} steps" if schedule == "cosine" else "constant"
    return (
        f"extended at step {more['step']:,} from {more['from']:,} to {more['to']:,} steps: "
        f"from there on the learning rate is {curve}"
    )


class Log:
    """Append values to a run's log, a line of JSON each, with the seconds that the run has trained.

    What a killed run wrote after step `done` comes again: it is dropped. Raises OutputError where
    the log cannot be written.
    """

    def __init__(self, path: Path, done: int = 0):
        lines = [values for values in read_log(path) if values["step"] <= done]
        write_beside(path, "".join(json.dumps(values) + "\n" for values in lines))
        self.began = time.monotonic() - (lines[-1].get("seconds", 0.0) if lines else 0.0)
        self.path = path

    def write(self, values: dict[str, Any]) -> None:
        line = values | {"seconds": round(time.monotonic() - self.began, 1)}
        kept = "the same command goes on from the newest checkpoint"
        with says_what_is_kept(self.path, kept), GrowingFile(self.path) as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, none where there is no file; a line that a kill cut short is left
    out."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def draw_curve(log: Path) -> None:
    """Draw the loss and its running mean beside a log as a picture, if matplotlib is installed."""
    if not (lines := read_log(log)):  # a run that was stopped before the first
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    window = max(1, len(lines) // 20)
    parts = [losses[max(0, end - window) : end] for end in range(1, len(losses) + 1)]
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(steps, losses, color="0.75", label="loss")
    axes.plot(steps, [sum(p) / len(p) for p in parts], label=f"mean of {window} logged steps")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(log.parent / CURVE, dpi=120, bbox_inches="tight")
