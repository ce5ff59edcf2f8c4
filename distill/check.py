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
from distill.evaluation import HeldoutLoss, jobs
from distill.export import as_trained, prepare_model
from distill.objectives import OBJECTIVES
from distill.trainer import doubts, rows_at_once
from triton_kernels.masked_kl import tile_shape

BASE = ".base_layer.weight"  # of a layer that PEFT has put a LoRA on
SHARD = int(5e9)  # most bytes of a file (`d2f.saving.MAX_SHARD_SIZE`)
NF4 = 0.5 + 0.127 / 8  # bytes a weight of a 4-bit base, with its doubly quantised scales (QLoRA)


@dataclass(frozen=True)
class Memory:
    """Hold the bytes that a process with the whole model (alone, or one of DDP) needs.

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

    def lines(self, checkpointing: bool) -> list[str]:
        """Say it as a table, the step's own activations marked."""
        used = "activations, checkpointed" if checkpointing else "activations"
        rows = {name.replace("_", ", "): size for name, size in vars(self).items()}
        rows["sum of a step"] = self.total(checkpointing)
        return [
            f"  {name:<26}{size / 2**30:9.3f}{'  <- this run' * (name == used)}"
            for name, size in rows.items()
        ]


def estimate(model: DiffusionModel, config: TrainConfig, tokens: int, reads: int) -> Memory:
    """Estimate the memory of feeding `tokens` at once, of which `reads` rows are read.

    model: with its adapter, on the meta device or any other.
    """
    network, shape = model.adapter or model.backbone, model.backbone.config
    sizes = {name: p.numel() for name, p in network.named_parameters()}
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    frozen, adapted = sum(sizes.values()) - trained, config.trains_adapter
    kept = 2 if config.base_dtype == "bfloat16" else 4
    linear = sum(size for name, size in sizes.items() if is_linear(name))
    # Trained weights are in fp32 whatever the base is kept in.
    load = weights = frozen * kept if adapted else 4 * trained
    if config.quantize == "4bit":
        weights -= int(linear * (kept - NF4))
    elif kept == 4 and config.mixed_precision != "no":
        weights += 2 * linear  # autocast's copies
    layer, layers = layer_bytes(model, config) * tokens, shape.num_hidden_layers
    # Merged in fp32 one after another, and held in the dtype of the export for one file at a time.
    width = 4 if config.export_dtype == "float32" else 2
    merged = sum(size for name, size in sizes.items() if name.endswith(BASE))
    written = width * (merged if width == kept else sum(sizes.values()))
    moments = 8 * trained  # AdamW's two, in fp32
    return Memory(
        load=load,
        weights=weights,
        adapter=4 * trained if adapted else 0,
        gradients=4 * trained,
        optimizer=moments,
        activations=layers * layer,
        # Each layer keeps its input, and one layer at a time is computed again.
        activations_checkpointed=layers * kept * shape.hidden_size * tokens + layer,
        loss=loss_bytes(model, config, reads),
        export=load
        + 4 * trained * adapted
        + moments
        + min(written, SHARD)
        + 4 * max(sizes.values()),
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


def loss_bytes(model: DiffusionModel, config: TrainConfig, reads: int) -> int:
    """Return the memory of the loss on `reads` rows: logits as the head gives them, in fp32, and
    one fp32 tensor computed of them; of a KL a tile of both models' at a time."""
    logits = reads * model.vocab_size
    if config.objective.best_loss == "kl":
        rows, columns = tile_shape(reads, model.vocab_size, model.device)
        logits = 2 * rows * columns
    return logits * ((4 if config.mixed_precision == "no" else 2) + 8)


def is_linear(name: str) -> bool:
    """Tell whether a parameter is a layer's own matrix (of attention or MLP)."""
    return name.endswith(("_proj.base_layer.weight", "_proj.weight"))


_MOST_STEPS = 1000  # that are packed to say how full steps are
_GENERATED_STEPS = 4  # the same, of generated data


@dataclass(frozen=True)
class Forecast:
    """Say what a run would do: parameters and those that are trained, the rows that a process feeds
    at once, and all of it in words."""

    parameters: int
    trained: int
    rows_at_once: int
    reads: int
    plan: Plan
    memory: Memory
    text: str


def check(config: TrainConfig, processes: int = 1) -> Forecast:
    """Look at everything that a run reads but the weights.

    Raises InputError for what would fail later: model, family and objective, tokenizer, data (every
    row, every generated sample), rows that the processes cannot share, an adapter that does not
    fit, what evaluations decode or hold out, an output of another run, 4-bit weights without
    bitsandbytes.
    """
    RunFolder(config)  # raises for another run
    share = rows_at_once(config, processes)
    if config.quantize == "4bit":
        require("bitsandbytes", "quantize: 4bit")
    model = prepare_model(config, "meta")
    objective = OBJECTIVES[config.objective.name](model, config)
    stream = objective.stream()
    # Build a real step's share to count the rows that the loss reads.
    batch = objective.batch(fill_rows(stream, 0)[0], slice(0, share))
    reads = len(batch.rows)
    generated = stream.epoch is None
    step = plan(stream, _GENERATED_STEPS if generated else _MOST_STEPS)
    epoch = "the data has no end (generated)"
    if generated:
        # A tenth more than these steps say, as their samples are a few.
        stream.check_generated(int(1.1 * step.samples_per_step * config.steps))
    elif step.samples_per_epoch and step.steps_per_epoch:
        epoch = (
            f"{step.samples_per_epoch} samples, {ceil(step.steps_per_epoch)} steps an epoch, "
            f"{config.steps * step.samples_per_step / step.samples_per_epoch:.2f} epochs in "
            f"{config.steps} steps"
        )
    notes = doubts(config)
    if stream.held_out is not None:
        notes.append(f"held-out loss: {stream.held_out.said}")
        if config.eval_every is not None:
            HeldoutLoss(objective, stream.held_out)
    if config.eval_every is not None:
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
    every = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    memory = estimate(model, config, batch.input_ids.numel(), reads)
    lines = [
        f"{config.objective.name} on {model.family}: {every:,} parameters, {trained:,} trained "
        f"({100 * trained / every:.2f} %)",
        f"a step: {step.places_per_step:,} tokens in {config.data.rows} rows of "
        f"{config.data.row_length}, {100 * step.filled:.0f} % filled by "
        f"{step.samples_per_step:.1f} samples; {processes} processes x "
        f"{config.gradient_accumulation} parts x {share} rows, {reads} rows read at once",
        f"data: {epoch}",
        f"memory of a process that holds the model whole, estimated, GiB (base in "
        f"{config.base_dtype}, quantize {config.quantize}):",
        *memory.lines(config.gradient_checkpointing),
        "FSDP2 and ZeRO-3 divide weights, adapter, gradients and optimizer by the processes, "
        "ZeRO-2 the last two.",
    ]
    text = "\n".join([*lines, *notes])
    return Forecast(every, trained, share, reads, step, memory, text)
