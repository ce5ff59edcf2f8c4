"""Run one model here, or one in each of several Ray workers.

    with workers(options) as crew:                          # options.workers, options.address
        run = crew.ask(describe)                            # of a model that is loaded elsewhere
        for key, found in crew.map(work, items, 64):        # as they finish, each once
            ...

One worker needs no Ray and imports none. With several, this process reads no weights: it hands out
chunks of items and takes back their results, so that it alone writes. Ray restarts a worker that
dies and gives it the chunk again. They are plain actors: Ray Data starts its own anew for each job,
and tuning, which asks pass after pass, would load the model for each.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from d2f.device import usable_cpus
from d2f.errors import InputError, brief
from decode.cli import load, require_ray

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

CONNECT_SECONDS = 5.0
RESTARTS = 3  # of each worker
Key = TypeVar("Key")
Item = TypeVar("Item")
Found = TypeVar("Found")
Work = Callable[["DiffusionModel", Iterable[tuple[Key, Item]]], Iterator[tuple[Key, Found]]]
"""Yield each item's key with what was found, in any order, each once. The result depends on the
item alone. It crosses to other processes: a function of a module, or a `functools.partial` of one.
"""


@contextmanager
def workers(options: Any) -> Iterator[Crew]:
    """Load the model that a command line asks for, in each of its workers.

    Raises InputError, before any weights are read where Ray cannot be used, and what `load` raises.
    """
    if options.workers == 1:
        yield OneWorker(*load(options), options)
        return
    with ray_session(options.address, options.workers, "--workers", options.device) as each:
        crew = RayWorkers(options, options.workers, *each)
        try:
            yield crew
        finally:
            crew.close()


def chunk_size(batch_size: int, items: int | None = None, workers: int = 1) -> int:
    """Choose how many items to hand out at a time: some batches, since the last requests of a
    chunk run in a batch that is not full, but some items for every worker."""
    many = 4 * batch_size
    return many if items is None else max(1, min(many, -(-items // workers)))


class OneWorker:
    """The model in this process. weights, options: their hash and what `load` made of it."""

    count = 1

    def __init__(self, model: DiffusionModel, weights: str = "", options: Any = None):
        self.model, self._weights, self._options = model, weights, options

    def ask(self, function: Callable[..., Found], *arguments: Any) -> Found:
        """Call ``function(options, model, weights, *arguments)`` where a model is loaded."""
        return function(self._options, self.model, self._weights, *arguments)

    def map(
        self, work: Work[Key, Item, Found], items: Iterable[tuple[Key, Item]], size: int
    ) -> Iterator[tuple[Key, Found]]:
        """Yield each item's key and what `work` found. size: most items that one of several
        workers is given at a time; a single one takes all as it needs them."""
        return work(self.model, items)


class RayWorkers:
    """Start `count` actors with so many cores and GPUs each, in a Ray session.

    Raises InputError where their weights differ or one ends as it loads them, and what `load`
    raises.
    """

    def __init__(self, options: Any, count: int, cores: int, gpus: int):
        import ray

        self.count = count
        actor: Any = ray.remote(
            num_cpus=cores, num_gpus=gpus, max_restarts=RESTARTS, max_task_retries=-1
        )(_Worker)
        self._actors: list[Any] = [actor.remote(options) for _ in range(count)]
        hashes = {self._get(one.ask.remote(_weights)) for one in self._actors}
        if len(hashes) > 1:
            raise InputError(
                f"--model {options.model}: the workers found different weights: expected the same "
                "files on every machine"
            )

    def ask(self, function: Callable[..., Found], *arguments: Any) -> Found:
        """Call a function in one of the workers, as `OneWorker.ask` does."""
        found: Found = self._get(self._actors[0].ask.remote(function, *arguments))
        return found

    def map(
        self, work: Work[Key, Item, Found], items: Iterable[tuple[Key, Item]], size: int
    ) -> Iterator[tuple[Key, Found]]:
        """Yield as `OneWorker.map` does, a chunk at a time. Raises InputError where the workers
        of a chunk died, and what `work` raises."""
        import ray

        rest, idle = iter(items), list(self._actors)
        running: dict[Any, Any] = {}  # result of a chunk: its actor
        while True:
            while idle and (chunk := list(islice(rest, size))):
                actor = idle.pop()
                running[actor.run.remote(work, chunk)] = actor
            if not running:
                return
            (done,), _ = ray.wait(list(running))
            idle.append(running.pop(done))
            yield from self._get(done)

    def close(self) -> None:
        """End the actors."""
        import ray

        for actor in self._actors:
            ray.kill(actor)

    def _get(self, result: Any) -> Any:
        """Wait for a result. Raises what the worker raised, and InputError where it died."""
        import ray

        try:
            return ray.get(result)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise InputError(
                f"a worker died and was restarted {RESTARTS} times, perhaps for want of memory or "
                "without this toolkit on its machine: expected fewer --workers or a smaller "
                f"--batch-size; the same command goes on: {brief(' '.join(str(error).split()))}"
            ) from error


Crew = OneWorker | RayWorkers


class _Worker:
    """Run in a worker's process. The model is loaded when it is first needed."""

    def __init__(self, options: Any):
        self._options = options

    @cached_property
    def _here(self) -> OneWorker:
        return OneWorker(*load(self._options), self._options)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._here.ask(function, *arguments)

    def run(self, work: Any, items: list[Any]) -> list[Any]:
        return list(work(self._here.model, items))


def _weights(options: Any, model: DiffusionModel, weights: str) -> str:
    return weights


@contextmanager
def ray_session(
    address: str | None,
    workers: int,
    flag: str,
    device: str | None = None,
    *,
    gpus: int | None = None,
    log_to_driver: bool = False,
) -> Iterator[tuple[int, int]]:
    """Start or join Ray, and yield the cores and GPUs that each worker may take; Ray gives a worker
    as many threads of torch (OMP_NUM_THREADS, unless that is set).

    Args:
        address: of a cluster; default RAY_ADDRESS. Without either Ray is started on 127.0.0.1 and
            stopped at the end. A process that has called `ray.init` keeps its own.
        workers: how many. flag: what asked for them, for errors.
        device: of a worker's model. gpus: that each needs; default one where the device is a GPU.
        log_to_driver: show on standard error what the workers write.

    Raises InputError where Ray is not installed, for a cluster that is not there, and for more
    workers than there is room for.
    """
    require_ray()
    address = address or os.environ.get("RAY_ADDRESS") or "local"

    def divided(nodes: Sequence[Mapping[str, float]]) -> tuple[int, int]:
        each = gpus
        if each is None:  # by default a model is on a GPU wherever there is one
            there = any(node.get("GPU", 0) for node in nodes)
            each = int(there if device is None else device != "cpu")
        return share(nodes, workers, flag, each), each

    settings: dict[str, Any] = {"log_to_driver": log_to_driver, "logging_level": logging.ERROR}
    if address == "local":
        here = {"CPU": usable_cpus(), "GPU": 0}
        if gpus or device != "cpu":
            import torch

            here["GPU"] = torch.cuda.device_count()
        divided([here])  # an error before Ray takes its seconds to start
        settings |= {"num_cpus": here["CPU"], "include_dashboard": False}
        if "ray" not in sys.modules:
            # Read when Ray is imported: without it, it would listen on other addresses, too.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # the default, said each time
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    joined = ray.is_initialized()
    try:
        if not joined:
            try:
                if address not in ("local", "auto"):
                    _check_there(address)
                ray.init(address, **settings)
            except (OSError, OverflowError, RuntimeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise InputError(f"no Ray cluster can be used at {address}: {reason}") from error
        yield divided([node["Resources"] for node in ray.nodes() if node["Alive"]])
    finally:  # also of a Ctrl-C while it starts
        if not joined:
            ray.shutdown()


def share(there: Sequence[Mapping[str, float]], workers: int, flag: str, gpus: int = 0) -> int:
    """Return the most whole cores that each worker can have, each on one node with its GPUs.

    Two nodes of 8 cores hold 3 workers of 4 cores (two on one, one on the other), none with more.
    Raises InputError where a worker would have none.
    """

    def held(cores: int) -> int:
        needed = {"CPU": cores, "GPU": gpus} if gpus else {"CPU": cores}
        return int(sum(min(node.get(k, 0) // n for k, n in needed.items()) for node in there))

    if held(1) < workers:
        what = f"cores with {gpus} GPU each" if gpus else "cores"
        raise InputError(f"{flag} {workers}: there are {what} for {held(1)}")
    most = int(max(node.get("CPU", 0) for node in there))
    return max(cores for cores in range(1, most + 1) if held(cores) >= workers)


def _check_there(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("expected HOST:PORT, ray://HOST:PORT or auto")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
