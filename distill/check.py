"""What a run would need, and what of it would fail, before it starts: `--check` of distill.train.

The model is built on the meta device, so no weights are read and no accelerator is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from d2f.quantize import require
from distill.config import TrainConfig
from distill.data import fill_rows
from distill.data import plan as plan_of
from distill.doubts import doubts
from distill.memory import Memory, estimate
from distill.objectives import OBJECTIVES
from distill.prepare_model import prepare_model
from distill.run.evaluation import jobs
from distill.run.export import as_trained
from distill.run.heldout_loss import HeldoutLoss
from distill.run.run_folder import RunFolder
from distill.run.training_step import rows_at_once

_GENERATED_STEPS = 4  # looked at, of data without an end
_MOST_STEPS = 1000  # of data with one


@dataclass(frozen=True)
class RunForecast:
    """What a run would do. reads: rows of a process's part that the loss reads. samples_per_epoch,
    steps_per_epoch: None for generated data, which has no end."""

    config: TrainConfig
    family: str
    parameters: int
    trained: int
    processes: int
    rows_at_once: int
    samples_per_step: float
    filled: float
    reads: int
    samples_per_epoch: int | None
    steps_per_epoch: int | None
    memory: Memory
    notes: tuple[str, ...]

    @property
    def tokens_per_step(self) -> int:
        """Places of a step's rows, the empty ones too."""
        return self.config.data.rows * self.config.data.row_length

    def __str__(self) -> str:
        config, memory = self.config, self.memory
        share = 100 * self.trained / self.parameters
        parts = config.gradient_accumulation
        epoch = "the data has no end (generated)"
        if self.samples_per_epoch is not None:
            epochs = config.steps * self.samples_per_step / self.samples_per_epoch
            epoch = (
                f"{self.samples_per_epoch} samples, {self.steps_per_epoch} steps an epoch, "
                f"{epochs:.2f} epochs in {config.steps} steps"
            )
        kept = f"4-bit, {config.base_dtype}" if config.quantize == "4bit" else config.base_dtype
        used = {False: "", True: "  <- this run"}
        checkpointing = config.gradient_checkpointing
        needs = [
            (f"weights ({kept})", memory.weights, ""),
            ("adapter", memory.adapter, ""),
            ("gradients", memory.gradients, ""),
            ("optimizer", memory.optimizer, ""),
            ("activations", memory.activations, used[not checkpointing]),
            (
                "activations, gradient_checkpointing",
                memory.activations_checkpointed,
                used[checkpointing],
            ),
            ("loss tile", memory.loss, ""),
            ("sum", memory.total(checkpointing), ""),
            ("to load the weights", memory.load, ""),
            ("to write the result", memory.export, ""),
        ]
        lines = [
            f"{config.objective} on {self.family}: {self.parameters:,} parameters, "
            f"{self.trained:,} trained ({share:.2f} %)",
            f"a step: {self.tokens_per_step:,} tokens in {config.data.rows} rows of "
            f"{config.data.row_length}, {100 * self.filled:.0f} % filled by "
            f"{self.samples_per_step:.1f} samples; {self.processes} processes x {parts} parts x "
            f"{self.rows_at_once} rows, {self.reads} rows read at once",
            f"data: {epoch}",
            "memory of a process that holds the model whole, estimated, GiB:",
            *(f"  {name:<36}{size / 2**30:9.3f}{mark}" for name, size, mark in needs),
            "FSDP2 and ZeRO-3 divide weights, adapter, gradients and optimizer by the processes, "
            "ZeRO-2 the last two.",
            *self.notes,
        ]
        return "\n".join(lines)


def check(config: TrainConfig, processes: int = 1) -> RunForecast:
    """Look at everything that a run reads but the weights. Raises InputError for what would fail
    later: model, family and objective, tokenizer, data (every sample of a file), rows that the
    processes cannot share, an adapter that does not fit, what evaluations decode or hold out, an
    output of another run, 4-bit weights without bitsandbytes."""
    RunFolder(config).check_inputs()
    share = rows_at_once(config, processes)
    if config.quantize == "4bit":
        require("bitsandbytes", "quantize: 4bit")
    model = prepare_model(config, "meta")
    objective = OBJECTIVES[config.objective](model, config)
    stream = objective.stream()
    # One real step's share, for how many rows the loss reads.
    batch = objective.batch(fill_rows(stream, 0)[0], slice(0, share))
    reads = len(batch.rows)
    plan = plan_of(stream, _GENERATED_STEPS if stream.epoch is None else _MOST_STEPS)
    parameters = list((model.adapter or model.backbone).parameters())
    notes = doubts(config)
    if stream.held_out is not None:
        notes.append(f"held-out loss: {stream.held_out.said}")
    # Encodes all evaluation problems, so a decoder that does not fit is found here.
    if config.eval_every is not None:
        if stream.held_out is not None:
            HeldoutLoss(objective, stream.held_out)
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
    return RunForecast(
        config=config,
        family=model.family,
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        processes=processes,
        rows_at_once=share,
        samples_per_step=plan.samples_per_step,
        filled=plan.filled,
        reads=reads,
        samples_per_epoch=plan.samples_per_epoch,
        steps_per_epoch=None if plan.steps_per_epoch is None else ceil(plan.steps_per_epoch),
        memory=estimate(model, config, batch.input_ids.numel(), reads),
        notes=tuple(notes),
    )
