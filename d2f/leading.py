"""What rank 0 does with a model that several processes hold, and what the others do.

Nothing but forwards and caches is shared: rank 0 alone has requests, decoders and sampling, the
others repeat what it does with the model (`follow`), in the same order::

    rank 0                                           rank 1
    engine: a cache of 96 slots   -- cache ----->    96 slots for its own heads
    engine: a forward             -- rows ------>    the same rows
            layer by layer        <- all-reduce ->
            logits, choice of tokens                 logits, not looked at

A script that torchrun starts (``torchrun --nproc-per-node 2 script.py``)::

    model = d2f.load("tiny-d2f", tensor_parallel=2)
    if rank() == 0:
        print(decode.generate(model, prompts, "d2f"))
    else:
        follow()  # until rank 0 ends
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import itertools
import os
import secrets
import signal
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

import torch
from torch import Tensor

from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.errors import InputError, RankError
from d2f.model import DiffusionModel
from d2f.rank_number import rank

# The processes that hold one model together: the first one, rank 0, leads, the others follow.
#
# ::
#
#     rank 0                                    each other rank
#     send(message)     ------ connection ----> messages(), in the order of sending
#     a thread waits    <----- connection ----- what it failed of
#     for its end                               a thread waits for the end of rank 0
#
# A process that dies closes its connections, whatever it was doing, and the kernel tells the
# others.
# Collectives do not: gloo raises, NCCL waits for a peer that is gone. So who notices that another
# has
# ended unasked ends too, within seconds, with an error.

SECONDS_TO_END = 2.0  # for errors to reach callers and clients, before the process is ended
_SECONDS_TO_JOIN = 120.0
_PLACE, _END = "d2f/leader", ("end",)


class Ranks:
    """This process's connections to the others: of rank 0 to each, of another to rank 0.

    broken: why they cannot go on, None while they can. lock: who has it may send and take part in a
    collective, so that all ranks do both in one order.
    """

    def __init__(self, rank: int, connections: list[Connection]):
        self.rank = rank
        self.broken: str | None = None
        self.lock = threading.RLock()
        self._connections = connections
        self._messages: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._lost = threading.Event()  # a connection has ended
        self._ending = False  # asked for: a connection that ends is no failure
        for number, connection in enumerate(connections, 1):
            wait, name = (self._receive, "rank 0") if rank else (self._watch, f"rank {number}")
            threading.Thread(target=wait, args=(connection, name), daemon=True).start()
        atexit.register(self.close)

    def send(self, *message: Any) -> None:
        """Rank 0: give all others a message. Raises RankError."""
        with self.lock, self.together():
            for connection in self._connections:
                connection.send(message)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do, in the body: an error in it ends all of them, as they are no longer at
        one place. Raises RankError."""
        if self.broken is not None:
            raise RankError(self.broken)
        try:
            yield
        except KeyboardInterrupt:
            self.close()  # wherever the others are now
            self.broken = "interrupted within a forward"
            raise
        except Exception as error:
            # Of a rank that died the connection ends too, and says more than the collective does.
            if not self._lost.wait(SECONDS_TO_END / 2):
                self.fail(f"rank {self.rank} failed: {type(error).__name__}: {error}")
            raise RankError(self.broken or str(error)) from error

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """Another rank: what rank 0 sends, until it is done. Raises RankError where it has ended
        otherwise."""
        while (message := self._messages.get()) != _END:
            yield message
        if self.broken is not None:
            raise RankError(self.broken)

    def fail(self, reason: str) -> None:
        """Note that the ranks cannot go on, and end this process in a moment, if it does not end by
        itself."""
        with contextlib.suppress(OSError):
            if self.rank and not self._lost.is_set():
                self._connections[0].send(reason)
        if self.broken is None:
            self.broken = reason
            timer = threading.Timer(SECONDS_TO_END, self._end_process)
            timer.daemon = True
            timer.start()

    def close(self) -> None:
        """Rank 0: tell the others that all is done."""
        if self.broken is None and not self._ending:
            self._ending = True
            with contextlib.suppress(OSError):
                for connection in self._connections if not self.rank else ():
                    connection.send(_END)

    def _watch(self, connection: Connection, name: str) -> None:
        """Rank 0's thread for another rank, which says something only where it fails."""
        reason = f"{name} has ended"
        with contextlib.suppress(EOFError, OSError):
            reason = str(connection.recv())
        if not self._ending:
            self.fail(f"{reason}; all ranks end")
        self._lost.set()

    def _receive(self, connection: Connection, name: str) -> None:
        """Another rank's thread for rank 0."""
        with contextlib.suppress(EOFError, OSError):
            while (message := connection.recv()) != _END:
                self._messages.put(message)
            self._ending = True
        self._lost.set()
        if not self._ending:
            self.fail(f"{name} has ended; rank {self.rank} ends")
        else:  # where a forward was interrupted, this one waits in it for ever
            timer = threading.Timer(SECONDS_TO_END, os._exit, (0,))
            timer.daemon = True
            timer.start()
        self._messages.put(_END)

    def _end_process(self) -> None:
        print(f"error: {self.broken}", file=sys.stderr, flush=True)
        os._exit(1)


_joined: Ranks | None = None


def join(device: torch.device) -> Ranks:
    """This process's connections to the others that torchrun started, and torch's process group;
    made at the first call. Raises InputError where they do not find each other."""
    global _joined
    if _joined is None:
        try:
            store, number, size = next(torch.distributed.rendezvous("env://"))
            store.set_timeout(timedelta(seconds=_SECONDS_TO_JOIN))
            connections = _lead(store, size) if number == 0 else [_find(store)]
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            raise InputError(f"the ranks did not find each other: {error}") from error
        # Before the process group: a rank that dies while it is made ends the others already.
        _joined = Ranks(number, connections)
        with _joined.together():
            _make_group(store, number, size, device)
    return _joined


def joined() -> Ranks:
    """The connections that `join` made."""
    assert _joined is not None
    return _joined


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Rank 0 learns what another fails of in the body, where the ranks have joined."""
    try:
        yield
    except Exception as error:
        if _joined is not None and _joined.rank:
            _joined.fail(f"rank {_joined.rank}: {error}")
        raise


def _make_group(store: Any, number: int, size: int, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=number,
        world_size=size,
        timeout=timedelta(hours=2),
        device_id=device if on_gpu else None,
    )


def _lead(store: Any, size: int) -> list[Connection]:
    """Connections to the other ranks, by rank."""
    host, key = os.environ["MASTER_ADDR"], secrets.token_hex(16)
    kind = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    found: dict[int, Connection] = {}
    with socket.create_server((host, 0), family=kind, backlog=size) as listener:
        listener.settimeout(_SECONDS_TO_JOIN)
        # What is sent is pickled, so nobody is listened to who does not know the key.
        store.set(_PLACE, f"{host} {listener.getsockname()[1]} {key}")
        while len(found) < size - 1:
            connection = _connection(listener.accept()[0])
            with contextlib.suppress(OSError, EOFError, ValueError):  # a stranger
                said = connection.recv_bytes(256) if connection.poll(_SECONDS_TO_JOIN / 10) else b""
                known, _, number = said.partition(b" ")
                if hmac.compare_digest(known, key.encode()):
                    found[int(number)] = connection
    return [found[number] for number in sorted(found)]


def _find(store: Any) -> Connection:
    host, port, key = store.get(_PLACE).decode().split()
    connection = _connection(socket.create_connection((host, int(port)), _SECONDS_TO_JOIN))
    connection.send_bytes(f"{key} {rank()}".encode())
    return connection


def _connection(one: socket.socket) -> Connection:
    one.settimeout(None)
    # A message is small, and the next one must not wait until the last was acknowledged.
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(one.detach())


_models: list[DiffusionModel] = []  # those in parts, loaded in the same order on every rank
_cache_numbers = itertools.count()
_forgotten: deque[int] = deque()  # numbers of caches that nobody has any more


def kind_of_rank() -> type[DiffusionModel]:
    """What this rank makes of its part of a model."""
    return LeadingModel if joined().rank == 0 else DiffusionModel


def announce(model: DiffusionModel) -> None:
    """Have a model known by its number to the other ranks, which load the same in the same
    order."""
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
        ranks = joined()
        with ranks.lock:
            ranks.send("rows", cache.number, [x.numpy() for x in arrays], plan.segments)
            with ranks.together():
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
        ranks = joined()
        with ranks.lock:
            while _forgotten:
                ranks.send("drop", _forgotten.popleft())
            ranks.send("cache", self.number, _models.index(model), slots)
        # A destructor runs at any moment, also while something is sent: it only leaves a note.
        weakref.finalize(self, _forgotten.append, self.number).atexit = False

    def clear(self, start: int, stop: int) -> None:
        """See `SlotCache.clear`."""
        joined().send("clear", self.number, start, stop)
        super().clear(start, stop)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """See `SlotCache.copy`."""
        joined().send("copy", self.number, source.cpu().numpy(), target.cpu().numpy())
        super().copy(source, target)


def follow() -> None:
    """On a rank behind the first, once every model is loaded: do what rank 0 does until it has
    ended. Signals are rank 0's to take. Raises RankError where it, or this rank, has failed."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    ranks, caches = joined(), dict[int, tuple[DiffusionModel, SlotCache]]()
    for message in ranks.messages():
        with ranks.together(), torch.inference_mode():
            _repeat(caches, *message)


def _repeat(
    caches: dict[int, tuple[DiffusionModel, SlotCache]], what: str, number: int, *given: Any
) -> None:
    """One message of rank 0. number: of the cache that it is about."""
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
