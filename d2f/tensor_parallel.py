"""Split one model over several processes, a GPU each: transformers shards the layers.

Each rank reads and keeps a part of every matrix, and computes with its part of the heads::

    2 ranks, 4 heads over 2 key-value heads    rank 0             rank 1
    q_proj, k_proj, v_proj: rows               heads 0 1, 0       heads 2 3, 1
    keys and values in the cache               head 0             head 1
    o_proj: columns                            a part of the sum  the other: all-reduce
    gate_proj, up_proj, down_proj              half of the MLP    half: all-reduce
    embeddings, lm_head: rows                  half the vocabulary each: gathered

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
import os
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
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PretrainedConfig

from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.device import check_processes, rank
from d2f.errors import InputError, RankError
from d2f.model import DiffusionModel
from d2f.saving import base_of, merged

SECONDS_TO_JOIN = 120
END = ("end",)


# Loading a part.


def check_parallel(size: int, device: torch.device, *, quantize: bool = False) -> torch.device:
    """Return the device of this process as one of `size`. Raises InputError where torchrun did not
    start so many or there are not enough GPUs; the device meta is not checked."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(f"tensor_parallel must be a whole number from 1, got {size!r}")
    if quantize:
        raise InputError(f"tensor parallel {size}: expected weights that are not quantised")
    if device.type == "meta":
        return device
    check_processes(size)
    if device.type not in ("cpu", "cuda") or device.index is not None:
        raise InputError(
            f"tensor parallel {size}: each process takes the GPU of its own number: expected "
            f"device cuda or cpu, got {device}"
        )
    if device.type == "cpu":
        if torch.cuda.is_available():  # transformers would take them
            raise InputError(
                f"tensor parallel {size} on the CPU of a machine with GPUs: hide them with "
                "CUDA_VISIBLE_DEVICES="
            )
        return device
    here, there = int(os.environ.get("LOCAL_WORLD_SIZE", size)), torch.cuda.device_count()
    if here > there:
        raise InputError(
            f"tensor parallel {size}: {here} processes on this machine need a GPU each, it has "
            f"{there}"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_divides(name: str, config: PretrainedConfig, size: int) -> None:
    """Raise InputError for a model whose heads or MLP cannot be shared by `size` processes."""
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, what)
        if count % size:
            raise InputError(f"{name}: tensor parallel {size} must divide {what}, got {count}")


def sharded(size: int) -> dict[str, Any]:
    """Return options of `from_pretrained` with which each rank reads and keeps its own part."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=size)}


def merge_into_parts(model: DiffusionModel, adapted: DiffusionModel) -> None:
    """Merge the adapter of `adapted`, the whole model on the CPU, into the parts of this rank, one
    module after the other; the model's contract becomes that of `adapted`."""
    for name, part in model.backbone.named_modules():
        layer = adapted.backbone.get_submodule(name)
        if base_of(layer) is None:
            continue
        whole = merged(layer)
        for key, weight in part.named_parameters():
            value = whole.get_parameter(key).detach().to(weight.device, weight.dtype)
            if isinstance(weight, DTensor):
                # Every rank has the whole and takes its part; nothing is sent.
                mesh, placements = weight.device_mesh, weight.placements
                value = distribute_tensor(value, mesh, placements, src_data_rank=None)
            own_part(weight).data.copy_(own_part(value))
    model.contract, model.is_merged = adapted.contract, True


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, all of one that is not in parts."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Messages between the ranks.

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


def _send(*message: Any) -> None:
    """Rank 0: give all others a message. Raises RankError."""
    with _lock, _together():
        dist.broadcast_object_list([message], src=0, group=_control)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Do in the body what all ranks do; an error there means that one of them is gone. Raises
    RankError."""
    try:
        yield
    except Exception as error:
        raise RankError(f"rank {rank()} lost the others: {error}; all ranks end") from error


def _end() -> None:
    with contextlib.suppress(Exception), _lock:  # the others may be gone already
        dist.broadcast_object_list([END], src=0, group=_control)


# Rank 0 leads.

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
        arrays = [x.cpu().numpy() for x in (tokens, positions, cache.slots, plan.spans, read)]
        with _lock:
            _send("rows", cache.number, arrays, plan.segments)
            with _together():
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
                _send("drop", _forgotten.popleft())
            _send("cache", self.number, _models.index(model), slots)
        # A destructor runs at any moment, also while something is sent: it only leaves a note.
        weakref.finalize(self, _forgotten.append, self.number).atexit = False

    def clear(self, start: int, stop: int) -> None:
        """See `SlotCache.clear`."""
        _send("clear", self.number, start, stop)
        super().clear(start, stop)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See `SlotCache.copy`."""
        _send("copy", self.number, source.cpu().numpy(), target.cpu().numpy())
        super().copy(source, target)


def follow() -> None:
    """Do what rank 0 does until it ends, on a rank behind it, once every model is loaded.

    Signals are rank 0's to take. Raises RankError where a process is gone.
    """
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    caches: dict[int, tuple[DiffusionModel, SlotCache]] = {}
    while True:
        box: list[Any] = [None]
        with _together(), torch.inference_mode():
            dist.broadcast_object_list(box, src=0, group=_control)
            if box[0] == END:
                return
            _repeat(caches, *box[0])


def _repeat(
    caches: dict[int, tuple[DiffusionModel, SlotCache]], what: str, number: int, *given: Any
) -> None:
    """Carry out a message of rank 0 about the cache of that number."""
    if what == "cache":
        model, slots = _models[given[0]], given[1]
        caches[number] = model, model.new_cache(slots)
    elif what == "drop":
        del caches[number]
    elif what == "clear":
        caches[number][1].clear(*given)
    elif what == "copy":
        caches[number][1].copy(*map(torch.from_numpy, given))
    else:
        model, cache = caches[number]
        arrays, segments = given
        tokens, positions, cache.slots, spans, read = (
            torch.from_numpy(array).to(model.device) for array in arrays
        )
        model.decode_rows(tokens, positions, SpanPlan(spans, segments), cache, read)
