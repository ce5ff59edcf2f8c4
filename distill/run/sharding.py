"""Weights and optimizer state as whole tensors by name, whatever wrapper shards them, so that a
checkpoint fits any number of processes; and what the wrappers are told so that they compute what
one process computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from d2f.errors import InputError

Parameters = Mapping[str, nn.Parameter]
_MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, as DeepSpeed names them too


def gathered(tensor: Tensor) -> Tensor:
    """A tensor that a wrapper may hold a shard of (FSDP2: DTensor; ZeRO-3: partitioned), whole and
    without gradient; the tensor itself where it is not sharded. All processes call this."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, without gradient; the tensor itself where it is not
    sharded."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    part: Tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3
    return part.detach()


def as_norm(norm: Tensor | float | None, device: torch.device) -> Tensor:
    """A gradient norm as clipping returned it, as a scalar tensor; 0 where there is none yet."""
    if isinstance(norm, Tensor):
        return gathered(norm)
    return torch.tensor(norm or 0.0, device=device)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether the run's wrapper may split weights over processes or keep them in its own form."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def settle(accelerator: Accelerator, *, rows: int, clip: float) -> None:
    """Tell a wrapper, before it gets the model, what it would otherwise decide itself.

    FSDP2 keeps each parameter's dtype and leaves mixed precision to autocast, as one process does:
    its own policy would cast RoPE's fp32 tables and reduce gradients in bf16. DeepSpeed clips
    gradients itself and wants the rows a process feeds at once.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
    elif accelerator.distributed_type == DistributedType.DEEPSPEED:
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings["gradient_clipping"] = clip
        settings["train_micro_batch_size_per_gpu"] = rows


def prepare(
    accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Any]:
    """accelerate's wrapped module and optimizer. DeepSpeed casts buffers to bf16 with the weights;
    RoPE's frequencies are put back in fp32."""
    # Copies from before the wrapper, since what it has rounded to bf16 cannot be restored.
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    wrapped, prepared = accelerator.prepare(module, optimizer)
    for name, buffer in module.named_buffers():
        if buffer.dtype != buffers[name].dtype:
            buffer.data = buffers[name].to(buffer.device)
    return wrapped, prepared


def read_weights(accelerator: Accelerator, parameters: Parameters) -> dict[str, Tensor]:
    """Whole weights on the CPU by name, on the main process; empty on the others, which call this
    too."""
    weights = {}
    for name, parameter in parameters.items():
        value = _weight(accelerator, parameter)
        if accelerator.is_main_process:
            weights[name] = value.detach().cpu()
    return weights


def read_state(
    accelerator: Accelerator, parameters: Parameters, optimizer: Any, step: int
) -> dict[str, dict[str, Any]]:
    """What a checkpoint keeps after `step` steps: ``weights`` as `read_weights` gives them,
    ``optimizer``, AdamW's tensors by parameter name in the same way, and ``scaler``, fp16's loss
    scale. All processes call this."""
    state: dict[str, dict[str, Any]] = {
        "weights": read_weights(accelerator, parameters),
        "optimizer": {},
    }
    for name, parameter in parameters.items():
        values = _moments(accelerator, parameter, optimizer, step)
        if accelerator.is_main_process:
            state["optimizer"][name] = {key: value.cpu() for key, value in values.items()}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler.state_dict()
    return state


def write_state(
    accelerator: Accelerator, parameters: Parameters, optimizer: Any, saved: Mapping[str, Any]
) -> None:
    """Put back what `read_state` gave, on all processes. Raises InputError under DeepSpeed, whose
    optimizer does not take the step count that AdamW's bias correction needs."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise InputError(
            "a run does not go on from its checkpoint under DeepSpeed: expected one process, "
            "DDP or FSDP2 (configs/accelerate/), which go on from a checkpoint of any"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_like(saved["weights"][name], parameter))
            # What AdamW keeps of a parameter: both moments, and the step count of its bias
            # correction.
            optimizer.state[parameter] = {
                key: _like(value, parameter) for key, value in saved["optimizer"][name].items()
            }
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(saved["scaler"])


def _weight(accelerator: Accelerator, parameter: nn.Parameter) -> Tensor:
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from deepspeed.utils import safe_get_full_fp32_param

        # DeepSpeed's fp32 master copy, not the bf16 weights that it computes with.
        value: Tensor = safe_get_full_fp32_param(parameter)
        return value
    return gathered(parameter)


def _moments(
    accelerator: Accelerator, parameter: nn.Parameter, optimizer: Any, step: int
) -> dict[str, Tensor]:
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from deepspeed.utils import safe_get_full_optimizer_state

        found = {key: safe_get_full_optimizer_state(parameter, key) for key in _MOMENTS}
        # DeepSpeed counts steps elsewhere; a checkpoint has AdamW's form whatever wrote it.
        return found | {"step": torch.tensor(float(step))}
    return {key: gathered(value) for key, value in optimizer.state[parameter].items()}


def _like(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """A whole tensor in the form that the parameter has: sharded like it under FSDP2, else on its
    device. A step count, which has no dimensions, is not sharded."""
    if isinstance(parameter, DTensor) and value.shape == parameter.shape and value.dim():
        whole_value = value.to(parameter.device)
        # src_data_rank None: every process has the whole tensor and takes its part, none is sent.
        return distribute_tensor(
            whole_value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    return value.to(parameter.device)
