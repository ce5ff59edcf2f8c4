"""python -m benchmarks.scaling

Memory and floors by arithmetic, from models' shapes and GPUs' data sheets: the tables of
docs/scaling.md. Nothing is measured and no weights are read. GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from d2f.errors import InputError

LARGE = ("LLaDA-8B", "Dream-7B")
TINY = "tiny-d2f"
LENGTHS = (512, 1024, 4096)
ROWS = (1, 32, 128, 512)
CACHED = 1024
COUNTS = (1, 2, 4, 8)


def weights_table(models: Sequence[str]) -> list[str]:
    """Weights, and what a position of the cache takes."""
    from benchmarks.model_size import PRECISIONS, REST, size_of

    rows = []
    for name in models:
        size = size_of(name)
        cells = [f"{size.weights(precision) / 1e9:.3g}" for precision in PRECISIONS]
        slot = REST * size.slot
        cache = [f"{slot * length / 1e9:.2g}" for length in LENGTHS]
        rows.append([name, *cells, f"{slot / 1e3:.3g}", *cache])
    heads = [f"weights, {precision}, GB" for precision in PRECISIONS]
    caches = [f"{length:,} positions, GB" for length in LENGTHS]
    return _table(("model", *heads, "a slot, KB", *caches), rows)


def room_table(models: Sequence[str]) -> list[str]:
    """Requests that fit on one GPU beside the weights."""
    from benchmarks.model_size import GPUS, PRECISIONS, size_of

    memories = {gpu.bytes: gpu for gpu in GPUS.values()}  # those of one size are alike here
    rows = []
    for name in models:
        size = size_of(name)
        for memory, gpu in memories.items():
            for precision in PRECISIONS:
                fits = [f"{size.requests(gpu, length, precision):,}" for length in LENGTHS]
                rows.append([name, f"{memory / 1e9:g} GB", precision, *fits])
    return _table(("model", "GPU of", "weights", *(f"of {n:,} positions" for n in LENGTHS)), rows)


def floor_table(models: Sequence[str]) -> list[str]:
    """The least that a forward takes."""
    from benchmarks.model_size import GPUS, size_of

    rows = []
    for name in models:
        size = size_of(name)
        for gpu_name, gpu in GPUS.items():
            for precision in gpu.precisions():
                times = [f"{size.floor_ms(gpu, n, CACHED, precision):.2g}" for n in ROWS]
                free = size.free_rows(gpu, precision)
                rows.append([name, gpu_name, precision, *times, f"{free:.0f}"])
    heads = (f"rows {n}, ms" for n in ROWS)
    return _table(("model", "GPU", "weights", *heads, "arithmetic is longer from"), rows)


def parallel_table(models: Sequence[str], gpu_name: str) -> list[str]:
    """The same GPUs as replicas and as one tensor-parallel group."""
    from benchmarks.model_size import GPUS, size_of

    gpu, rows = GPUS[gpu_name], []
    for name in models:
        size = size_of(name)
        for count in COUNTS:
            if size.heads % count or size.kv_heads % count:
                why = f"{size.heads} heads over {size.kv_heads} do not divide"
                rows.append([name, str(count), why, *[""] * 5])
                continue
            one, all_ = (size.floor_ms(gpu, ROWS[1], CACHED, gpus=n) for n in (1, count))
            rows.append(
                [
                    name,
                    str(count),
                    f"{size.weights('bf16', count) / 1e9:.3g}",
                    f"{size.requests(gpu, 1024, gpus=count):,}",
                    f"{all_:.2g}",
                    f"{1e3 / all_:,.0f}",
                    f"{count * 1e3 / one:,.0f}",
                    f"{size.sums} of {size.summed(ROWS[1]) / 1e3:.0f} KB",
                ]
            )
    heads = (
        "model", "GPUs", "weights on each, GB", "requests of 1,024 in the group", "forward, ms",
        "forwards/s in the group", "forwards/s of replicas", "sums over GPUs a forward",
    )  # fmt: skip
    return _table(heads, rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    from decode.report import markdown_table

    return markdown_table(columns, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models", nargs="+", default=list(LARGE), metavar="NAME",
        help=f"shapes of benchmarks.shapes or folders (default {' '.join(LARGE)}); {TINY} stands "
        "beside them in the first table",
    )  # fmt: skip
    models = parser.parse_args(arguments).models
    under = f"{CACHED:,} cached slots"
    try:
        titled = {
            "Memory": weights_table([*models, TINY]),
            "Requests that fit (90 % of the memory, cache in bf16)": room_table(models),
            f"Floor of a forward on {under} (estimated)": floor_table(models),
            f"{ROWS[1]} rows on {under}, H100, bf16 (estimated, without the sums)": parallel_table(
                models, "H100"
            ),
        }
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for title, lines in titled.items():
        print(f"{title}\n", *lines, "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
