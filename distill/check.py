"""Check a run before it starts (`d2f train --check`): what it would need, and what would fail.

The model is built on the meta device, so no weights are read and no accelerator is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from d2f.model import DiffusionModel
from d2f.quantize import require
from distill.checkpoint import RunFolder
from distill.config import TrainConfig
from distill.data.stream import Plan, fill_rows, plan
from distill.evaluation import jobs
from distill.export import as_trained, prepare_model
from distill.heldout_loss import HeldoutLoss
from distill.objectives import OBJECTIVES
from distill.trainer import doubts, rows_at_once

BASE = ".base_layer.weight"  # of a layer that PEFT has put a LoRA on
SHARD = int(5e9)  # most bytes of a file (`d2f.saving.MAX_SHARD_SIZE`)
NF4 = 0.5 + 0.127 / 8  # bytes a weight of a 4-bit base, with its doubly quantised scales (QLoRA)


@dataclass(frozen=True)
class Memory:
    """What a process that holds the whole model (alone, or one of DDP) needs, in bytes.

    load: for reading the weights. activations: what the backward pass of one part of a step keeps,
    with and without gradient checkpointing. loss: the logits that are there at once, with what is
    computed of them. export: for writing the result, with what is still there then.
    """

    load: int
    weights: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    activations_checkpointed: int
    loss: int
    export: int

    def total(self, checkpointing: bool) -> int:
        fixed = self.weights + self.adapter + self.gradients + self.optimizer + self.loss
        return fixed + (self.activations_checkpointed if checkpointing else self.activations)


def estimate(model: DiffusionModel, config: TrainConfig, tokens: int, reads: int) -> Memory:
    """Estimate the memory of feeding `tokens` at once, of which `reads` rows are read.

    model: with its adapter, on the meta device or any other.
    """
    network = model.adapter or model.backbone
    parameters = list(network.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trained
    kept = 2 if config.base_dtype == "bfloat16" else 4
    adapted = config.trains_adapter
    linear = sum(p.numel() for n, p in network.named_parameters() if is_linear(n))
    # What is trained is in fp32 whatever the base is kept in.
    load = weights = frozen * kept if adapted else 4 * trained
    if config.quantize == "4bit":
        weights -= int(linear * (kept - NF4))
    elif kept == 4 and config.mixed_precision != "no":
        weights += 2 * linear  # autocast's copies
    layer = layer_bytes(model, config) * tokens
    layers = model.backbone.config.num_hidden_layers
    inputs = kept * model.backbone.config.hidden_size * tokens  # of a layer
    # AdamW's two moments in fp32.
    optimizer = 8 * trained
    # Merged in fp32 one after another, and held in the dtype of the export for one file at a time.
    largest = 4 * max(p.numel() for p in parameters)
    width = 4 if config.export_dtype == "float32" else 2
    merged = sum(p.numel() for n, p in network.named_parameters() if n.endswith(BASE))
    written = width * (merged if width == kept else sum(p.numel() for p in parameters))
    return Memory(
        load=load,
        weights=weights,
        adapter=4 * trained if adapted else 0,
        gradients=4 * trained,
        optimizer=optimizer,
        activations=layers * layer,
        # Each layer keeps its input, and one layer at a time is computed again.
        activations_checkpointed=layers * inputs + layer,
        loss=OBJECTIVES[config.objective.name].loss_bytes(model, config, reads),
        export=load + 4 * trained * adapted + optimizer + min(written, SHARD) + largest,
    )


def layer_bytes(model: DiffusionModel, config: TrainConfig) -> int:
    """Return the bytes a token that one decoder layer keeps for its backward pass, without
    checkpointing, as transformers' Llama and Qwen2 and PEFT's LoRA compute it; attention by a
    kernel that keeps queries, keys, values and output, dropout by one that keeps a mask of
    bytes."""
    shape = model.backbone.config
    hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_attention_heads
    dim = getattr(shape, "head_dim", None) or hidden // heads
    queries, keys = heads * dim, shape.num_key_value_heads * dim
    autocast = config.mixed_precision != "no"
    kept = 2 if config.base_dtype == "bfloat16" else 4
    size = 2 if autocast else kept
    attention = size * (2 * queries + 2 * keys)
    norms = 2 * 4 * hidden  # each in fp32
    mlp = size * 3 * inner  # gate, its SiLU, up
    if not config.trains_adapter:  # every linear layer keeps its input
        copies = 5 if autocast else 2  # q, k, v, gate and up cast their own
        return attention + norms + mlp + size * (copies * hidden + inner) + 2 * kept * hidden
    assert model.adapter is not None
    lora_config = model.adapter.peft_config["default"]  # an init_adapter's own, where there is one
    targets, rank = lora_config.target_modules, lora_config.r
    of_hidden = sum(name not in ("o_proj", "down_proj") for name in targets)
    own = of_hidden * hidden + inner * ("down_proj" in targets)  # inputs that nothing else keeps
    if lora_config.lora_dropout:  # each drops its own, and keeps the mask
        own += queries * ("o_proj" in targets)
        lora = (size if autocast else 4) * own + own
    elif autocast:
        lora = size * own
    else:  # q, k and v share their input, gate and up theirs
        groups = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]
        inputs = sum(any(name in targets for name in group) for group in groups)
        lora = kept * (hidden * inputs + inner * ("down_proj" in targets))
    return attention + norms + mlp + lora + len(targets) * size * rank


def is_linear(name: str) -> bool:
    """Tell whether a parameter is a layer's own matrix (of attention or MLP)."""
    return name.endswith(("_proj.base_layer.weight", "_proj.weight"))


@dataclass(frozen=True)
class Forecast:
    """What a run would do. reads: rows of a process's part that the loss reads."""

    config: TrainConfig
    family: str
    parameters: int
    trained: int
    processes: int
    rows_at_once: int
    reads: int
    plan: Plan
    memory: Memory
    notes: tuple[str, ...]

    def __str__(self) -> str:
        config, step, memory = self.config, self.plan, self.memory
        epoch = "the data has no end (generated)"
        if step.samples_per_epoch is not None and step.steps_per_epoch is not None:
            epochs = config.steps * step.samples_per_step / step.samples_per_epoch
            epoch = (
                f"{step.samples_per_epoch} samples, {ceil(step.steps_per_epoch)} steps an epoch, "
                f"{epochs:.2f} epochs in {config.steps} steps"
            )
        kept = f"4-bit, {config.base_dtype}" if config.quantize == "4bit" else config.base_dtype
        checkpointing = config.gradient_checkpointing
        needs = {
            f"weights ({kept})": memory.weights,
            "adapter": memory.adapter,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
            "activations, gradient_checkpointing": memory.activations_checkpointed,
            "loss tile": memory.loss,
            "sum": memory.total(checkpointing),
            "to load the weights": memory.load,
            "to write the result": memory.export,
        }
        this = "activations, gradient_checkpointing" if checkpointing else "activations"
        lines = [
            f"{config.objective.name} on {self.family}: {self.parameters:,} parameters, "
            f"{self.trained:,} trained ({100 * self.trained / self.parameters:.2f} %)",
            f"a step: {step.places_per_step:,} tokens in {config.data.rows} rows of "
            f"{config.data.row_length}, {100 * step.filled:.0f} % filled by "
            f"{step.samples_per_step:.1f} samples; {self.processes} processes x "
            f"{config.gradient_accumulation} parts x {self.rows_at_once} rows, {self.reads} rows "
            "read at once",
            f"data: {epoch}",
            "memory of a process that holds the model whole, estimated, GiB:",
            *(
                f"  {name:<36}{size / 2**30:9.3f}{'  <- this run' * (name == this)}"
                for name, size in needs.items()
            ),
            "FSDP2 and ZeRO-3 divide weights, adapter, gradients and optimizer by the processes, "
            "ZeRO-2 the last two.",
            *self.notes,
        ]
        return "\n".join(lines)


_MOST_STEPS = 1000  # that are packed to say how full steps are
_GENERATED_STEPS = 4  # the same, of generated data


def check(config: TrainConfig, processes: int = 1) -> Forecast:
    """Look at everything that a run reads but the weights.

    Raises InputError for what would fail later: model, family and objective, tokenizer, data (every
    row, every generated sample), rows that the processes cannot share, an adapter that does not
    fit, what evaluations decode or hold out, an output of another run, 4-bit weights without
    bitsandbytes.
    """
    RunFolder(config).check_inputs()
    share = rows_at_once(config, processes)
    if config.quantize == "4bit":
        require("bitsandbytes", "quantize: 4bit")
    model = prepare_model(config, "meta")
    objective = OBJECTIVES[config.objective.name](model, config)
    stream = objective.stream()
    # One real step's share, for how many rows the loss reads.
    batch = objective.batch(fill_rows(stream, 0)[0], slice(0, share))
    generated = stream.epoch is None
    found = plan(stream, _GENERATED_STEPS if generated else _MOST_STEPS)
    if generated:
        # A tenth more than these steps say, as their samples are a few.
        stream.check_generated(int(1.1 * found.samples_per_step * config.steps))
    notes = doubts(config)
    if stream.held_out is not None:
        notes.append(f"held-out loss: {stream.held_out.said}")
    if config.eval_every is not None:
        if stream.held_out is not None:
            HeldoutLoss(objective, stream.held_out)
        # Encodes all evaluation problems, so a decoder that does not fit is found here.
        jobs(as_trained(model, config, hashed=False), config)
    if config.optimizer.warmup > config.steps:
        notes.append(
            f"note: optimizer.warmup {config.optimizer.warmup} is not over after {config.steps} "
            "steps: the rate does not reach optimizer.lr"
        )
    if config.data.row_length > model.context_length:
        notes.append(
            f"note: data.row_length {config.data.row_length} is more than the "
            f"{model.context_length} positions that the model was made for"
        )
    parameters = list((model.adapter or model.backbone).parameters())
    return Forecast(
        config=config,
        family=model.family,
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        processes=processes,
        rows_at_once=share,
        reads=len(batch.rows),
        plan=found,
        memory=estimate(model, config, batch.input_ids.numel(), len(batch.rows)),
        notes=tuple(notes),
    )
