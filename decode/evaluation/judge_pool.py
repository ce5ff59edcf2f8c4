"""Judging in processes of its own, several responses at a time.

    decoding --- finished responses ---> JudgePool --- one each ---> process, process, process
                                             <--- right or wrong, in the order they came in

A process is there for what one response may do to it: a judge that hangs or takes its process down
has judged that response wrong, and the next one finds a new process.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from d2f.errors import InputError
from d2f.tasks import Problem, Task
from decode.cluster.ray_session import cores_here

Asked = tuple[Task, Problem, str]
"""A task, a problem of it, and the text of a response."""
MOST_BY_DEFAULT = 8
STOP_SECONDS = 2.0


def default_jobs() -> int:
    """As many as there are cores, some at most: each is a Python of its own."""
    return min(cores_here(), MOST_BY_DEFAULT)


class JudgePool:
    """At most `jobs` processes, started when they are first needed and ended on exit. Tasks without
    `judging_seconds` are judged in this process."""

    def __init__(self, jobs: int):
        self.jobs = jobs
        self.failed = 0
        """Judgements that ended without a verdict; they count as wrong."""
        self._idle: list[_Process] = []

    def __enter__(self) -> JudgePool:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._idle:
            self._idle.pop().stop()

    def right(self, asked: Sequence[Asked]) -> list[bool]:
        """The verdicts, in the order of what is asked. Raises InputError where a judge raises."""
        found: dict[int, bool] = {}
        todo: deque[int] = deque()
        for number, (task, problem, text) in enumerate(asked):
            if task.judging_seconds is None:
                found[number] = task.right(problem, text)
            else:
                todo.append(number)
        busy: dict[Connection, tuple[_Process, int]] = {}
        try:
            while todo or busy:
                while todo and len(busy) < self.jobs:
                    process = self._free()
                    busy[process.connection] = process, todo[0]
                    process.ask(asked[todo.popleft()])
                first = min(process.deadline for process, _ in busy.values())
                ready = wait(list(busy), max(0.0, first - time.monotonic()))
                for connection, (process, number) in list(busy.items()):
                    if connection not in ready and time.monotonic() < process.deadline:
                        continue
                    verdict = process.verdict() if connection in ready else None
                    del busy[connection]
                    found[number] = bool(verdict)
                    if verdict is None:
                        self.failed += 1
                        process.stop()
                    else:
                        self._idle.append(process)
        finally:  # interrupted, or a judge raised
            for process, _ in busy.values():
                process.stop()
        return [found[number] for number in range(len(asked))]

    def _free(self) -> _Process:
        """One that waits, else a new one; one that ended meanwhile would fail what it is asked."""
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            process.stop()
        return _Process()


class _Process:
    """The parent's end of one."""

    def __init__(self) -> None:
        # Spawned: a forked one would hold this one's threads and CUDA.
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()  # the child has its own: were this one open, its death would go unseen
        self.deadline = 0.0

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def ask(self, asked: Asked) -> None:
        with suppress(OSError):  # it has ended, which `verdict` will find
            self.connection.send(asked)
        self.deadline = time.monotonic() + (asked[0].judging_seconds or 0.0)

    def verdict(self) -> bool | None:
        """What it said, None where it has ended. Raises InputError."""
        try:
            said: bool | str = self.connection.recv()
        except (EOFError, OSError):
            return None
        if isinstance(said, str):
            raise InputError(said)
        return said

    def stop(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection) -> None:
    """The process: judge until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, _leave)
    with suppress(EOFError, OSError):
        while True:
            connection.send(_verdict(*connection.recv()))


def _verdict(task: Task, problem: Problem, text: str) -> bool | str:
    try:
        return task.right(problem, text)
    except Exception as error:  # crosses the pipe as text: it may not unpickle there
        what = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        return f"{task.name}: {what}{error}"


def _leave(*_: Any) -> None:
    """What it has started, and its files, are cleared away on the way out."""
    sys.exit(1)
