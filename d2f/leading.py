"""Keep the processes that hold a model in step: rank 0 leads, the others repeat.

Only forwards and caches are shared. Rank 0 alone has requests, decoders and sampling; the others
repeat its forwards and cache operations (`follow`), in the same order::

    rank 0                                           rank 1
    engine: a cache of 96 slots   -- cache ----->    96 slots for its own heads
    engine: a forward             -- rows ------>    the same rows
            layer by layer        <- all-reduce ->
            logits, choice of tokens                 logits, not read

A script that torchrun starts (``torchrun --nproc-per-node 2 script.py``)::

    model = d2f.load("tiny-d2f", tensor_parallel=2)
    if rank() == 0:
        print(decode.generate(model, prompts, "d2f"))
    else:
        follow()  # until rank 0 ends

Messages are broadcast in a gloo group of their own, which raises at once where a process is gone;
torchrun ends the others when one has failed.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.device import rank
from d2f.errors import InputError, RankError
from d2f.model import DiffusionModel

SECONDS_TO_JOIN = 120
END = ("end",)

_control: Any = None  # the group that messages go through
_lock = threading.RLock()  # its holder may send and take part in a collective: one order on all


def join(device: torch.device) -> None:
    """Join the processes that torchrun started, at the first call. Raises InputError where they do
    not find each other."""
    global _control
    if _control is not None:
        return
    on_gpu = device.type == "cuda"
    try:
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=timedelta(seconds=SECONDS_TO_JOIN),
            device_id=device if on_gpu else None,
        )
        # A server may wait for its next request for as long as it likes.
        _control = dist.new_group(backend="gloo", timeout=timedelta(days=365))
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"the ranks did not find each other: {error}") from error
    if rank() == 0:
        atexit.register(_end)


def send(*message: Any) -> None:
    """Rank 0: give all others a message. Raises RankError."""
    with _lock, together():
        dist.broadcast_object_list([message], src=0, group=_control)


def messages() -> Iterator[tuple[Any, ...]]:
    """Another rank: yield what rank 0 sends, until it is done. Raises RankError."""
    while True:
        box: list[Any] = [None]
        with together():
            dist.broadcast_object_list(box, src=0, group=_control)
        if box[0] == END:
            return
        yield box[0]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Do in the body what all ranks do; an error there means that one of them is gone. Raises
    RankError."""
    try:
        yield
    except Exception as error:
        raise RankError(f"rank {rank()} lost the others: {error}; all ranks end") from error


def _end() -> None:
    with contextlib.suppress(Exception), _lock:  # the others may be gone already
        dist.broadcast_object_list([END], src=0, group=_control)


_models: list[DiffusionModel] = []  # those in parts, loaded in the same order on every rank
_cache_numbers = itertools.count()
_forgotten: deque[int] = deque()  # numbers of caches that nobody has any more


def kind_of_rank() -> type[DiffusionModel]:
    """Return the class that this rank makes of its part of a model."""
    return LeadingModel if rank() == 0 else DiffusionModel


def announce(model: DiffusionModel) -> None:
    """Number a model, for messages: all ranks load the same models in the same order."""
    _models.append(model)


class LeadingModel(DiffusionModel):
    """Rank 0's part of a model; its forwards and caches are those of all ranks. What needs the
    whole weights raises InputError."""

    def decode_rows(
        self, tokens: Tensor, positions: Tensor, plan: SpanPlan, cache: SlotCache, read: Tensor
    ) -> Tensor:
        """See `DiffusionModel.decode_rows`. Raises RankError, too."""
        assert isinstance(cache, LeadingCache) and cache.slots is not None
        arrays = [x.cpu() for x in (tokens, positions, cache.slots, plan.spans, read)]
        with _lock:
            send("rows", cache.number, [x.numpy() for x in arrays], plan.segments)
            with together():
                return super().decode_rows(tokens, positions, plan, cache, read)

    def new_cache(self, slots: int) -> SlotCache:
        """See `DiffusionModel.new_cache`; every rank makes one, for its heads."""
        return LeadingCache(self, slots)

    def hidden(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse("a forward without a cache")

    def compile(self) -> NoReturn:
        self._refuse("compiling")

    def save(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse("saving")

    def _refuse(self, what: str) -> NoReturn:
        raise InputError(f"{what} needs the whole model: load it without tensor_parallel")


class LeadingCache(SlotCache):
    """Rank 0's part of a cache. What is done with it, all ranks do."""

    def __init__(self, model: LeadingModel, slots: int):
        config = model.backbone.config
        heads = config.num_key_value_heads // model.tensor_parallel
        super().__init__(config, slots, dtype=model.dtype, device=model.device, heads=heads)
        self.number = next(_cache_numbers)
        with _lock:
            while _forgotten:
                send("drop", _forgotten.popleft())
            send("cache", self.number, _models.index(model), slots)
        # A destructor runs at any moment, also while something is sent: it only leaves a note.
        weakref.finalize(self, _forgotten.append, self.number).atexit = False

    def clear(self, start: int, stop: int) -> None:
        """See `SlotCache.clear`."""
        send("clear", self.number, start, stop)
        super().clear(start, stop)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See `SlotCache.copy`."""
        send("copy", self.number, source.cpu().numpy(), target.cpu().numpy())
        super().copy(source, target)


def follow() -> None:
    """Do what rank 0 does until it ends, on a rank behind it, once every model is loaded.

    Signals are rank 0's to take. Raises RankError where a process is gone.
    """
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    caches: dict[int, tuple[DiffusionModel, SlotCache]] = {}
    for message in messages():
        with together(), torch.inference_mode():
            _repeat(caches, *message)


def _repeat(
    caches: dict[int, tuple[DiffusionModel, SlotCache]], what: str, number: int, *given: Any
) -> None:
    """Carry out a message of rank 0 about the cache of that number."""
    if what == "cache":
        model, slots = _models[given[0]], given[1]
        caches[number] = model, model.new_cache(slots)
        return
    if what == "drop":
        del caches[number]
        return
    model, cache = caches[number]
    if what == "clear":
        cache.clear(*given)
    elif what == "copy":
        cache.copy(*map(torch.from_numpy, given))
    else:
        arrays, segments = given
        tokens, positions, slots, spans, read = (
            torch.from_numpy(array).to(model.device) for array in arrays
        )
        cache.slots = slots
        model.decode_rows(tokens, positions, SpanPlan(spans, segments), cache, read)
