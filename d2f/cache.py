"""Cache keys and values in slots that a forward pass overwrites.

Fed positions are rewritten, others stay. There is no commit operation: a block is cached exactly by
feeding it once more with its final tokens and then no longer. D2F with a prompt of 2 and a block of
2 (positions 2 and 3), whose two masks are decided one a forward::

    forward    feeds positions    slots 0 1 2 3 then hold the keys and values of
    1          0 1 2 3            p p m m
    2              2 3            p p a m
    3              2 3            p p a b     final: not fed again, so they are cached
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from triton_kernels.span_attention import write_slots


class SlotCache:
    """Hold the flat key and value buffers of one model; transformers' ``past_key_values``.

    Set `slots` (int64 ``[T]``, one slot a fed row) before each forward. Each layer writes its rows'
    keys and values there and attends over the whole buffer ``[1, H_kv, S, D]``. heads: H_kv where
    this process has only a part of the model.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        heads: int | None = None,
    ):
        heads = heads or config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (1, heads, slots, dim)
        # Zeros: a slot that a row does not see has a weight of 0, and 0 times a NaN that happened
        # to lie there is NaN.
        self.layers = [
            (_zeros(shape, dtype, device), _zeros(shape, dtype, device))
            for _ in range(config.num_hidden_layers)
        ]
        self.slots: Tensor | None = None

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write rows ``[1, H_kv, T, D]`` to their slots; return the layer's whole buffers."""
        if self.slots is None:
            raise RuntimeError("SlotCache.slots must be set before a forward")
        k, v = self.layers[layer_idx]  # [1, H_kv, S, D]
        write_slots(k[0], v[0], self.slots, keys[0], values[0])
        return k, v

    def clear(self, start: int, stop: int) -> None:
        """Set the slots ``[start, stop)`` to 0. A failed request may leave a NaN there, and the
        next one to have the slots would meet it even where it is masked: 0 times NaN is NaN."""
        for k, v in self.layers:
            k[:, :, start:stop] = 0
            v[:, :, start:stop] = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the slots `source` (int64 ``[N]``) to the slots `target`."""
        first, _ = self.layers[0]  # any buffer: all are on one device
        source, target = source.to(first.device), target.to(first.device)
        for buffers in self.layers:
            for buffer in buffers:
                buffer[:, :, target] = buffer[:, :, source]

    def get_seq_length(self, *args: object) -> int:
        """Return 0: positions are given with every forward."""
        return 0


class SlotPool:
    """Give requests contiguous runs of slots, first fit::

    10 slots         0 1 2 3 4 5 6 7 8 9
    allocate(4)      a a a a . . . . . .    0
    allocate(3)      a a a a b b b . . .    4
    free(0)          . . . . b b b . . .
    allocate(5)                             None: it waits until b is done
    allocate(2)      c c . . b b b . . .    0
    """

    def __init__(self, slots: int):
        self.slots = slots
        self._used: dict[int, int] = {}  # start -> stop

    def allocate(self, count: int) -> int | None:
        """Take a run of `count` slots; return its first, or None where none is free now.

        Raises ValueError if `count` could never fit.
        """
        if not 0 < count <= self.slots:
            raise ValueError(f"a request of {count} slots cannot fit in a cache of {self.slots}")
        start = 0
        for used, stop in sorted(self._used.items()):
            if used - start >= count:  # the gap before this run suffices
                break
            start = stop
        if start + count > self.slots:
            return None
        self._used[start] = start + count
        return start

    @property
    def used(self) -> int:
        """Count the slots that are taken."""
        return sum(stop - start for start, stop in self._used.items())

    def end(self, start: int) -> int:
        """Return the end of the run that begins at `start`."""
        return self._used[start]

    def free(self, start: int) -> None:
        """Give back the run that begins at `start`."""
        del self._used[start]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of zeros; on a CPU it takes memory only where it is written to, unlike that of
    torch.zeros, so that a cache for long requests costs nothing until they come."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size, line = math.prod(shape) * dtype.itemsize, 64
    data = np.zeros(size + line, dtype=np.int8)  # as numpy has no bf16
    start = -data.ctypes.data % line  # vectors then lie within cache lines
    return torch.from_numpy(data[start : start + size]).view(dtype).view(shape)
