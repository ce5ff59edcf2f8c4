"""Models that work on many items: one here, or one in each of several Ray workers.

    with workers(options) as crew:                          # options.workers, options.address
        run = crew.ask(describe)                            # of a model that is loaded elsewhere
        for key, found in crew.spread(work, items, 64):     # as they finish, each once
            ...

A crew of one needs no Ray and imports none. With several, this process reads no weights: it hands
out chunks of items and takes each result as it is there, so who writes them writes alone, as with
one. A worker that dies is replaced, and what it had not answered yet is handed out once more.

Plain Ray actors and not Ray Data: `map_batches` starts its actors anew for each job, and tuning,
which asks pass after pass, would load the model for each of them; its rows come a block at a time,
when a kill has lost the block; and it has readers of its own, where `d2f/data_records.py` already
reads what the commands take by number, with a digest that a resumed run is held to.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from d2f.device import parse_device
from d2f.errors import InputError, brief
from d2f.model import DiffusionModel
from decode.cluster.ray_session import has_gpus, nodes, ray_session, share
from decode.commands.load_model import load

Key = TypeVar("Key")
Item = TypeVar("Item")
Found = TypeVar("Found")
Work = Callable[[DiffusionModel, Iterable[tuple[Key, Item]]], Iterator[tuple[Key, Found]]]
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
    options: argparse.Namespace | None = None
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

    def __init__(self, options: argparse.Namespace, count: int, cores: int, gpus: int):
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

    def __init__(self, options: argparse.Namespace):
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


def _weights(options: argparse.Namespace, model: DiffusionModel, weights: str) -> str:
    return weights


@contextlib.contextmanager
def workers(options: argparse.Namespace) -> Iterator[Crew]:
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
