"""What a running training listens for: a loss or weights that are no longer numbers, and a request
to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from distill.run.sharding import own_part

_NEVER = torch.iinfo(torch.int64).max


class NonFiniteLossError(FloatingPointError):
    """The loss, its gradient, the weights or AdamW's moments became NaN or infinite; nothing of it
    was saved."""


class FiniteWatch:
    """Remembers the first step whose loss or gradient was not finite.

    `see` costs a few operations on the device and never waits for it; `check` does, and is called
    before anything is logged or saved.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.first = torch.full((1,), _NEVER, dtype=torch.int64, device=accelerator.device)
        self.samples: dict[int, list[int]] = {}  # of the steps since the last check

    def see(self, step: int, samples: list[int], *values: Tensor) -> None:
        """Take a step's loss (and gradient norm), made from these sample indexes."""
        self.samples[step] = samples
        fine = torch.stack([value.detach().float().isfinite() for value in values]).all()
        self.first = torch.where(fine, self.first, self.first.clamp(max=step))

    def check(self) -> None:
        """Raise NonFiniteLossError, on all processes, if any process saw such a step."""
        step = int(self.accelerator.gather(self.first).min())
        if step != _NEVER:
            raise NonFiniteLossError(
                f"the loss or its gradient is not finite at step {step} "
                f"(samples {ranges(self.samples[step])}); nothing of it was saved"
            )
        self.samples.clear()

    def check_state(
        self, step: int, parameters: Mapping[str, nn.Parameter], optimizer: Any
    ) -> None:
        """Raise NonFiniteLossError, on all processes, where the weights after `step` or their
        moments are not finite in any process. Called before they are saved or decoded with."""
        tensors = {
            (name, key): own_part(value)
            for name, parameter in parameters.items()
            for key, value in {"weight": parameter, **optimizer.state.get(parameter, {})}.items()
            if isinstance(value, Tensor)
        }
        device = self.accelerator.device
        fine = torch.stack([value.isfinite().all().to(device) for value in tensors.values()])
        first = torch.where(fine.all(), _NEVER, (~fine).int().argmax())[None]
        worst = int(self.accelerator.gather(first).min())
        if worst != _NEVER:
            name, key = list(tensors)[worst]
            raise NonFiniteLossError(
                f"{name} ({key}) is not finite after step {step}, whose loss and gradient are; "
                "a lower optimizer.lr may help; nothing of it was saved"
            )


class StopRequest:
    """Whether SIGTERM or SIGINT (Ctrl-C) has reached any of the processes; all of them give the
    same answer. A second SIGINT is a KeyboardInterrupt at once.

    says: whether this process tells of it. A launcher passes on the SIGINT that the terminal has
    sent to all processes already: what comes within `PASSED_ON` seconds is the same one.
    """

    PASSED_ON = 1.0

    def __init__(self, processes: int, *, says: bool = True):
        self._received, self._first = 0, 0.0
        self._says = says
        # A group on the CPU: asking waits for the other processes, not for the device.
        self._group = dist.new_group(backend="gloo") if processes > 1 else None

    def asked(self) -> int:
        """The signal, 0 where there was none. Called by all processes at the end of a step."""
        if self._group is None:
            return self._received
        flag = torch.tensor(self._received)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return int(flag)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The signals ask to stop instead of ending the process, in the main thread.

        The group is given back at the end: left to the garbage collector, its threads can wait for
        the interpreter's lock, which waits for them.
        """
        is_main = threading.current_thread() is threading.main_thread()
        asking = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        before = {number: signal.signal(number, self._receive) for number in asking}
        try:
            yield
            if self._group is not None:
                dist.barrier(group=self._group)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._received:
            self._received, self._first = number, now
            if self._says and number == signal.SIGINT:  # print may be under way: it cannot be used
                os.write(2, b"\nstopping after this step, which is saved; Ctrl-C again: at once\n")
        elif number == signal.SIGINT and now - self._first > self.PASSED_ON:
            raise KeyboardInterrupt
        self._received = max(self._received, number)


def ranges(numbers: list[int]) -> str:
    """``[3, 4, 5, 9]`` as ``3-5, 9``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
