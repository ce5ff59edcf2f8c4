"""What a running training listens for: a loss that is no longer a number, and a request to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

_NEVER = torch.iinfo(torch.int64).max


class NonFiniteLossError(FloatingPointError):
    """The loss or its gradient became NaN or infinite; nothing of it was saved."""


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


class StopRequest:
    """Whether SIGTERM has reached any of the processes; all of them give the same answer."""

    def __init__(self, processes: int):
        self._received = False
        # A group on the CPU: asking waits for the other processes, not for the device.
        self._group = dist.new_group(backend="gloo") if processes > 1 else None

    def asked(self) -> bool:
        """Called by all processes at the end of a step."""
        if self._group is None:
            return self._received
        flag = torch.tensor(int(self._received))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM asks to stop instead of ending the process, in the main thread.

        The group is given back at the end: left to the garbage collector, its threads can wait for
        the interpreter's lock, which waits for them.
        """
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, self._receive) if is_main else None
        try:
            yield
            if self._group is not None:
                dist.barrier(group=self._group)
        finally:
            if is_main:
                signal.signal(signal.SIGTERM, before)
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True


def ranges(numbers: list[int]) -> str:
    """``[3, 4, 5, 9]`` as ``3-5, 9``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
