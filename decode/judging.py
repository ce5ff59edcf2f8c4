"""Judge responses in processes of their own, several at a time.

A judge may hang, or take its process down: its response is then wrong, and the others are judged.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from d2f.device import usable_cpus
from d2f.errors import InputError
from d2f.tasks import Problem, Task

Asked = tuple[Task, Problem, str]
"""A task, a problem of it, and the text of a response."""
MOST_BY_DEFAULT = 8


class JudgePool:
    """Judge in at most `jobs` processes. Tasks without `judging_seconds` are judged in this one.

    failed: judgements that ended without a verdict; they count as wrong.
    """

    def __init__(self, jobs: int):
        self.jobs, self.failed = jobs, 0
        self._pool: ProcessPoolExecutor | None = None

    def right(self, asked: Sequence[Asked]) -> list[bool]:
        """Return the verdicts in order. Raises InputError where a judge raises."""
        slow = {n: one for n, one in enumerate(asked) if one[0].judging_seconds is not None}
        found = self._judge(slow)
        # A process that dies breaks its pool. Judging what it left one by one tells which it was.
        for number in slow.keys() - found.keys():
            alone = self._judge({number: slow[number]})
            self.failed += not alone
            found[number] = alone.get(number, False)
        for number, (task, problem, text) in enumerate(asked):
            if number not in slow:
                found[number] = task.right(problem, text)
        return [found[number] for number in range(len(asked))]

    def _judge(self, asked: Mapping[int, Asked]) -> dict[int, bool]:
        """Return the verdicts there are before a process dies."""
        if not asked:
            return {}
        if self._pool is None:
            # Spawned: a forked process would hold this one's threads and CUDA. The parent decides
            # what an interrupt ends.
            spawn, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
            self._pool = ProcessPoolExecutor(self.jobs, spawn, signal.signal, ignore)
        futures: dict[int, Future[bool]] = {}
        try:
            for number, one in asked.items():
                futures[number] = self._pool.submit(_verdict, *one)
            return {number: future.result() for number, future in futures.items()}
        except BrokenProcessPool:
            self._close()
            return {n: f.result() for n, f in futures.items() if f.done() and not f.exception()}
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        if self._pool is not None:
            processes = dict(self._pool._processes)  # Python 3.14 has terminate_workers()
            self._pool.shutdown(wait=False, cancel_futures=True)
            for process in processes.values():
                process.terminate()
                process.join()
            self._pool = None

    def __enter__(self) -> JudgePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()


def default_jobs() -> int:
    """Return the number of usable processors, at most 8: each process is a Python of its own."""
    return min(usable_cpus(), MOST_BY_DEFAULT)


def _verdict(task: Task, problem: Problem, text: str) -> bool:
    # A thread below Python: it also ends what hangs in one long operation of C.
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(task.judging_seconds or 0, exit=True, file=nowhere)
        try:
            return task.right(problem, text)
        except Exception as error:  # as text: it may not unpickle in the parent
            what = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            raise InputError(f"{task.name}: {what}{error}") from None
        finally:
            faulthandler.cancel_dump_traceback_later()
