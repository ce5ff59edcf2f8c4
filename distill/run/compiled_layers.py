"""The decoder layers of a training through `torch.compile`, one by one: norms, RoPE and the MLP's
products with their neighbours in fewer passes, and less kept for the backward pass.

    embeddings | layer: norm, q k v, RoPE | attention | o, norm, MLP | next layer ... | norm, loss
                        compiled            as it is    compiled

All layers but the last share their graphs. Attention stays outside (`TrainingPlan`), and so do the
embeddings and the loss, which is computed in tiles of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from d2f.errors import CompileError, InputError
from distill.run import sharding

# Dropout draws from torch's generator, as without: the same curve, and the same after a resume.
_OPTIONS: dict[str, Any] = {"fallback_random": True}


def compile_layers(backbone: PreTrainedModel) -> None:
    """Have the layers compiled when a step first needs them, in place: their names, their weights
    and what wraps them stay."""
    *layers, last = backbone.model.layers
    for layer in layers:
        layer.compile(dynamic=False, options=_OPTIONS)  # a run's rows are all of one length
    last.compile(options=_OPTIONS)  # but how many of its places are read changes from step to step


@contextmanager
def as_they_are(backbone: PreTrainedModel) -> Iterator[None]:
    """Within it the layers run uncompiled: an evaluation has forwards of many lengths, and every
    one would be compiled anew. Attention that is compiled by itself stays so."""
    layers = list(backbone.model.layers)
    kept = [layer._compiled_call_impl for layer in layers]  # what `Module.compile` sets
    try:
        for layer in layers:
            layer._compiled_call_impl = None
        yield
    finally:
        for layer, compiled in zip(layers, kept, strict=True):
            layer._compiled_call_impl = compiled


def check_compile(accelerator: Accelerator) -> None:
    """Raise InputError for a run whose layers are not compiled: its weights are sharded. Raise
    CompileError where `torch.compile` does not work on its device. Takes some seconds."""
    if sharding.is_sharded(accelerator):
        raise InputError(
            "compile: expected one process or DDP, got "
            f"{accelerator.distributed_type.value}: leave it out"
        )

    def some(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp()

    try:
        torch.compile(some)(torch.ones(3, device=accelerator.device))
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        raise CompileError(
            "compile: torch.compile does not work here; on a CPU it needs a C++ compiler "
            f"(g++ or clang++): {reason}"
        ) from error
