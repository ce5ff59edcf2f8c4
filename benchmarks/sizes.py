"""python -m benchmarks.sizes

What models take and what to expect of them on a GPU, by arithmetic from shapes and data sheets:
memory, requests that fit, and the least that a forward takes. Nothing is measured, no weights are
read. GB are 1e9 bytes. The tables of docs/performance.md are written from it by
`python -m benchmarks.tables`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import d2f
from benchmarks import parser
from benchmarks.common import SHAPES, build
from d2f.model import DiffusionModel
from d2f.quantize import QUANTISATIONS
from decode.report import markdown_table

# Bytes a weight of the layers' matrices; what is left in bf16 is the rest of the model. int8 and
# fp8 have a scale a row, too little to count; int4 a scale and a zero in bf16 for each 128 weights,
# nf4 a scale in fp32 for each 64, itself quantised.
PRECISIONS = {"bf16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128, "nf4": 0.5 + 1 / 64}
QUANTIZED = {"int8": "int8-weight", "fp8": "fp8", "int4": "int4-weight", "nf4": "nf4"}
REST = 2  # bytes of every other number: embedding, output head, norms, keys and values
USABLE = 0.9  # of a GPU's memory: the rest is for activations, logits and the driver
MODELS = ("LLaDA-8B", "Dream-7B")
LENGTHS = (1024, 4096)
CACHED, REQUEST_ROWS = 1024, 64  # of a D2F request with two open blocks of 32


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet: bytes of memory, bytes a second, dense bf16 operations a second, and the
    compute capability."""

    bytes: float
    bandwidth: float
    flops: float
    capability: tuple[int, int]

    def precisions(self) -> list[str]:
        """The precisions that it has."""
        least = {name: QUANTISATIONS[QUANTIZED[name]].capability for name in QUANTIZED}
        return [name for name in PRECISIONS if (least.get(name) or (0, 0)) <= self.capability]


GPUS = {
    "H100": Gpu(80e9, 3.35e12, 989e12, (9, 0)),  # SXM
    "A100": Gpu(80e9, 2.039e12, 312e12, (8, 0)),  # SXM, 80 GB
    "RTX4090": Gpu(24e9, 1.008e12, 165e12, (8, 9)),
}


@dataclass(frozen=True)
class Size:
    """How many numbers a model has.

    linear: the layers' matrices. head: the output head. table: the embedding, 0 where the head is
    the same. slot: keys and values of one position.
    """

    linear: int
    head: int
    table: int
    norms: int
    slot: int

    def weights(self, precision: str) -> float:
        """Bytes of all weights."""
        return self.linear * PRECISIONS[precision] + REST * (self.head + self.table + self.norms)

    def read(self, precision: str) -> float:
        """Bytes of weights that a forward reads: of the embedding only the rows fed."""
        return self.weights(precision) - REST * self.table

    def floor_ms(self, gpu: Gpu, rows: int, cached: int, precision: str) -> float:
        """The longer of reading weights and cache once, and of computing in bf16."""
        read = self.read(precision) + REST * self.slot * cached
        return 1e3 * max(read / gpu.bandwidth, 2.0 * self.linear * rows / gpu.flops)

    def free_rows(self, gpu: Gpu, precision: str) -> float:
        """Rows from which a forward's arithmetic takes longer than reading its weights."""
        return self.read(precision) / gpu.bandwidth * gpu.flops / (2.0 * self.linear)

    def requests(self, gpu: Gpu, length: int, precision: str) -> int:
        """Requests of so many positions that have room beside the weights."""
        left = USABLE * gpu.bytes - self.weights(precision)
        return max(0, int(left / (REST * self.slot * length)))


def size_of(name: str) -> Size:
    """Count a shape of `benchmarks.common`, or a checkpoint, whose weights are not read."""
    if name in SHAPES:
        return count(build(name, torch.bfloat16, "meta"))
    return count(d2f.load(name, device="meta"))


def count(model: DiffusionModel) -> Size:
    """Count a model's numbers."""
    table = model.backbone.get_input_embeddings().weight
    head = model.backbone.get_output_embeddings().weight
    own = 0 if table is head else table.numel()
    total = sum(p.numel() for p in model.backbone.parameters())
    matrices = [m for m in model.backbone.model.modules() if isinstance(m, torch.nn.Linear)]
    linear = sum(layer.weight.numel() for layer in matrices)
    keys = model.new_cache(1).layers
    return Size(
        linear=linear,
        head=head.numel(),
        table=own,
        norms=total - linear - head.numel() - own,
        slot=sum(x.numel() for layer in keys for x in layer),
    )


def weights_table(models: Sequence[str] = MODELS) -> str:
    """Weights by precision, and what a position of the cache takes."""
    rows = []
    for name in models:
        size = size_of(name)
        cells = [f"{size.weights(precision) / 1e9:.3g}" for precision in PRECISIONS]
        slot = REST * size.slot
        cache = [f"{slot * length / 1e9:.2g}" for length in LENGTHS]
        rows.append([name, *cells, f"{slot / 1e3:.3g}", *cache])
    heads = [f"weights, {precision}, GB" for precision in PRECISIONS]
    caches = [f"{length:,} positions, GB" for length in LENGTHS]
    return "\n".join(markdown_table(("model", *heads, "a slot, KB", *caches), rows))


def decoding_table(models: Sequence[str] = MODELS) -> str:
    """Requests that fit on each GPU, the least that a forward takes, and how many rows and requests
    are nearly free."""
    rows = []
    for gpu_name, gpu in GPUS.items():
        for name in models:
            size = size_of(name)
            for precision in gpu.precisions():
                fits = [size.requests(gpu, length, precision) for length in LENGTHS]
                free = size.free_rows(gpu, precision)
                most = min(int(free / REQUEST_ROWS), fits[0])
                one, all_of_them = (
                    f"{size.floor_ms(gpu, n * REQUEST_ROWS, n * CACHED, precision):.2g}"
                    for n in (1, most)
                )
                cells = [*(f"{n:,}" for n in fits), one, f"{free:.0f}", str(most)]
                rows.append([gpu_name, name, precision, *cells, all_of_them if most else "-"])
    heads = (
        "GPU",
        "model",
        "weights",
        *(f"requests of {length:,} positions" for length in LENGTHS),
        f"forward of {REQUEST_ROWS} rows, ms at least",
        "rows nearly free",
        f"requests of {REQUEST_ROWS} rows",
        "their forward, ms at least",
    )
    return "\n".join(markdown_table(heads, rows))


def main() -> None:
    """Print both tables."""
    given = parser(__doc__)
    given.add_argument("--models", nargs="+", default=MODELS, help="shapes, or checkpoints")
    models = given.parse_args().models
    print(f"{weights_table(models)}\n\n{decoding_table(models)}")


if __name__ == "__main__":
    main()
