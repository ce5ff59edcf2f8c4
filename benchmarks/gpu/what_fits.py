"""python -m benchmarks.gpu.what_fits

What a model takes and what to expect of it on one GPU, by arithmetic from shapes and data sheets:
nothing is measured, no weights are read. The tables of docs/gpu.md; GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

MODELS = ("LLaDA-8B", "Dream-7B")
CONFIGS = {"LLaDA-8B": "llada-8b-d2f", "Dream-7B": "dream-7b-d2f"}
LENGTHS = (1024, 4096)  # positions of a request, and tokens of a training step
CACHED = 1024  # a request, in a forward
REQUEST_ROWS = 64  # a D2F request with two open blocks of 32
MASKED = 0.5  # of a training sample's tokens, which the loss reads


def weights_and_cache() -> list[str]:
    """Weights by precision, and what a position of the cache takes."""
    from benchmarks.scaling import weights_table

    return weights_table(MODELS)


def decoding() -> list[str]:
    """For every GPU, model and precision: requests that fit, the least that a forward takes, and
    how many rows and requests are nearly free."""
    from benchmarks.model_size import GPUS, size_of
    from decode.report import markdown_table

    rows = []
    for gpu_name, gpu in GPUS.items():
        for model in MODELS:
            size, cells = size_of(model), {}
            for precision in gpu.precisions():
                if precision == "nf4":  # what int4 is, to a hundredth
                    continue
                fits = [size.requests(gpu, length, precision) for length in LENGTHS]
                free = size.free_rows(gpu, precision)
                most = min(int(free / REQUEST_ROWS), fits[0])
                least = [size.floor_ms(gpu, n * REQUEST_ROWS, n * CACHED, precision)
                         for n in (1, most)]  # fmt: skip
                cells[precision] = [
                    *(f"{n:,}" for n in fits), f"{least[0]:.2g}", f"{free:.0f}", str(most),
                    f"{least[1]:.2g}" if most else "-",
                ]  # fmt: skip
            alike = {
                tuple(found): [n for n in cells if cells[n] == found] for found in cells.values()
            }
            rows += [
                [gpu_name, model, " or ".join(names), *found] for found, names in alike.items()
            ]
    lengths = (f"requests of {length:,} positions" for length in LENGTHS)
    heads = (
        "GPU", "model", "weights", *lengths, f"forward of {REQUEST_ROWS} rows, ms at least",
        "rows nearly free", f"requests of {REQUEST_ROWS} rows", "their forward, ms at least",
    )  # fmt: skip
    return markdown_table(heads, rows)


def training() -> list[str]:
    """Memory of a step of the shipped D2F training, estimated as `distill.train --check` does."""
    import torch

    from benchmarks.shapes import build
    from d2f.adapters import new_lora
    from decode.report import markdown_table
    from distill.check import estimate
    from distill.config import read_config

    rows = []
    for model_name, config_name in CONFIGS.items():
        for base in ("none", "4bit"):
            config = read_config(config_name, ["--quantize", base] if base != "none" else [])
            model = build(model_name, torch.bfloat16, "meta")
            lora = config.objective.trained_lora
            new_lora(model, r=lora.r, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets)
            cells = []
            for tokens in LENGTHS:
                memory = estimate(model, config, tokens, int(MASKED * tokens))
                cells += [f"{memory.total(kept) / 1e9:.3g}" for kept in (True, False)]
            rows.append([model_name, "bf16" if base == "none" else "nf4", *cells])
    heads = (f"{length:,} tokens{how}, GB" for length in LENGTHS for how in (", checkpointed", ""))
    return markdown_table(("model", "base", *heads), rows)


def tables() -> Iterator[tuple[str, list[str]]]:
    """Every table with its title."""
    yield "Weights and cache", weights_and_cache()
    yield f"Decoding on {CACHED:,} cached positions a request", decoding()
    yield "Training an adapter by D2F, a process", training()


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.what_fits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    for title, lines in tables():
        print(f"{title}\n", *lines, "", sep="\n")


if __name__ == "__main__":
    main()
