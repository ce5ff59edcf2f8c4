"""python -m benchmarks.train_step --shape small --length 1024

One training step of D2F (teacher, student, loss, backward, AdamW on the LoRA) on a model with
random weights, in several ways:

    plain       what the reference code does: a dense float mask, all logits of student and teacher,
                the teacher's softmax, soft cross-entropy over the ratio
    ours        as distill.train computes it
    compiled    the same with `compile: true`

All see the same tokens and masks, under autocast as in training where the dtype is not float32; the
losses are printed: ours is the KL, the plain one the cross-entropy, which is larger by the
teacher's entropy. Each measurement is a process of its own, and its first step, which compiles, is
not counted. The peak is that of a later step: on a GPU all that is allocated, on a CPU what the
step takes beyond what is there before it, by the operating system's count. `--repetitions` measures
the ways in turn several times and prints medians; the file has them all. The shape is LLaDA-8B on a
GPU by default and small on a CPU.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import parser
from benchmarks.common import (
    MASK_ID,
    SHAPES,
    RowFile,
    about,
    build,
    default_dtype,
    in_fresh_process,
    peak_bytes,
    seconds,
)
from d2f import noise
from d2f import spans as sp
from d2f.adapters import new_lora
from d2f.model import DiffusionModel
from d2f.spans import block_ends
from distill.config import Data, TrainConfig
from distill.objectives.base import Batch
from distill.objectives.d2f import D2F, D2FOptions
from distill.sharding import compile_layers
from distill.trainer import measure_attention

BLOCK_SIZE = 32
WAYS = ("plain", "ours", "compiled")


def draw(model: DiffusionModel, samples: int, length: int) -> tuple[Batch, Tensor]:
    """Draw samples of one length, a quarter of it prompt, and their mask ratios ``[B, L]``, 0 where
    nothing is masked."""
    rng = np.random.default_rng(0)
    prompt = length // 4
    ids = torch.from_numpy(rng.integers(4, model.vocab_size, (samples, length)))
    ratios = np.zeros((samples, length))
    for row in ratios:
        row[prompt:] = noise.monotone_ratios(length - prompt, BLOCK_SIZE, 0.2, 0.7, rng)
    masked = rng.random(ratios.shape) < ratios
    masked[:, : prompt + 1] = False  # row p - 1 must be in the sample
    ids[torch.from_numpy(masked)] = MASK_ID
    places = torch.from_numpy(np.flatnonzero(masked))
    share = torch.from_numpy(np.where(masked, ratios, 0.0)).float()
    one = sp.block_causal(length, prompt, BLOCK_SIZE)
    batch = Batch(
        input_ids=ids,
        positions=torch.arange(length).expand(samples, -1),
        spans=one.expand(samples, -1, -1, -1).contiguous(),
        teacher_spans=sp.bidirectional(length).expand(samples, -1, -1, -1).contiguous(),
        rows=places - model.logit_shift,
        targets=ids.view(-1)[places],
        weight=1 / share.view(-1)[places] / len(places),
    )
    return batch, share


def ours(model: DiffusionModel, batch: Batch) -> Callable[[], Tensor]:
    """Compute the loss as distill/train.py does."""
    config = TrainConfig(
        objective=D2FOptions(name="d2f", block_size=BLOCK_SIZE),
        output="-",
        init="-",
        steps=1,
        data=Data(tasks={"story": 1.0}),
    )
    objective = D2F(model, config)
    objective.network.train()
    if model.device.type == "cuda":  # as "auto" chooses
        found = measure_attention(model, batch.spans, model.dtype)
        objective.attention = min(found, key=found.__getitem__)
    return lambda: objective.forward(batch)


def plain(model: DiffusionModel, batch: Batch, share: Tensor) -> Callable[[], Tensor]:
    """Compute the loss from dense masks and all logits, by transformers' own attention."""
    model.backbone.set_attn_implementation("sdpa")
    samples, length = share.shape
    ends = torch.from_numpy(block_ends(length, length // 4, BLOCK_SIZE)).to(share.device)
    seen = torch.arange(length, device=share.device)[None] < ends[:, None]
    dense = torch.zeros(samples, 1, length, length, dtype=model.dtype, device=share.device)
    causal = dense.masked_fill(~seen, torch.finfo(model.dtype).min)
    network: Any = model.adapter

    def logits(mask: Tensor) -> Tensor:
        out: Tensor = network(
            input_ids=batch.input_ids, attention_mask=mask, position_ids=batch.positions,
            use_cache=False,
        ).logits  # fmt: skip
        return torch.cat((out[:, :1], out[:, :-1]), 1) if model.logit_shift else out

    def loss() -> Tensor:
        network.eval()
        with torch.no_grad(), model.adapter_disabled():
            target = logits(dense).softmax(-1)
        network.train()
        each = F.cross_entropy(
            logits(causal).transpose(1, 2), target.transpose(1, 2), reduction="none"
        )
        chosen = share > 0
        return (each[chosen] / share[chosen]).mean()

    return loss


def measure(
    way: str, shape: str, samples: int, length: int, dtype: str, checkpointing: bool, repeat: int
) -> dict[str, Any]:
    """Seconds of a step, tokens a second, the first step's loss and the peak in MiB."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = build(shape, getattr(torch, dtype), device)
    model.backbone.requires_grad_(False)
    new_lora(model, r=32, alpha=32, dropout=0.0)
    if checkpointing:
        model.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    batch, share = draw(model, samples, length)
    batch, share = batch.to(torch.device(device)), share.to(device)
    if way == "compiled":
        compile_layers(model.backbone)
    loss = plain(model, batch, share) if way == "plain" else ours(model, batch)
    autocast = torch.autocast(device, model.dtype, enabled=model.dtype != torch.float32)
    assert model.adapter is not None
    trained = [p for p in model.adapter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    losses = []

    def step() -> None:
        with autocast:
            found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(found.detach())

    step()
    peak = peak_of(step, device)
    took = seconds(step, device, repeat)
    return {
        "seconds": took,
        "tokens_per_second": samples * length / took,
        "loss": losses[0].item(),
        "peak_mib": peak / 2**20,
    }


def peak_of(step: Callable[[], None], device: str) -> int:
    """Bytes that a step takes at its peak: on a CPU beyond what was held before it."""
    gc.collect()
    # What the C library keeps of freed memory would be taken again without being counted.
    if device == "cpu" and sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    before = peak_bytes(device, reset=True)
    step()
    return peak_bytes(device) - (before if device == "cpu" else 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    given = parser(__doc__)
    large = "LLaDA-8B" if torch.cuda.is_available() else "small"
    given.add_argument("--shape", default=large, choices=SHAPES)
    given.add_argument("--samples", type=int, default=1, help="sequences in a step")
    given.add_argument("--length", type=int, default=1024, help="tokens of each")
    given.add_argument("--dtype", default=default_dtype())
    given.add_argument("--checkpointing", action="store_true", help="of activations")
    given.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    given.add_argument("--repeat", type=int, default=5, help="steps in a measurement")
    given.add_argument("--repetitions", type=int, default=1, help="measurements of each way")
    given.add_argument("--json", type=Path, help="file for the numbers")
    options = given.parse_args(arguments)
    facts = about(options.dtype)
    print(
        f"{facts['device']}, {options.dtype}, torch {facts['torch']}; {options.shape}, "
        f"{options.samples} x {options.length} tokens, blocks of {BLOCK_SIZE}"
        f"{', gradient checkpointing' if options.checkpointing else ''}"
    )
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    sizes = {k: v for k, v in vars(options).items() if k != "json"}
    file = RowFile(options.json, {**facts, **sizes})
    for _ in range(options.repetitions):
        for way in options.ways:
            one = in_fresh_process(
                measure, way, options.shape, options.samples, options.length, options.dtype,
                options.checkpointing, options.repeat,
            )  # fmt: skip
            if one is None:
                print(f"{way:<9} no memory", flush=True)
                file.add({"way": way, "no memory": True})
                continue
            file.add({"way": way, **one})
            found[way].append(one)
            print_row(way, [one])
    if options.repetitions > 1:
        print(f"medians of {options.repetitions}")
        for way in options.ways:
            print_row(way, found[way])
    return 0


def print_row(way: str, measured: list[dict[str, Any]]) -> None:
    """Print a way's medians in a line, if it has any."""
    if measured:
        middle = {key: statistics.median(one[key] for one in measured) for key in measured[0]}
        print(
            f"{way:<9}{middle['seconds']:>8.3f} s a step"
            f"{middle['tokens_per_second']:>9.0f} tokens/s{middle['peak_mib']:>9.0f} MiB"
            f"   loss {middle['loss']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
