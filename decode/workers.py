"""Work beyond one process: Ray started or joined, and workers on it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from d2f.device import parse_device
from d2f.errors import InputError, brief
from decode.cli import load, require_ray

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

# Ray, started here or joined where it runs, and what each worker may have of it.
#
#     with ray_session(None, 4, "--workers") as cores:    # on 16 cores: 4 each
#         ray.remote(Work).options(num_cpus=cores)
#
# Ray gives a worker as many threads of torch as it has cores (OMP_NUM_THREADS, unless that is set).

CONNECT_SECONDS = 5.0


@contextmanager
def ray_session(address: str | None, workers: int, option: str, *, gpus: int = 0) -> Iterator[int]:
    """Within it `ray` is usable; gives the cores that each of so many workers may take. gpus: that
    each needs. option: what asked for the workers, in errors. address: of a cluster, by default
    RAY_ADDRESS; without either Ray is started here, on 127.0.0.1, and stopped at the end. In a
    process that has called `ray.init`, that one is used and goes on.

    Raises InputError where Ray is not installed, for a cluster that is not there, and for more
    workers than there is room for.
    """
    require_ray()
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    here = [{"CPU": cores_here(), "GPU": _gpus_here() if gpus else 0}]
    if address == "local":
        cores = share(here, workers, option, gpus)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local" and "ray" not in sys.modules:
        # Read when Ray is imported: without it, it would listen on this machine's other addresses.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # the default, which said so each time
    import ray

    if ray.is_initialized():
        yield share(nodes(), workers, option, gpus)
        return
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        settings |= {"num_cpus": here[0]["CPU"], "include_dashboard": False}
    else:
        _check_there(address)
    try:
        try:
            ray.init(address, **settings)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"no Ray cluster can be used at {address}: {reason}") from error
        yield cores if address == "local" else share(nodes(), workers, option, gpus)
    finally:  # also of a Ctrl-C while it starts
        ray.shutdown()


def share(there: Sequence[Mapping[str, float]], workers: int, option: str, gpus: int = 0) -> int:
    """Most whole cores that each of so many workers can have, each on one node with its GPUs.
    Raises InputError where a worker would have none.

    Two nodes of 8 cores hold 3 workers of 4 cores (two on one, one on the other), none with more.
    """

    def held(cores: int) -> int:
        room = [
            min(node.get(what, 0) // each for what, each in (("CPU", cores), ("GPU", gpus)) if each)
            for node in there
        ]
        return int(sum(room))

    if held(1) < workers:
        what = f"cores with {gpus} GPU each" if gpus else "cores"
        raise InputError(f"{option} {workers}: there are {what} for {held(1)}")
    most = int(max(node.get("CPU", 0) for node in there))
    return max(cores for cores in range(1, most + 1) if held(cores) >= workers)


def nodes() -> list[Mapping[str, float]]:
    """What each machine of the cluster has (CPU, GPU), in a session."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def has_gpus() -> bool:
    """Whether a machine of the cluster has any, in a session."""
    return any(node.get("GPU", 0) for node in nodes())


def cores_here() -> int:
    """Those that this process may use."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return there or 1


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def _check_there(address: str) -> None:
    """Raise InputError where nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit():
        raise InputError(
            f"a Ray cluster: expected HOST:PORT, ray://HOST:PORT or auto, got {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray cluster can be used at {address}: {error}") from error


# Models that work on many items: one here, or one in each of several Ray workers.
#
#     with workers(options) as crew:                          # options.workers, options.address
#         run = crew.ask(describe)                            # of a model that is loaded elsewhere
#         for key, found in crew.spread(work, items, 64):     # as they finish, each once
#             ...
#
# A crew of one needs no Ray and imports none. With several, this process reads no weights: it hands
# out chunks of items and takes each result as it is there, so who writes them writes alone, as with
# one. A worker that dies is replaced, and what it had not answered yet is handed out once more.
#
# Plain Ray actors and not Ray Data: `map_batches` starts its actors anew for each job, and tuning,
# which asks pass after pass, would load the model for each of them; its rows come a block at a
# time,
# when a kill has lost the block; and it has readers of its own, where `d2f/data.py` already
# reads what the commands take by number, with a digest that a resumed run is held to.

Key = TypeVar("Key")
Item = TypeVar("Item")
Found = TypeVar("Found")
Work = Callable[["DiffusionModel", Iterable[tuple[Key, Item]]], Iterator[tuple[Key, Found]]]
"""What a worker does: each item's key with what was found, in any order, each once. It depends on
the item alone and not on those beside it. With several workers it crosses to another process: a
function of a module, or a `functools.partial` of one."""
MOST_DEATHS = 2  # of workers, over one chunk


def chunk_size(batch_size: int, items: int | None = None, workers: int = 1) -> int:
    """Items to hand out at a time: some batches, as the last requests of a chunk run in a batch
    that is not full; fewer where some worker would have none."""
    many = 8 * batch_size
    return many if items is None else max(1, min(many, -(-items // workers)))


@dataclass
class OneWorker:
    """The model in this process. weights, options: their hash and with what `load` made it, for
    `ask`."""

    model: DiffusionModel
    weights: str = ""
    options: Any | None = None
    count: int = 1

    def ask(self, function: Callable[..., Found], *arguments: Any) -> Found:
        """What ``function(options, model, weights, *arguments)`` gives where a model is loaded."""
        return function(self.options, self.model, self.weights, *arguments)

    def spread(
        self, work: Work[Key, Item, Found], items: Iterable[tuple[Key, Item]], size: int
    ) -> Iterator[tuple[Key, Found]]:
        """Each item's key and what `work` found, as it is found. size: most items that a worker is
        given at a time; one worker is given all, and takes them as it needs them."""
        return work(self.model, items)


class RayWorkers:
    """`count` workers with so many cores and GPUs each, in a Ray session. Raises InputError where
    their weights differ or one ends as it loads them, and what `load` raises."""

    def __init__(self, options: Any, count: int, cores: int, gpus: int):
        import ray

        self._ray: Any = ray
        self.count = count
        self._make = lambda: (
            self._ray.remote(_Worker).options(num_cpus=cores, num_gpus=gpus).remote(options)
        )
        self._actors = [self._make() for _ in range(count)]
        hashes = {self._said(actor, _weights) for actor in self._actors}
        if len(hashes) > 1:
            raise InputError(
                f"--model {options.model}: the workers found different weights: expected the same "
                "files on every machine"
            )

    def ask(self, function: Callable[..., Found], *arguments: Any) -> Found:
        """As of `OneWorker`, in one of the workers."""
        answer: Found = self._said(self._actors[0], function, *arguments)
        return answer

    def spread(
        self, work: Work[Key, Item, Found], items: Iterable[tuple[Key, Item]], size: int
    ) -> Iterator[tuple[Key, Found]]:
        """As of `OneWorker`, in all workers. Raises InputError where a chunk's workers died twice,
        and what `work` raises."""
        rest, again = iter(items), deque[_Chunk]()
        idle = [*self._actors]
        running: list[tuple[Any, Any, _Chunk]] = []  # results, actor, what is missing
        while True:
            while (
                idle
                and (chunk := again.popleft() if again else _Chunk(dict(islice(rest, size)))).left
            ):
                actor = idle.pop()
                stream = actor.run.options(num_returns="streaming")
                running.append((stream.remote(work, list(chunk.left.items())), actor, chunk))
            if not running:
                return
            ready, _ = self._ray.wait([results for results, _, _ in running], num_returns=1)
            place = next(i for i, (results, _, _) in enumerate(running) if results is ready[0])
            results, actor, chunk = running[place]
            try:
                key, found = self._get(next(results))
            except StopIteration:
                idle.append(actor)
                del running[place]
            except self._ray.exceptions.RayError as error:  # it died, or its machine
                del running[place]
                if chunk.left:
                    again.append(chunk.after_death(error))
                idle.append(self._replace(actor))
            else:
                del chunk.left[key]
                yield key, found

    def close(self) -> None:
        """End them."""
        for actor in self._actors:
            self._ray.kill(actor)

    def _replace(self, dead: Any) -> Any:
        self._ray.kill(dead)  # where it is only out of reach
        self._actors[self._actors.index(dead)] = actor = self._make()
        return actor

    def _said(self, actor: Any, function: Callable[..., Found], *arguments: Any) -> Found:
        """What a worker answers to `_Worker.ask`. Raises InputError where it has ended."""
        try:
            said: Found = self._get(actor.ask.remote(function, *arguments))
        except self._ray.exceptions.RayError as error:
            raise InputError(
                "a worker ended before it had answered anything, perhaps for want of memory or "
                f"without this toolkit on its machine: {_reason(error)}"
            ) from error
        return said

    def _get(self, reference: Any) -> Any:
        """What a worker gave. Raises what it raised, as it would have been raised here."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None


Crew = OneWorker | RayWorkers


@dataclass
class _Chunk:
    """Items that one worker was given. left: those without a result. deaths: of its workers."""

    left: dict[Any, Any]
    deaths: int = 0

    def after_death(self, error: Exception) -> _Chunk:
        """What has to be done again. Raises InputError."""
        if self.deaths + 1 == MOST_DEATHS:
            raise InputError(
                f"{MOST_DEATHS} workers died one after the other on the same items (the first is "
                f"{next(iter(self.left), None)!r}), perhaps for want of memory: expected fewer "
                f"--workers or a smaller --batch-size; the same command goes on: {_reason(error)}"
            )
        return _Chunk(self.left, self.deaths + 1)


def _reason(error: Exception) -> str:
    """What Ray says on many lines, in one."""
    return brief(" ".join(str(error).split()))


class _Worker:
    """What runs in a worker's process. The model is loaded when it is first needed."""

    def __init__(self, options: Any):
        self._options = options
        self._loaded: tuple[DiffusionModel, str] | None = None

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        model, weights = self._load()
        return function(self._options, model, weights, *arguments)

    def run(self, work: Any, items: list[Any]) -> Iterator[Any]:
        model, _ = self._load()
        yield from work(model, items)

    def _load(self) -> tuple[DiffusionModel, str]:
        if self._loaded is None:
            self._loaded = load(self._options)
        return self._loaded


def _weights(options: Any, model: DiffusionModel, weights: str) -> str:
    return weights


@contextlib.contextmanager
def workers(options: Any) -> Iterator[Crew]:
    """The models that a command line asks for, loaded; the workers end with the body. Raises
    InputError, before any weights are read where Ray cannot be used, and what `load` raises."""
    if options.workers == 1:
        yield OneWorker(*load(options), options)
        return
    # What the machines of a cluster have is known when it is joined.
    here = options.address is None and options.device is None
    gpus = int(parse_device(None).type == "cuda" if here else options.device not in (None, "cpu"))
    with ray_session(options.address, options.workers, "--workers", gpus=gpus) as cores:
        if options.address is not None and options.device is None and has_gpus():
            gpus, cores = 1, share(nodes(), options.workers, "--workers", 1)
        crew = RayWorkers(options, options.workers, cores, gpus)
        try:
            yield crew
        finally:
            crew.close()
