"""Weights and optimizer state as whole tensors by name, whatever wrapper shards them, so that a
checkpoint fits any number of processes; and what the wrappers are told so that they compute what
one process computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from d2f.errors import CompileError, InputError

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


# The decoder layers of a training through `torch.compile`, one by one: norms, RoPE and the MLP's
# products with their neighbours in fewer passes, and less kept for the backward pass.
#
#     embeddings | layer: norm, q k v, RoPE | attention | o, norm, MLP | next layer ... | norm, loss
#                         compiled            as it is    compiled
#
# All layers but the last share their graphs. Attention stays outside (`TrainingPlan`), and so do
# the
# embeddings and the loss, which is computed in tiles of its own.

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
    if is_sharded(accelerator):
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
