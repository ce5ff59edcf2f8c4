"""Wrap the model for several processes, and read and write its state as whole tensors by name.

A checkpoint holds whole tensors of the trained parameters, so that a run goes on with another
number of processes or another wrapper. (`accelerate.save_state` would write the frozen base at
every checkpoint, and what FSDP writes only FSDP reads.)
"""

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
from distill.objectives.base import gathered

Parameters = Mapping[str, nn.Parameter]


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def uses_deepspeed(accelerator: Accelerator) -> bool:
    return bool(accelerator.distributed_type == DistributedType.DEEPSPEED)


def is_sharded(accelerator: Accelerator) -> bool:
    """Tell whether the wrapper may split weights over processes or keep them in its own form."""
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def has_whole_weights(accelerator: Accelerator) -> bool:
    """Tell whether each process holds all weights; of DeepSpeed, up to ZeRO-2."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin.zero_stage < 3 if plugin is not None else not is_sharded(accelerator)


def prepare(
    accelerator: Accelerator,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rows: int,
    clip: float,
) -> tuple[nn.Module, Any]:
    """Wrap module and optimizer so that they compute what one process computes.

    rows: rows that a process feeds at once. clip: norm of the gradient; DeepSpeed asks for both.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        # Each parameter keeps its dtype and autocast does the rest, as in one process: FSDP's own
        # policy would cast RoPE's fp32 tables and reduce gradients in bf16.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
    elif uses_deepspeed(accelerator):
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings["gradient_clipping"] = clip
        settings["train_micro_batch_size_per_gpu"] = rows
    # DeepSpeed casts buffers to bf16 with the weights; RoPE's frequencies are put back.
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    wrapped, prepared = accelerator.prepare(module, optimizer)
    for name, buffer in module.named_buffers():
        if buffer.dtype != buffers[name].dtype:
            buffer.data = buffers[name].to(buffer.device)
    return wrapped, prepared


def read_weights(accelerator: Accelerator, parameters: Parameters) -> dict[str, Tensor]:
    """Return whole fp32 weights on the CPU by name on the main process, nothing on the others. All
    processes call this."""
    read = gathered
    if uses_deepspeed(accelerator):
        from deepspeed.utils import safe_get_full_fp32_param

        # Its fp32 master copy, not the bf16 weights that it computes with.
        read = safe_get_full_fp32_param
    weights = {}
    for name, parameter in parameters.items():
        value = read(parameter)
        if accelerator.is_main_process:
            weights[name] = value.detach().cpu()
    return weights


def read_state(
    accelerator: Accelerator, parameters: Parameters, optimizer: Any, step: int
) -> dict[str, Any]:
    """Return what a checkpoint keeps after `step` steps: ``weights``; ``optimizer``, AdamW's
    tensors by parameter name; ``scaler``, fp16's loss scale. All processes call this."""
    moments = {}
    for name, parameter in parameters.items():
        if uses_deepspeed(accelerator):
            from deepspeed.utils import safe_get_full_optimizer_state

            keys = ("exp_avg", "exp_avg_sq")
            found = {key: safe_get_full_optimizer_state(parameter, key) for key in keys}
            found["step"] = torch.tensor(float(step))
        else:
            found = {key: gathered(value) for key, value in optimizer.state[parameter].items()}
        if accelerator.is_main_process:
            moments[name] = {key: value.cpu() for key, value in found.items()}
    state: dict[str, Any] = {"weights": read_weights(accelerator, parameters), "optimizer": moments}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler.state_dict()
    return state


def write_state(
    accelerator: Accelerator, parameters: Parameters, optimizer: Any, saved: Mapping[str, Any]
) -> None:
    """Put back what `read_state` returned. All processes call this."""
    if uses_deepspeed(accelerator):  # whose optimizer does not take AdamW's step count
        raise InputError(
            "a run does not go on from its checkpoint under DeepSpeed: expected one process, "
            "DDP or FSDP2 (configs/accelerate/), which go on from a checkpoint of any"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(_like(saved["weights"][name], parameter))
            optimizer.state[parameter] = {
                key: _like(value, parameter) for key, value in saved["optimizer"][name].items()
            }
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(saved["scaler"])


def _like(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Bring a whole tensor to the parameter's device, and shard it as the parameter is."""
    value = value.to(parameter.device)
    if isinstance(parameter, DTensor) and value.dim():  # a step count is not sharded
        # src_data_rank None: every process has the whole tensor and takes its part, none is sent.
        return distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    return value


def compile_layers(backbone: PreTrainedModel) -> None:
    """Compile the layers in place when a step first needs them; names and weights stay.

    They are compiled one by one, all but the last by one graph. Attention stays outside
    (`d2f.attention.TrainingPlan`), and so do the embeddings and the loss, with tiles of its own::

        embeddings | layer: norm, q k v, RoPE | attention | o, norm, MLP | next layer ... | loss
                            compiled            as it is    compiled
    """
    # Dropout draws from torch's generator, as without: the same curve, also after a resume.
    options: dict[str, Any] = {"fallback_random": True}
    *layers, last = backbone.model.layers
    for layer in layers:
        layer.compile(dynamic=False, options=options)  # a run's rows are all of one length
    last.compile(options=options)  # how many of its places are read changes with each step


@contextmanager
def uncompiled(backbone: PreTrainedModel) -> Iterator[None]:
    """Run the layers uncompiled within: an evaluation has forwards of many lengths, and each would
    be compiled anew."""
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
    """Raise InputError where weights are sharded, CompileError where `torch.compile` does not work.
    Takes some seconds."""
    if is_sharded(accelerator):
        raise InputError(
            "compile: expected one process or DDP, got "
            f"{accelerator.distributed_type.value}: leave it out"
        )
    try:
        torch.compile(lambda x: (x * 2).exp())(torch.ones(3, device=accelerator.device))
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        raise CompileError(
            "compile: torch.compile does not work here; on a CPU it needs a C++ compiler "
            f"(g++ or clang++): {reason}"
        ) from error
