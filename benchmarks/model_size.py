"""What a model's forward must read and compute, from its shape alone: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import d2f
from benchmarks.shapes import SHAPES, build
from d2f.model import DiffusionModel
from d2f.quantize import QUANTISATIONS
from distill.check import NF4, is_linear

# Bytes a weight of the layers' matrices; what is left in bf16 is the rest of the model. int8 and
# fp8 have a scale a row, too little to count; int4 a scale and a zero in bf16 for each 128 weights.
PRECISIONS = {"bf16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128, "nf4": NF4}
# As `--quantize` calls them.
QUANTIZED = {"int8": "int8-weight", "fp8": "fp8", "int4": "int4-weight", "nf4": "nf4"}
REST = 2  # bytes of every other number: embedding, output head, norms, keys and values


@dataclass(frozen=True)
class Gpu:
    """bytes: of memory. bandwidth: bytes a second. flops: dense bf16 operations a second. All as
    NVIDIA's data sheet has them. capability: the compute capability."""

    bytes: float
    bandwidth: float
    flops: float
    capability: tuple[int, int]

    def precisions(self) -> list[str]:
        """Those of `PRECISIONS` that it has."""
        least = {name: QUANTISATIONS[QUANTIZED[name]].capability for name in QUANTIZED}
        return [name for name in PRECISIONS if (least.get(name) or (0, 0)) <= self.capability]


GPUS = {
    "H100": Gpu(80e9, 3.35e12, 989e12, (9, 0)),  # SXM
    "A100": Gpu(80e9, 2.039e12, 312e12, (8, 0)),  # SXM, 80 GB
    "RTX4090": Gpu(24e9, 1.008e12, 165e12, (8, 9)),
}
USABLE = 0.9  # of a GPU's memory: the rest is for activations, logits and the driver


@dataclass(frozen=True)
class ModelSize:
    """Counts of numbers. linear: the layers' matrices. head: the output head, also where it is the
    embedding's table, which is the other one. slot: keys and values of one position."""

    linear: int
    head: int
    table: int
    norms: int
    slot: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int

    def weights(self, precision: str, gpus: int = 1) -> float:
        """Bytes on each of so many GPUs, as transformers' plan for tensor parallel shares them:
        matrices and head in parts, table and norms whole."""
        split = self.linear * PRECISIONS[precision] + REST * self.head
        return split / gpus + REST * (self.table + self.norms)

    def read(self, precision: str, gpus: int = 1) -> float:
        """Bytes of weights that each GPU reads in a forward: of the table only the rows fed."""
        return self.weights(precision, gpus) - REST * self.table

    def flops(self, rows: int, gpus: int = 1) -> float:
        """Operations of a forward in the layers' matrices, on each GPU; attention and the head,
        which only reads some rows, come on top."""
        return 2.0 * self.linear * rows / gpus

    def floor_ms(
        self, gpu: Gpu, rows: int, cached: int = 0, precision: str = "bf16", gpus: int = 1
    ) -> float:
        """No forward can be faster: the longer of reading weights and `cached` slots once, and of
        computing in bf16. Traffic between GPUs comes on top."""
        read = self.read(precision, gpus) + REST * self.slot * cached / gpus
        return 1e3 * max(read / gpu.bandwidth, self.flops(rows, gpus) / gpu.flops)

    def free_rows(self, gpu: Gpu, precision: str = "bf16") -> float:
        """Rows from which a forward's arithmetic takes longer than reading its weights."""
        return self.read(precision) / gpu.bandwidth * gpu.flops / self.flops(1)

    def requests(self, gpu: Gpu, length: int, precision: str = "bf16", gpus: int = 1) -> int:
        """How many requests of so many positions each have room on each GPU beside the weights."""
        left = USABLE * gpu.bytes - self.weights(precision, gpus)
        return max(0, int(left / (REST * self.slot * length / gpus)))

    @property
    def sums(self) -> int:
        """Sums over all GPUs in a tensor-parallel forward: behind attention and MLP of a layer."""
        return 2 * self.layers

    def summed(self, rows: int) -> int:
        """Bytes that each GPU puts into one of them."""
        return REST * rows * self.hidden


def size_of(name: str) -> ModelSize:
    """Of a shape in `benchmarks.shapes`, or of a checkpoint, whose weights are not read. Raises
    InputError."""
    if name in SHAPES:
        return measured(build(name, torch.bfloat16, "meta"))
    return measured(d2f.load(name, device="meta"))


def measured(model: DiffusionModel) -> ModelSize:
    """Of a model, on the meta device or any other."""
    config = model.backbone.config
    counts = {name: p.numel() for name, p in model.backbone.named_parameters()}
    linear = sum(count for name, count in counts.items() if is_linear(name))
    table = model.backbone.get_input_embeddings().weight
    head = model.backbone.get_output_embeddings().weight
    tied = table is head
    keys = model.new_cache(1).layers
    return ModelSize(
        linear=linear,
        head=head.numel(),
        table=0 if tied else table.numel(),
        norms=sum(counts.values()) - linear - head.numel() - (0 if tied else table.numel()),
        slot=sum(x.numel() for layer in keys for x in layer),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
    )
