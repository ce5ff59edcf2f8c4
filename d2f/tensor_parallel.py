"""Split one model over several processes, a GPU each: transformers shards the layers.

Each rank reads and keeps a part of every matrix, and computes with its part of the heads::

    2 ranks, 4 heads over 2 key-value heads    rank 0             rank 1
    q_proj, k_proj, v_proj: rows               heads 0 1, 0       heads 2 3, 1
    keys and values in the cache               head 0             head 1
    o_proj: columns                            a part of the sum  the other: all-reduce
    gate_proj, up_proj, down_proj              half of the MLP    half: all-reduce
    embeddings, lm_head: rows                  half the vocabulary each: gathered

`d2f.leading` keeps the processes in step.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PretrainedConfig

from d2f.adapters import fitting_adapter
from d2f.device import check_processes
from d2f.errors import InputError
from d2f.parts import ModelParts


def check_parallel(size: int, device: torch.device, *, quantize: bool = False) -> torch.device:
    """Return the device of this process as one of `size`. Raises InputError where torchrun did not
    start so many or there are not enough GPUs; the device meta is not checked."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(f"tensor_parallel must be a whole number from 1, got {size!r}")
    if quantize:
        raise InputError(f"tensor parallel {size}: expected weights that are not quantised")
    if device.type == "meta":
        return device
    check_processes(size)
    if device.type not in ("cpu", "cuda") or device.index is not None:
        raise InputError(
            f"tensor parallel {size}: each process takes the GPU of its own number: expected "
            f"device cuda or cpu, got {device}"
        )
    if device.type == "cpu":
        if torch.cuda.is_available():  # transformers would take them
            raise InputError(
                f"tensor parallel {size} on the CPU of a machine with GPUs: hide them with "
                "CUDA_VISIBLE_DEVICES="
            )
        return device
    here, there = int(os.environ.get("LOCAL_WORLD_SIZE", size)), torch.cuda.device_count()
    if here > there:
        raise InputError(
            f"tensor parallel {size}: {here} processes on this machine need a GPU each, it has "
            f"{there}"
        )
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def check_divides(name: str, config: PretrainedConfig, size: int) -> None:
    """Raise InputError for a model whose heads or MLP cannot be shared by `size` processes."""
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(config, what)
        if count % size:
            raise InputError(f"{name}: tensor parallel {size} must divide {what}, got {count}")


def sharded(size: int) -> dict[str, Any]:
    """Return options of `from_pretrained` with which each rank reads and keeps its own part."""
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=size)}


def merge_into_parts(model: ModelParts, place: str) -> None:
    """Add an adapter to the weights of which this rank has a part; its contract, if any, becomes
    the model's. Raises as `d2f.adapters.attach`."""
    adapter = fitting_adapter(model, place)
    adapter.fill()
    for name in adapter.modules:
        part = model.backbone.get_submodule(name)
        # Go module by module: gather its weights, merge, keep this rank's part.
        whole = {key: whole_of(value) for key, value in part.named_parameters()}
        merged = adapter.merged(name, whole)
        for key, value in part.named_parameters():
            _set(value, merged.get_parameter(key))
    if adapter.contract is not None:
        model.contract = adapter.contract


def own_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, all of one that is not in parts."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """Gather a tensor of which each process has a part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _set(weight: Tensor, value: Tensor) -> None:
    value = value.detach().to(weight.device, weight.dtype)
    if isinstance(weight, DTensor):
        # Every rank has the whole and takes its part; nothing is sent.
        value = distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
    own_part(weight).data.copy_(own_part(value))
