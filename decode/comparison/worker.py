"""A process of its own for each local entry, or for several that share a model: its memory is its
own, and one that is not being measured holds no thread of another."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from d2f.errors import InputError
from d2f.quiet import quiet
from decode.comparison import process_memory
from decode.comparison.answers import Run
from decode.comparison.comparison_config import Ours, Transformers
from decode.comparison.workload import Workload

STOP_SECONDS = 10.0


class WorkerError(InputError):
    """An entry whose process failed; says what it said."""


Local = Ours | Transformers


class WorkerContestant:
    """One entry of a worker, as `measure` sees it."""

    def __init__(self, worker: Worker, entry: Local):
        self.entry = entry
        self.worker = worker
        self.facts: dict[str, Any] = worker.facts[entry.name]

    def run(self, workload: Workload, count: int, concurrency: int) -> Run:
        """One run in the process. Raises WorkerError."""
        return self.worker.run(self.entry.name, workload, count, concurrency)


class Worker:
    """The parent's end of a process for one entry, or several that share a model: it starts the
    process, waits until the model is loaded, and asks for one run after the other.

    entries: those that the process serves, all with the first one's model. facts: what the report
    says of each, by name. verbose: the process shows what other libraries say.
    """

    def __init__(self, entries: Sequence[Local], workloads: list[Workload], verbose: bool = False):
        self.entry = entries[0]
        # Spawned: a forked process would begin with this one's pages in the memory that is
        # measured, and could not use CUDA where this one has.
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, entries, workloads, verbose), daemon=True
        )
        self._process.start()
        # The child has its own copy; were this one open, its death would not end `recv`.
        other.close()
        self.facts: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Worker:
        try:
            self.facts = self._receive()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def run(self, entry: str, workload: Workload, count: int, concurrency: int) -> Run:
        """One run of one of its entries. Raises WorkerError."""
        self._connection.send((entry, workload.name, count, concurrency))
        run: Run = self._receive()
        return run

    def stop(self) -> None:
        # `_answer` waits in `recv` between runs, meets the end of the pipe there, and returns.
        self._connection.close()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            # The pipe closes a little before the process has its exit status.
            self._process.join(STOP_SECONDS)
            raise WorkerError(
                f"entry {self.entry.name}: its process ended with status "
                f"{self._process.exitcode} (-9: killed, often for memory)"
            ) from error
        # Errors cross the pipe as text: exceptions of other libraries may not unpickle here.
        if kind == "input error":
            raise InputError(value)
        if kind == "error":
            raise WorkerError(f"entry {self.entry.name} failed:\n{value}")
        return value


def _serve(
    connection: Connection, entries: Sequence[Local], workloads: list[Workload], verbose: bool
) -> None:
    """The process: load, then answer requests for runs until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    # A broken pipe: it has gone, nobody waits for an answer.
    with contextlib.suppress(BrokenPipeError), quiet(verbose):
        _answer(connection, entries, workloads)


def _answer(connection: Connection, entries: Sequence[Local], workloads: list[Workload]) -> None:
    current = entries[0].name
    try:
        import torch

        runners: dict[str, Any] = {}
        for entry in entries:
            current = entry.name
            # All but the first take the first one's model: it is in memory once.
            runners[current] = _runner(entry, workloads, next(iter(runners.values()), None))
        connection.send(("done", {name: runner.facts for name, runner in runners.items()}))
        while True:
            try:
                current, name, count, concurrency = connection.recv()
            except EOFError:
                return
            runner = runners[current]
            cuda = torch.cuda.is_available() and runner.facts["device"] != "cpu"
            # The peak counts from what is held when a run begins (the model), not from loading it.
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            else:
                process_memory.reset_peak([os.getpid()])
            run = runner.run(name, count, concurrency)
            run.peak_bytes = (
                torch.cuda.max_memory_allocated()
                if cuda
                else process_memory.peak_bytes([os.getpid()])
            )
            connection.send(("done", run))
    except InputError as error:
        connection.send(("input error", f"entry {current}: {error}"))
    # Not an error to send: the pipe that would take it is the one that broke.
    except BrokenPipeError:
        raise
    except Exception:  # whatever it is, the parent shows it
        connection.send(("error", traceback.format_exc()))


def _runner(entry: Local, workloads: list[Workload], before: Any) -> Any:
    """The runner of an entry; before: another one of the process, whose model it takes."""
    if isinstance(entry, Ours):
        from decode.comparison.ours import OursRunner

        return OursRunner(entry, workloads, None if before is None else before.model)
    from decode.comparison.hf import TransformersRunner

    return TransformersRunner(entry, workloads)
