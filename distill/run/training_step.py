"""One step of training: the learning rate, a process's part of the rows, gradients, the update."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from d2f.cpus import usable_cpus
from d2f.device import parse_threads
from d2f.errors import InputError
from d2f.thread_choice import ThreadChoice
from distill.config import TrainConfig
from distill.objectives.base import Batch, Objective, Rows
from distill.run import checkpoint, sharding
from distill.run.attention_choice import attention_dtype, choose_attention


class StepResult(NamedTuple):
    """What a step gave. loss: this process's part of the step's loss, a scalar. norm: that of the
    gradient before clipping, a scalar. rate: the learning rate that the step was taken with."""

    loss: Tensor
    norm: Tensor
    rate: float


class Stepper:
    """Takes steps with what `sharding.prepare` wraps. accelerator: made with the configuration's
    mixed precision and parts (gradient_accumulation). Raises InputError for rows that the processes
    cannot share."""

    def __init__(self, accelerator: Accelerator, objective: Objective, config: TrainConfig):
        self.accelerator, self.objective, self.config = accelerator, objective, config
        self.rows_at_once = rows_at_once(config, accelerator.num_processes)
        settings = config.optimizer
        optimizer = torch.optim.AdamW(
            [p for p in objective.parameters() if p.requires_grad],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.threads = None
        if accelerator.device.type == "cpu":
            # Sums of gradients round by how many threads share them: one number, but for auto.
            most = min(usable_cpus(), torch.get_num_threads())
            counts = (most,) if config.threads is None else parse_threads(config.threads)
            self.threads = ThreadChoice(counts)
        sharding.settle(accelerator, rows=self.rows_at_once, clip=settings.clip)
        self.wrapped, self.optimizer = sharding.prepare(accelerator, objective, optimizer)
        self.trainable = checkpoint.trainable(objective)

    def take(self, done: int, rows: Rows) -> StepResult:
        """Take the step after `done` steps."""
        size = self.config.data.row_length * self.rows_at_once
        threads = nullcontext() if self.threads is None else self.threads.timed(size)
        with threads:
            return self._take(done, rows)

    def _take(self, done: int, rows: Rows) -> StepResult:
        accelerator, rate = self.accelerator, learning_rate(self.config, done)
        for group in self.optimizer.param_groups:
            # From the step's number alone, so that a resume has no scheduler to restore.
            group["lr"] = rate
        parts, share = self.config.gradient_accumulation, self.rows_at_once
        loss = torch.zeros((), device=accelerator.device)
        for part in range(parts):
            # Each part is the same rows whichever process feeds it: processes in order, parts
            # within.
            first = (accelerator.process_index * parts + part) * share
            batch = self.objective.batch(rows, slice(first, first + share)).to(accelerator.device)
            if self.objective.attention is None:
                # Once, on the first batch: its shape is that of all.
                self._choose_attention(batch)
            seed_dropout(self.config.seed, done, first)
            with accelerator.accumulate(self.wrapped):
                with accelerator.autocast():
                    part_loss = self.wrapped(batch)
                # Gradients are averaged over processes and parts; the loss is a sum.
                accelerator.backward(part_loss * (accelerator.num_processes * parts))
            # Parts are normalised by the whole step, so that they add up.
            loss += part_loss.detach()
        clip = self.config.optimizer.clip
        norm = accelerator.clip_grad_norm_(list(self.trainable.values()), clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, sharding.as_norm(norm, accelerator.device), rate)

    def _choose_attention(self, batch: Batch) -> None:
        chosen: list[Any] = [None]  # by one process for all
        if self.accelerator.is_main_process:
            dtype = attention_dtype(self.accelerator)
            place = Path(self.config.output)
            chosen[0] = choose_attention(
                self.config.attention, self.objective.model, batch.spans, dtype, place
            )
        self.objective.attention = broadcast_object_list(chosen)[0]


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of a step, counted from 0: linear warm-up, then constant or cosine."""
    settings = config.optimizer
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    done = (step - settings.warmup) / max(1, config.steps - settings.warmup)
    floor = settings.final_lr_share
    return settings.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def rows_at_once(config: TrainConfig, processes: int) -> int:
    """Rows that a process feeds at once. Raises InputError."""
    parts = config.gradient_accumulation
    if config.data.rows % (processes * parts):
        accumulated = f" x {parts} parts (gradient_accumulation)" if parts > 1 else ""
        raise InputError(
            f"data.rows must be a multiple of the {processes} processes{accumulated}, "
            f"got {config.data.rows}"
        )
    return config.data.rows // (processes * parts)


def seed_dropout(seed: int, step: int, row: int) -> None:
    """Seed what a part of a step draws (dropout) from its first row: a resume, and as many parts in
    another number of processes, draw the same."""
    torch.manual_seed(int(np.random.SeedSequence((seed, step, row)).generate_state(1)[0]))
