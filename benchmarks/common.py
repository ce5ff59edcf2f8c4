"""What the benchmarks share: shapes of random models, timing, peak memory, and a file of rows."""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from d2f.contract import Contract
from d2f.files import write_beside
from d2f.model import DiffusionModel
from decode import report
from triton_kernels.dispatch import triton

MASK_ID = 3


def _shape(
    vocabulary: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    kind: type[PretrainedConfig] = LlamaConfig,
) -> Callable[[], PretrainedConfig]:
    return lambda: kind(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
    )


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "LLaDA-8B": _shape(126464, 4096, 12288, 32, 32, 32),
    "Dream-7B": _shape(152064, 3584, 18944, 28, 28, 4, kind=Qwen2Config),
    # LLaDA's architecture with about 1.5 B weights; the numbers are this project's choice.
    "llada-1b": _shape(126464, 2048, 5634, 22, 32, 4),
    # LLaDA-8B with every width and the vocabulary divided by eight, and four layers: for a CPU.
    "LLaDA-8B/8": _shape(15808, 512, 1536, 4, 4, 4),
    # Small, with a vocabulary of the usual size, which is then most of it.
    "small": _shape(32000, 256, 768, 4, 4, 4),
    "tiny": _shape(300, 64, 128, 2, 4, 2),
}


def device() -> str:
    """Return the device to measure: the first GPU, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype() -> str:
    """bfloat16 on a GPU, float32 on a CPU."""
    return "bfloat16" if torch.cuda.is_available() else "float32"


def default_shapes() -> list[str]:
    """Large shapes on a GPU, small ones on a CPU."""
    return ["LLaDA-8B", "Dream-7B"] if torch.cuda.is_available() else ["tiny", "small"]


def build(shape: str, dtype: torch.dtype, device: str) -> DiffusionModel:
    """Make a model of a shape with random weights."""
    config = SHAPES[shape]()
    config._attn_implementation = "span"
    with torch.device(device):
        backbone = AutoModelForCausalLM.from_config(config, dtype=dtype)
    llada = isinstance(config, LlamaConfig)
    contract = Contract(
        family="llada" if llada else "dream",
        mask_id=MASK_ID,
        end_ids=(2,),
        logit_shift=0 if llada else 1,
        rope_fp32=llada,
        prompt_rule="bidirectional",
    )
    return DiffusionModel(backbone.eval(), contract)


def bytes_needed(model: DiffusionModel, rows: int, cached: int) -> int:
    """Count the bytes that one forward must read: all weights but the embedding's table, and the
    keys and values of all positions."""
    backbone = model.backbone
    weights = sum(p.numel() * p.element_size() for p in backbone.parameters())
    table = backbone.model.embed_tokens.weight
    slot = sum(x.numel() * x.element_size() for layer in model.new_cache(1).layers for x in layer)
    return weights - table.numel() * table.element_size() + slot * (cached + rows)


def about(dtype: str) -> dict[str, Any]:
    """Say what the numbers were measured on."""
    threads = f"cpu, {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else threads,
        "dtype": dtype,
        "torch": torch.__version__,
        "triton": triton and triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def seconds(run: Callable[[], object], device: str, repeat: int) -> float:
    """Median wall time of a call, waited for, after three that are not counted."""
    times = []
    for i in range(repeat + 3):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if i >= 3:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def milliseconds(run: Callable[[], object], device: str, repeat: int) -> float:
    """Median of `repeat` calls after three that are not counted; on a GPU by its own clock."""
    if device != "cuda":
        return 1e3 * seconds(run, device, repeat)
    for _ in range(3):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for began, ended in pairs:
        began.record()
        run()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(began.elapsed_time(ended) for began, ended in pairs)


def replayed_milliseconds(
    run: Callable[[int], object], copies: int, device: str, repeat: int
) -> float:
    """Milliseconds of a call that may take microseconds: run(0) to run(copies - 1) one after the
    other, the median of `repeat` times, divided by `copies`. On a GPU they are one CUDA graph, so
    Python's launches are not timed."""

    def once() -> None:
        for i in range(copies):
            run(i)

    if device != "cuda":
        return milliseconds(once, device, repeat) / copies
    once()  # compiles what a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return milliseconds(graph.replay, device, repeat) / copies


def copies_beyond_cache(size: int, device: str) -> int:
    """Copies of `size` bytes that a GPU's L2 cache does not hold, so that each is read from memory
    when they take turns; two on a CPU."""
    if device != "cuda":
        return 2
    return max(3, 1 + 4 * torch.cuda.get_device_properties(device).L2_cache_size // size)


def peak_bytes(device: str, *, reset: bool = False) -> int:
    """Most bytes that this process has held, on a CPU by the operating system's count.

    reset: count from what is held now.
    """
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if reset:
        report.reset_peak([os.getpid()])
    return report.peak_bytes([os.getpid()]) or 0


def in_fresh_process(
    measure: Callable[..., dict[str, Any]], *arguments: Any
) -> dict[str, Any] | None:
    """Call measure(*arguments) in a process of its own, so that its memory is its own; None where
    the GPU's memory did not suffice."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, *arguments).result()
        except torch.cuda.OutOfMemoryError:
            return None


class RowFile:
    """Rows of a benchmark beside the facts that hold for all of them, as
    ``{**facts, "measured": [row, ...]}`` in `path` (None: nowhere). Whole after each row."""

    def __init__(self, path: Path | None, facts: dict[str, Any]):
        self.path, self.facts = path, facts
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Add a row and write the file."""
        self.rows.append(row)
        if self.path is not None:
            write_beside(self.path, json.dumps({**self.facts, "measured": self.rows}) + "\n")
