"""Caches with their graphs, kept while their model is loaded and lent to one engine at a time::

    engine a needs 900 slots    a cache of 960 is made, and graphs as sizes come up
    engine b needs 300          another of 320, as a has the first
    a and b are closed          both are kept
    engine c needs 500          gets a's, emptied; its graphs replay from the first forward on
    engine d needs 400          b's is too small: it is given up, one of 416 is made

So there are never more of them than engines were alive at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Hashable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from d2f.model import DiffusionModel
from decode.engine.cuda_graphs import GraphForwards
from triton_kernels.choice import VARIABLE as KERNELS


class LentGraphs:
    """Those of one model that no engine has."""

    def __init__(self) -> None:
        # An engine that is collected gives its own back at any moment, in any thread: a deque
        # needs no lock.
        self._free: deque[tuple[Hashable, GraphForwards]] = deque()

    def lend(self, model: DiffusionModel, slots: int) -> tuple[Hashable, GraphForwards]:
        """One of at least `slots` slots, beside the one for rows that pad, all empty, with what it
        is given back with."""
        state, free = captured_state(model), []
        while self._free:
            free.append(self._free.popleft())
        # Graphs compute as the model was when they were captured.
        free = sorted((one for one in free if one[0] == state), key=lambda one: one[1].slots)
        fits = next((i for i, one in enumerate(free) if one[1].slots >= slots), None)
        chosen = free.pop(-1 if fits is None else fits) if free else None
        self._free.extend(free)
        if fits is None:
            del chosen  # the largest, too small: before a larger one is made
            return state, GraphForwards(model, model.new_cache(_rounded(slots) + 1))
        assert chosen is not None
        if model.device.type == "cuda":
            # A forward that the last engine started and nobody waited for may still be running.
            torch.cuda.synchronize(model.device)
        chosen[1].cache.clear(0, chosen[1].slots + 1)
        return chosen

    def take_back(self, lent: tuple[Hashable, GraphForwards]) -> None:
        """Keep what an engine needs no more."""
        self._free.append(lent)


_lent: WeakKeyDictionary[DiffusionModel, LentGraphs] = WeakKeyDictionary()


def lent_graphs_of(model: DiffusionModel) -> LentGraphs:
    """Those of a model, shared by its engines."""
    return _lent.setdefault(model, LentGraphs())


def captured_state(model: DiffusionModel) -> Hashable:
    """What a graph of the model rests on besides the values of the weights: where they are, whether
    they are compiled, which adapters and kernels compute."""
    return (
        os.environ.get(KERNELS),
        model.compiled_rows,
        tuple(_addresses([*model.backbone.parameters(), *model.backbone.buffers()])),
        tuple(module.training for module in model.backbone.modules()),
        () if model.adapter is None else tuple(_adapters_on(model)),
    )


def _adapters_on(model: DiffusionModel) -> Iterable[tuple[str, ...]]:
    """Names of those that compute, layer by layer."""
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


def _rounded(slots: int) -> int:
    """Up to an eighth more, so that engines of about the same needs share one."""
    step = 1 << max(0, slots.bit_length() - 4)
    return -(-slots // step) * step
