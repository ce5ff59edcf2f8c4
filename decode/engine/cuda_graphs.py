"""Forwards of a few fixed sizes: rows padded to the next one, buffers that stay in place and, on a
GPU, a CUDA graph a size, replayed with one copy in and one small copy out.

A row that pads has an empty span and writes to the cache's last slot, which belongs to no request:
the other rows compute what they would without it. Three rows in a forward of four, 100 slots
in the cache::

    tokens       9       m       m       0
    positions    2       3       4       0
    slots        2       3       4       99        the trash slot
    spans        [0, 4)  [0, 4)  [0, 6)  [0, 0)
    read         1       2       0       0         beyond the two that are wanted: not looked at
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.model import DiffusionModel
from d2f.spans import widened
from decode.engine.batch import DRAW_LINES, FlatRows, Wanted, draws_of, prediction_table
from triton_kernels.dispatch import VARIABLE as KERNELS
from triton_kernels.span_attention import MAX_SPANS

# A graph replays fixed shapes, so a forward is padded to the next of these sizes. Decoding reads
# all weights whatever the rows: up to about 128 of them, one more is nearly free and a launch is
# not.
SIZES = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128),
    *(160, 192, 256, 320, 384, 512, 640, 768, 1024),
)  # fmt: skip
VARIABLE = "D2F_GRAPHS"

# Lines of the one array ``[_LINES, size]`` that holds all inputs of a forward, so that they
# cross to the device in one copy.
_TOKENS, _POSITIONS, _SLOTS, _SPANS = 0, 1, 2, 3
_READ = _SPANS + 2 * MAX_SPANS
_QUERIED = _READ + 1
_DRAWS = _QUERIED + 1
_LINES = _DRAWS + DRAW_LINES

PendingTable = Callable[[], NDArray[np.float64]]
"""Wait for a forward that was started; returns its table (`decode.engine.batch.table_of`)."""


def graphs_wanted(device: torch.device) -> bool:
    """Say whether an engine on this device pads and captures: on CUDA, unless ``D2F_GRAPHS=0``."""
    return device.type == "cuda" and os.environ.get(VARIABLE) != "0"


class Kind(NamedTuple):
    """A kind of forward that has a graph of its own: so many rows, and of those that are read
    scores: queried probability, entropy and margin beside token and confidence; drawn: some are
    drawn, filtered: from a part of the vocabulary."""

    size: int
    scores: bool = False
    drawn: bool = False
    filtered: bool = False


class GraphForwards:
    """The forwards of one model and one cache, a `GraphForward` for each kind, made when a forward
    first needs it. The cache's last slot is reserved for rows that pad."""

    def __init__(self, model: DiffusionModel, cache: SlotCache):
        # Kept while the model is (`decode.engine.cuda_graphs`), so it must not keep the model.
        self.model, self.cache = weakref.proxy(model), cache
        cuda = model.device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if cuda else None  # memory that graphs share
        self._forwards: dict[Kind, GraphForward] = {}

    @property
    def slots(self) -> int:
        """Slots of the cache, without the one for rows that pad."""
        return self.cache.layers[0][0].shape[2] - 1

    def start(self, rows: FlatRows, wanted: Wanted) -> PendingTable | None:
        """Start a forward, whose table is longer by the rows that pad. Returns None where no size
        is large enough."""
        count = max(len(rows.tokens), len(rows.read))
        size = next((size for size in SIZES if size >= count), None)
        if size is None:
            return None
        kind = Kind(size, wanted.queried is not None, wanted.draws is not None, wanted.filtered)
        if kind not in self._forwards:
            self._forwards[kind] = GraphForward(self.model, self.cache, kind, self.pool)
        return self._forwards[kind].start(rows, wanted)


class GraphForward:
    """The forward of one kind, with the buffers that it reads and writes.

    pool: the memory pool of the CUDA graphs, which run one after the other and so may share it.
    """

    def __init__(self, model: DiffusionModel, cache: SlotCache, kind: Kind, pool: Any):
        self.pool = pool
        self.model, self.cache, self.kind = model, cache, kind
        self.trash = cache.layers[0][0].shape[2] - 1
        self.cuda = model.device.type == "cuda"
        # A graph replays the addresses that it was captured with, so the buffers are made once and
        # only overwritten. Pinned memory lets the copies run beside the host.
        self.host = torch.zeros(_LINES, kind.size, dtype=torch.int64, pin_memory=self.cuda)
        self.inputs = torch.zeros_like(self.host, device=model.device)  # [_LINES, size]
        shape = (6 if kind.scores else 2, kind.size)
        # fp64 holds a token id and an fp32 probability exactly, so one table and one copy are
        # enough.
        self.table = torch.zeros(shape, dtype=torch.float64, device=model.device)
        self.found = torch.zeros(shape, dtype=torch.float64, pin_memory=self.cuda)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tried = not self.cuda  # to capture it, once

    def start(self, rows: FlatRows, wanted: Wanted) -> PendingTable:
        """Start the forward. Its table lies in a buffer that the next one overwrites, so the one
        before must have been waited for."""
        self._fill(rows, wanted)  # the buffers of the one before are overwritten
        with torch.inference_mode():
            self.inputs.copy_(self.host, non_blocking=True)
            if self.graph is not None:
                self.graph.replay()
            else:
                # The first forward of a size is computed eagerly, and its result counts.
                self._compute()
                if not self.tried:
                    # This records the work without doing it: the table keeps what was just
                    # computed.
                    self._capture()
            self.found.copy_(self.table, non_blocking=True)
        if not self.cuda:
            # The copies above were synchronous, there is nothing to wait for.
            return self.found.numpy
        # The host goes on meanwhile; who wants the table waits here.
        done = torch.cuda.current_stream().record_event()

        def wait() -> NDArray[np.float64]:
            done.synchronize()
            return self.found.numpy()

        return wait

    def _fill(self, rows: FlatRows, wanted: Wanted) -> None:
        host, count = self.host.numpy(), len(rows.tokens)
        host[:] = 0  # also the spans of rows that pad: [0, 0), empty
        host[_SLOTS, count:] = self.trash
        host[_TOKENS, :count], host[_POSITIONS, :count] = rows.tokens, rows.positions
        host[_SLOTS, :count] = rows.slots
        # [count, MAX_SPANS, 2] becomes a line for each start and each end, [2 * MAX_SPANS, count].
        host[_SPANS:_READ, :count] = widened(rows.spans, MAX_SPANS).reshape(count, -1).T
        host[_READ, : len(rows.read)] = rows.read
        if wanted.queried is not None:
            host[_QUERIED, : len(rows.read)] = wanted.queried
        if wanted.draws is not None:
            host[_DRAWS:, : len(rows.read)] = wanted.draws

    def _compute(self) -> None:
        """Compute the table from the inputs. Nothing here looks at a value on the host, which a
        graph could not record."""
        x = self.inputs
        # [2 * MAX_SPANS, size] back to [size, MAX_SPANS, 2], as the attention kernel reads them.
        # Laid out as it wants them, once: every layer would copy them.
        spans = x[_SPANS:_READ].T.reshape(-1, MAX_SPANS, 2)
        spans = spans.to(torch.int32, memory_format=torch.contiguous_format)
        self.cache.slots = x[_SLOTS]
        logits = self.model.decode_rows(
            x[_TOKENS], x[_POSITIONS], SpanPlan(spans), self.cache, x[_READ]
        )
        queried = x[_QUERIED] if self.kind.scores else None
        draws = draws_of(x[_DRAWS:], filtered=self.kind.filtered) if self.kind.drawn else None
        self.table.copy_(prediction_table(logits, self.model.mask_id, queried, draws))

    def _capture(self) -> None:
        """Record `_compute` as a graph; it has run once, so all that it needs is compiled."""
        self.tried = True
        graph = torch.cuda.CUDAGraph()
        try:
            # After an error torch leaves the stream that it captures on as the current one; the
            # outer block takes the old one back.
            with torch.cuda.stream(torch.cuda.current_stream()):
                with torch.cuda.graph(
                    graph,
                    pool=self.pool,
                    stream=torch.cuda.Stream(),  # torch's own is on the GPU that was first current
                    capture_error_mode="thread_local",  # other threads may allocate meanwhile
                ):
                    self._compute()
        except Exception as error:
            # Without a graph each forward is computed eagerly in the same buffers: slower, the same
            # tokens.
            # An error within a capture makes another at its end, which says nothing.
            cause = str(error.__context__ or error).strip().partition("\n")[0]
            warnings.warn(f"no CUDA graph of the forward: {cause}", RuntimeWarning, stacklevel=2)
            return
        self.graph = graph


Lent = tuple[Hashable, GraphForwards]
"""A cache with its graphs, and the state of the model that they were made in."""

# Kept while their model is loaded and lent to one engine at a time, so there are never more of them
# than engines were alive at once. An engine that is collected gives its own back at any moment, in
# any thread: a deque needs no lock.
_free: WeakKeyDictionary[DiffusionModel, deque[Lent]] = WeakKeyDictionary()


def free_graphs(model: DiffusionModel) -> deque[Lent]:
    """Return the caches with graphs of a model that no engine has; an engine appends its own."""
    return _free.setdefault(model, deque())


def lend_graphs(model: DiffusionModel, slots: int) -> Lent:
    """Lend a cache of at least `slots` slots, beside the one for rows that pad, all empty: the last
    that was given back, without those that are too small or were made in another state."""
    free, state = free_graphs(model), captured_state(model)
    while free:
        lent = free.pop()
        if lent[0] == state and lent[1].slots >= slots:
            if model.device.type == "cuda":
                # A forward that the last engine started and nobody waited for may be running.
                torch.cuda.synchronize(model.device)
            lent[1].cache.clear(0, lent[1].slots + 1)
            return lent
        del lent  # its memory is free before more is taken
    # Rounded up by an eighth at most: engines of about the same needs share one.
    step = 1 << max(0, slots.bit_length() - 4)
    return state, GraphForwards(model, model.new_cache(-(-slots // step) * step + 1))


def captured_state(model: DiffusionModel) -> Hashable:
    """Describe what a graph of the model rests on besides the values of the weights: where they
    are, whether they are compiled, which adapters and kernels compute."""
    backbone = model.backbone
    return (
        os.environ.get(KERNELS),
        model.compiled_rows,
        tuple(_addresses([*backbone.parameters(), *backbone.buffers()])),
        tuple(module.training for module in backbone.modules()),
        () if model.adapter is None else tuple(_adapters_on(model)),
    )


def _adapters_on(model: DiffusionModel) -> Iterable[tuple[str, ...]]:
    """Name the adapters that compute, layer by layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.backbone.modules():
        if isinstance(layer, BaseTunerLayer):
            yield () if layer.disable_adapters else tuple(layer.active_adapters)


def _addresses(tensors: Iterable[Tensor]) -> Iterable[int]:
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):  # quantised: several tensors behind one
            names, _ = tensor.__tensor_flatten__()
            yield from _addresses(getattr(tensor, name) for name in names)
        else:
            yield tensor.data_ptr()
