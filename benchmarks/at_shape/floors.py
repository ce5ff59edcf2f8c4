"""What a forward cannot be faster than on this CPU: its bytes over the measured memory bandwidth,
and its multiplications over the measured rate of a large product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from benchmarks.decode_step import bandwidth, buffer_bytes, seconds
from benchmarks.shapes import build
from d2f.model import DiffusionModel
from decode.cli import stored_tensors

SIDE = 1024  # inputs and outputs of the layer whose product is timed
ROWS = (1, 16, 64, 256, 1024)


@dataclass
class Machine:
    """Rates of this CPU with the threads that torch has now, each measured when it is first asked
    for."""

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second: the higher of reading a large buffer and of copying one (read and
        written)."""
        source = torch.ones(buffer_bytes("cpu") // 4)
        reading = source.nbytes / seconds(lambda: source.sum(), "cpu", 10)
        return max(reading, bandwidth("cpu"))

    @cached_property
    def _rates(self) -> dict[torch.dtype, float]:
        return {}

    def rate(self, dtype: torch.dtype) -> float:
        """Operations (a multiplication and an addition are two) a second of a linear layer of
        1,024 x 1,024, at the best of `ROWS` rows."""
        if dtype not in self._rates:
            product = torch._int_mm if dtype == torch.int8 else torch.mm
            weight = torch.ones(SIDE, SIDE).to(dtype).t()  # as a linear layer has it
            found = []
            for rows in ROWS:
                x = torch.ones(rows, SIDE).to(dtype)
                taken = seconds(lambda x=x: product(x, weight), "cpu", 3)
                found.append(2 * rows * SIDE**2 / taken)
            self._rates[dtype] = max(found)
        return self._rates[dtype]

    def facts(self) -> dict[str, float]:
        """What was measured."""
        rates = {
            f"{str(dtype).removeprefix('torch.')}_operations_per_second": rate
            for dtype, rate in self._rates.items()
        }
        return {"bytes_per_second": self.bandwidth, **rates}


@dataclass(frozen=True)
class Work:
    """What a forward of a model must do. weights: bytes that every forward reads, all but the table
    of embeddings. slot: bytes of keys and values of a position. layers, head: weights of the linear
    layers that a row meets, and of the output head. attention: operations of a row and a key."""

    weights: int
    slot: int
    layers: int
    head: int
    attention: int
    dtype: torch.dtype
    products: torch.dtype  # of the linear layers

    @staticmethod
    def of(model: DiffusionModel, shape: str) -> Work:
        """The work of a model that `build_by_layers` made."""
        config = model.backbone.config
        backbone = build(shape, model.dtype, "meta").backbone  # whose layers are not quantised
        linear = [m.weight.numel() for m in backbone.model.modules() if isinstance(m, nn.Linear)]
        stored = sum(x.nbytes for _, x in stored_tensors(model.backbone.state_dict()))
        return Work(
            weights=stored - model.backbone.model.embed_tokens.weight.nbytes,
            slot=sum(x.nbytes for layer in model.new_cache(1).layers for x in layer),
            layers=sum(linear),
            head=backbone.lm_head.weight.numel(),
            attention=4 * config.hidden_size * config.num_hidden_layers,
            dtype=model.dtype,
            products=torch.int8 if model.quantized == "int8" else model.dtype,
        )

    def floor(self, machine: Machine, rows: int, cached: int) -> tuple[float, float]:
        """Milliseconds of the bytes, and of the operations, of a forward of `rows` rows behind
        `cached` ones, of which each sees all."""
        moved = self.weights + self.slot * (cached + rows)
        plain = 2 * rows * self.head + self.attention * rows * (cached + rows)
        operations = plain / machine.rate(self.dtype)
        operations += 2 * rows * self.layers / machine.rate(self.products)
        return 1e3 * moved / machine.bandwidth, 1e3 * operations
