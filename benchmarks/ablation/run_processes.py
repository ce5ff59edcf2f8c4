"""Runs of an ablation, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks.ablation.ablation_config import Ablation, Run
from benchmarks.ablation.reported import Reported
from benchmarks.ablation.runs import carry_out


def carry_out_all(
    ablation: Ablation,
    chosen: Sequence[Run],
    reported: Reported,
    jobs: int,
    after_each: Callable[[], None],
) -> None:
    """Do what is left of runs, so many at a time, and print what each has. Raises InputError, and
    what `after_each` raises."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # read when a process loads torch
    with processes(jobs) as pool:
        waiting = [pool.submit(carry_out, ablation, one, reported) for one in chosen]
        try:
            for one, future in zip(chosen, waiting, strict=True):
                rows = future.result()["rows"]
                parts = (f"{row['decoding']} {row['task']} {row['right']}" for row in rows)
                print(f"{one.name}: {'; '.join(parts)} right", flush=True)
                after_each()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def processes(jobs: int) -> ProcessPoolExecutor:
    """A process a task, so many at a time: what one leaves in accelerate or torch cannot reach the
    next."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        jobs, mp_context=context, max_tasks_per_child=1, initializer=end_with_parent
    )


def end_with_parent() -> None:
    """Of a process of the pool: end, and save what is trained, where the one that started it was
    killed; else it would train on, and the same command find its folder taken."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
