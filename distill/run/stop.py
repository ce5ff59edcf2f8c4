"""A request to stop a running training, which all of its processes answer at the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch
import torch.distributed as dist


class StopRequest:
    """Whether SIGTERM, SIGHUP (the terminal is gone) or SIGINT (Ctrl-C) has reached any of the
    processes; all of them give the same answer. A second SIGINT is a KeyboardInterrupt at once.

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
        """The number of the signal that any process has received, 0 where none has. All processes
        call this at the end of each step, and all get the same answer."""
        if self._group is None:
            return self._received
        flag = torch.tensor(self._received)
        # The signal that any process has had; all leave the loop after the same step, else those
        # that go on would wait for gradients for ever.
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return int(flag)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The signals ask to stop instead of ending the process, in the main thread.

        The group is given back at the end: left to the garbage collector, its threads can wait for
        the interpreter's lock, which waits for them.
        """
        # Python lets only the main thread set handlers; in another one none is set.
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self._receive) for number in _asking() if is_main}
        try:
            yield
            # No process may give the group back while another still asks it.
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
                said = b"\nstopping after this step, which is saved; Ctrl-C again: at once\n"
                with suppress(OSError):  # nobody may read it any more
                    os.write(2, said)
        elif number == signal.SIGINT and now - self._first > self.PASSED_ON:
            raise KeyboardInterrupt
        self._received = max(self._received, number)


def _asking() -> list[signal.Signals]:
    """The signals that ask to stop. One that `nohup` has set to be ignored stays so."""
    asking = [signal.SIGTERM, signal.SIGINT]
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        asking.append(hangup)
    return asking
