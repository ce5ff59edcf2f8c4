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
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.model import DiffusionModel
from d2f.span_makers import widened
from decode.engine.batch import FlatRows
from decode.engine.sampling import greedy_table
from decode.engine.step import Ints
from triton_kernels.span_attention import MAX_SPANS

# A graph replays fixed shapes, so a forward is padded to the next of these sizes. Decoding reads
# all weights whatever the rows: up to about 128 of them, one more is nearly free and a launch is
# not.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256)
VARIABLE = "D2F_GRAPHS"

# Lines of the one array ``[_QUERIED + 1, size]`` that holds all inputs of a forward, so that they
# cross to the device in one copy.
_TOKENS, _POSITIONS, _SLOTS, _SPANS = 0, 1, 2, 3
_READ = _SPANS + 2 * MAX_SPANS
_QUERIED = _READ + 1

PendingTable = Callable[[], NDArray[np.float64]]
"""Waits for a forward that was started and gives its table (`decode.engine.sampling.table_of`)."""


def graphs_wanted(device: torch.device) -> bool:
    """Whether an engine on this device pads and captures: on CUDA, unless ``D2F_GRAPHS=0``."""
    return device.type == "cuda" and os.environ.get(VARIABLE) != "0"


class GraphForwards:
    """The forwards of one model and one cache, a `GraphForward` for each size.

    The cache's last slot is reserved for rows that pad. A size is made when a forward first needs
    it, and there are two of each: one gives token and confidence alone, the other also what
    `Step` may ask for (queried probability, entropy, margin).
    """

    def __init__(self, model: DiffusionModel, cache: SlotCache):
        self.model, self.cache = model, cache
        cuda = model.device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if cuda else None  # memory that graphs share
        self._forwards: dict[tuple[int, bool], GraphForward] = {}

    def start(self, rows: FlatRows, queried: Ints | None) -> PendingTable | None:
        """Start the forward of greedy rows; what it returns waits for the table of
        `decode.engine.sampling.greedy_table`, longer by the rows that pad. None where no size is
        large enough."""
        count = max(len(rows.tokens), len(rows.read))
        size = next((size for size in SIZES if size >= count), None)
        if size is None:
            return None
        key = (size, queried is not None)
        if key not in self._forwards:
            self._forwards[key] = GraphForward(
                self.model, self.cache, size, queried is not None, self.pool
            )
        return self._forwards[key].start(rows, queried)


class GraphForward:
    """The forward of one size, with the buffers that it reads and writes.

    scores: whether its table has queried tokens, entropy and margin too. pool: the memory pool of
    the CUDA graphs, which run one after the other and so may share it.
    """

    def __init__(self, model: DiffusionModel, cache: SlotCache, size: int, scores: bool, pool: Any):
        self.pool = pool
        self.model, self.cache, self.scores = model, cache, scores
        self.trash = cache.layers[0][0].shape[2] - 1
        self.cuda = model.device.type == "cuda"
        # A graph replays the addresses that it was captured with, so the buffers are made once and
        # only overwritten. Pinned memory lets the copies run beside the host.
        self.host = torch.zeros(_QUERIED + 1, size, dtype=torch.int64, pin_memory=self.cuda)
        self.inputs = torch.zeros_like(self.host, device=model.device)  # [_QUERIED + 1, size]
        shape = (6 if scores else 2, size)
        # fp64 holds a token id and an fp32 probability exactly, so one table and one copy are
        # enough.
        self.table = torch.zeros(shape, dtype=torch.float64, device=model.device)
        self.found = torch.zeros(shape, dtype=torch.float64, pin_memory=self.cuda)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tried = not self.cuda  # to capture it, once

    def start(self, rows: FlatRows, queried: Ints | None) -> PendingTable:
        """Start the forward, as `GraphForwards.start` says. Its table lies in a buffer that the
        next one overwrites, so the one before must have been waited for."""
        self._fill(rows, queried)  # the buffers of the one before are overwritten
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

    def _fill(self, rows: FlatRows, queried: Ints | None) -> None:
        host, count = self.host.numpy(), len(rows.tokens)
        host[:] = 0  # also the spans of rows that pad: [0, 0), empty
        host[_SLOTS, count:] = self.trash
        host[_TOKENS, :count], host[_POSITIONS, :count] = rows.tokens, rows.positions
        host[_SLOTS, :count] = rows.slots
        # [count, MAX_SPANS, 2] becomes a line for each start and each end, [2 * MAX_SPANS, count].
        host[_SPANS:_READ, :count] = widened(rows.spans, MAX_SPANS).reshape(count, -1).T
        host[_READ, : len(rows.read)] = rows.read
        if queried is not None:
            host[_QUERIED, : len(queried)] = queried

    def _compute(self) -> None:
        """Compute the table from the inputs. Nothing here looks at a value on the host, which a
        graph could not record."""
        x = self.inputs
        # [2 * MAX_SPANS, size] back to [size, MAX_SPANS, 2], as the attention kernel reads them.
        spans = x[_SPANS:_READ].T.reshape(-1, MAX_SPANS, 2).to(torch.int32)
        self.cache.slots = x[_SLOTS]
        logits = self.model.decode_rows(
            x[_TOKENS], x[_POSITIONS], SpanPlan(spans), self.cache, x[_READ]
        )
        queried = x[_QUERIED] if self.scores else None
        self.table.copy_(greedy_table(logits, self.model.mask_id, queried))

    def _capture(self) -> None:
        """Record `_compute` as a graph; it has run once, so all that it needs is compiled."""
        self.tried = True
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                self._compute()
        except RuntimeError as error:
            # Without a graph each forward is computed eagerly in the same buffers: slower, the same
            # tokens.
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"no CUDA graph of the forward: {reason}", RuntimeWarning, stacklevel=2)
            return
        self.graph = graph
