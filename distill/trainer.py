"""A run of training: its folder, checkpoints, processes, stops, evaluation and what it leaves."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import accelerate
import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from d2f.attention import SpanPlan, Way
from d2f.device import parse_threads, usable_cpus
from d2f.errors import InputError
from d2f.files import write_beside
from d2f.model import DiffusionModel
from distill import checkpoint, sharding
from distill.checkpoint import RunFolder, flat
from distill.config import TrainConfig
from distill.data import fill_rows
from distill.evaluation import Evaluator, said
from distill.export import export_run, prepare_model
from distill.heldout_loss import HeldoutLoss
from distill.log import Log, Progress, result_text
from distill.objectives import OBJECTIVES
from distill.objectives.base import Batch, Objective, Rows
from distill.sharding import check_compile, compile_layers, own_part

# Which attention a training run computes with: on a GPU the fastest at its own shape, measured
# before the first step, kept beside the run so that a resumed one computes the same.

FILE_NAME = "attention.json"
WAYS: tuple[Way, ...] = ("flex", "sdpa")
_REPEAT = 10


def choose_attention(
    wanted: str, model: DiffusionModel, spans: Tensor, dtype: torch.dtype, output: Path
) -> Way:
    """The way of the run in `output`: the wanted one, or for "auto" the one kept there, else the
    fastest (`measure_attention`), which is written there; sdpa where there is no GPU.

    spans: int32 ``[R, L, K, 2]`` of a step. dtype: what attention computes in.
    """
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    if not spans.is_cuda:
        return "sdpa"
    path = output / FILE_NAME
    # Ways differ in rounding: a resumed run computes by the one that it began with.
    if path.is_file():
        kept: Way = json.loads(path.read_text(encoding="utf-8"))["chosen"]
        if kept in WAYS:  # an earlier version had others
            return kept
    found = measure_attention(model, spans, dtype)
    chosen = min(found, key=found.__getitem__)
    write_beside(path, json.dumps({"chosen": chosen, "milliseconds": found}) + "\n")
    said = ", ".join(f"{way} {ms:.3f} ms" for way, ms in found.items())
    print(f"attention: {chosen} ({said} a layer, forward and backward, at {list(spans.shape[:2])})")
    return chosen


def check_attention(wanted: str, device: torch.device) -> None:
    """Raise InputError for an attention that cannot train on the device."""
    if wanted == "flex" and device.type != "cuda":
        raise InputError(f"attention {wanted} trains on a GPU only, this is {device}: take sdpa")


def attention_dtype(accelerator: Accelerator) -> torch.dtype:
    """What attention computes in under the run's mixed precision."""
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return kinds.get(accelerator.mixed_precision, torch.float32)


def measure_attention(model: DiffusionModel, spans: Tensor, dtype: torch.dtype) -> dict[Way, float]:
    """Milliseconds of a layer's attention, forward and backward, by each way that works, with a
    layer's share of making the mask."""
    config = model.backbone.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    batch, length = spans.shape[:2]
    # [R, heads, L, dim], and keys and values with their own number of heads.
    shapes = ((batch, heads, length, dim), *((batch, kv_heads, length, dim),) * 2)
    options: dict[str, Any] = {"dtype": dtype, "device": spans.device, "requires_grad": True}
    q, k, v = (torch.randn(shape, **options) for shape in shapes)
    upstream = torch.randn(batch, length, heads, dim, dtype=dtype, device=spans.device)
    layers = config.num_hidden_layers

    def step(way: Way) -> None:
        # Made once a forward and shared by the layers, as in training.
        plan = SpanPlan(spans, way=way)
        for _ in range(layers):
            out = plan.attend(None, q, k, v)
            torch.autograd.grad(out, (q, k, v), upstream)

    found: dict[Way, float] = {}
    for way in WAYS:
        try:
            found[way] = _milliseconds(lambda way=way: step(way), spans.device) / layers
        except (RuntimeError, NotImplementedError) as error:  # memory, or no such kernel
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"attention by {way} does not work here: {reason}", stacklevel=2)
    return found


def _milliseconds(run: Any, device: torch.device) -> float:
    """Median wall time of a call, waited for, after one that is not counted."""
    times = []
    for _ in range(_REPEAT + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    # The first call compiles.
    return sorted(times[1:])[_REPEAT // 2]


# One step of training: the learning rate, a process's part of the rows, gradients, the update.


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
        if accelerator.device.type == "cpu":
            # Sums of gradients round by how many threads share them: the same whatever else runs.
            most = min(usable_cpus(), torch.get_num_threads())
            torch.set_num_threads(most if config.threads is None else parse_threads(config.threads))
        sharding.settle(accelerator, rows=self.rows_at_once, clip=settings.clip)
        self.wrapped, self.optimizer = sharding.prepare(accelerator, objective, optimizer)
        self.trainable = checkpoint.trainable(objective)

    def take(self, done: int, rows: Rows) -> StepResult:
        """Take the step after `done` steps."""
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


# Whether a running training's loss, weights and moments are still numbers.

_NEVER = torch.iinfo(torch.int64).max


class NonFiniteLossError(FloatingPointError):
    """The loss, its gradient, the weights or AdamW's moments became NaN or infinite; nothing of it
    was saved."""


class FiniteWatch:
    """Remembers the first step whose loss or gradient was not finite.

    `see` costs a few operations on the device and never waits for it; `check` does, and is called
    before anything is logged or saved.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        # [1], on the device, so that `see` need not wait for it.
        self.first = torch.full((1,), _NEVER, dtype=torch.int64, device=accelerator.device)
        self.samples: dict[int, list[int]] = {}  # of the steps since the last check

    def see(self, step: int, samples: list[int], loss: Tensor, norm: Tensor) -> None:
        """Take a step's loss and gradient norm, made from these sample indexes."""
        self.samples[step] = samples
        # fp16's scaler meets infinite gradients and skips those steps: they are no failure.
        seen = (loss, norm) if self.accelerator.scaler is None else (loss,)
        fine = torch.stack([value.detach().float().isfinite() for value in seen]).all()
        # The smallest of the steps that were not finite, kept without a branch on the host.
        self.first = torch.where(fine, self.first, self.first.clamp(max=step))

    def check(self) -> None:
        """Raise NonFiniteLossError, on all processes, if any process saw such a step."""
        # Gathered, so that all processes raise together and none waits for one that has ended.
        step = int(self.accelerator.gather(self.first).min())
        if step != _NEVER:
            raise NonFiniteLossError(
                f"the loss or its gradient is not finite at step {step} "
                f"(samples {ranges(self.samples[step])}); nothing of it was saved"
            )
        self.samples.clear()

    def check_state(
        self, step: int, parameters: Mapping[str, nn.Parameter], optimizer: Any
    ) -> None:
        """Raise NonFiniteLossError, on all processes, where the weights after `step` or their
        moments are not finite in any process. Called before they are saved or decoded with."""
        tensors = {
            (name, key): own_part(value)
            for name, parameter in parameters.items()
            for key, value in {"weight": parameter, **optimizer.state.get(parameter, {})}.items()
            if isinstance(value, Tensor)
        }
        device = self.accelerator.device
        fine = torch.stack([value.isfinite().all().to(device) for value in tensors.values()])
        # The place of the first tensor that is not finite; processes hold the same names in one
        # order.
        first = torch.where(fine.all(), _NEVER, (~fine).int().argmax())[None]
        worst = int(self.accelerator.gather(first).min())
        if worst != _NEVER:
            name, key = list(tensors)[worst]
            raise NonFiniteLossError(
                f"{name} ({key}) is not finite after step {step}, whose loss and gradient are; "
                "a lower optimizer.lr may help; nothing of it was saved"
            )


def ranges(numbers: list[int]) -> str:
    """``[3, 4, 5, 9]`` as ``3-5, 9``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


# A request to stop a running training, which all of its processes answer at the same step.


class StopRequest:
    """Whether SIGTERM, SIGHUP (the terminal is gone) or SIGINT (Ctrl-C) has reached any of the
    processes; all of them give the same answer. A second SIGINT is a KeyboardInterrupt at once.

    says: whether this process tells of it. A launcher passes on the SIGINT that the terminal has
    sent to all processes already: what comes within `PASSED_ON` seconds is the same one.
    """

    PASSED_ON = 1.0

    def __init__(self, processes: int, *, says: bool = True):
        self._received, self._first = 0, 0.0
        self._says = says
        # A group on the CPU: asking waits for the other processes, not for the device.
        self._group = dist.new_group(backend="gloo") if processes > 1 else None

    def asked(self) -> int:
        """The number of the signal that any process has received, 0 where none has. All processes
        call this at the end of each step, and all get the same answer."""
        if self._group is None:
            return self._received
        flag = torch.tensor(self._received)
        # The signal that any process has had; all leave the loop after the same step, else those
        # that go on would wait for gradients for ever.
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return int(flag)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The signals ask to stop instead of ending the process, in the main thread.

        The group is given back at the end: left to the garbage collector, its threads can wait for
        the interpreter's lock, which waits for them.
        """
        # Python lets only the main thread set handlers; in another one none is set.
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self._receive) for number in _asking() if is_main}
        try:
            yield
            # No process may give the group back while another still asks it.
            if self._group is not None:
                dist.barrier(group=self._group)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._received:
            self._received, self._first = number, now
            if self._says and number == signal.SIGINT:  # print may be under way: it cannot be used
                said = b"\nstopping after this step, which is saved; Ctrl-C again: at once\n"
                with suppress(OSError):  # nobody may read it any more
                    os.write(2, said)
        elif number == signal.SIGINT and now - self._first > self.PASSED_ON:
            raise KeyboardInterrupt
        self._received = max(self._received, number)


def _asking() -> list[signal.Signals]:
    """The signals that ask to stop. One that `nohup` has set to be ignored stays so."""
    asking = [signal.SIGTERM, signal.SIGINT]
    hangup = getattr(signal, "SIGHUP", None)  # not on Windows
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        asking.append(hangup)
    return asking


# A training in its process, which may be one of several: set up, step, report, save, finish.


class Training:
    """What a run is made of, from its newest checkpoint where it has one.

    done: steps that are behind it. sample: the first one of the next step. last: the step that it
    ends with (`stop_after` steps from here, None: all). stopped: the signal that asked it to end, 0
    where none has. All processes call its methods in the same order, because most wait for the
    others. Raises InputError where model, data and configuration do not go together.
    """

    def __init__(self, folder: RunFolder, stop_after: int | None = None):
        self.folder, self.config = folder, folder.config
        config = self.config
        self.accelerator = accelerate.Accelerator(
            # Where it is not told, accelerate makes no group of processes without an accelerator:
            # each would train the whole run, in one folder.
            cpu=not torch.accelerator.is_available(),
            mixed_precision=config.mixed_precision,
            gradient_accumulation_steps=config.gradient_accumulation,
            log_with=None if config.tracker == "none" else config.tracker,
            project_dir=folder.place,
        )
        self.is_main = self.accelerator.is_main_process
        self._set_up()
        self.done, self.sample, self.stopped = 0, 0, 0
        # Before the tracker and the log: it refuses what cannot be resumed, and cuts the log's end.
        self._go_on()
        self._start_tracker()
        self.start = self.done
        self.last = config.steps
        if stop_after is not None:
            self.last = min(config.steps, self.done + stop_after)
        self.began = time.time()
        self.log = Log(folder.log) if self.is_main else None
        self.progress = Progress(self.done, config.steps, shown=self.is_main)
        self.watch = FiniteWatch(self.accelerator)
        self.stop = StopRequest(self.accelerator.num_processes, says=self.is_main)

    def _set_up(self) -> None:
        """Model, objective, data and optimizer."""
        config, accelerator = self.config, self.accelerator
        check_attention(config.attention, accelerator.device)
        if config.compile:
            check_compile(accelerator)
        # Looked at before the model is loaded, so that a bad configuration is refused at once.
        rows_at_once(config, accelerator.num_processes)
        # A 4-bit base is quantised as it is loaded, on the device that it is trained on.
        quantized = config.quantize != "none"
        model = prepare_model(config, accelerator.device if quantized else "cpu")
        if config.compile:
            compile_layers(model.backbone)
        self.objective = OBJECTIVES[config.objective.name](model, config)
        self.objective.train()
        self.stream = self.objective.stream()
        self.evaluator = None
        if config.eval_every:
            held_out = self.stream.held_out
            loss = None if held_out is None else HeldoutLoss(self.objective, held_out)
            self.evaluator = Evaluator(model, config, accelerator, loss)
        self.stepper = Stepper(accelerator, self.objective, config)

    def _go_on(self) -> None:
        """Take the newest checkpoint's state, and only then write to the folder."""
        saved = checkpoint.newest(self.folder.checkpoints)
        if saved is not None:
            self.done, self.sample = saved["step"], saved["sample"]
            trainable, optimizer = self.stepper.trainable, self.stepper.optimizer
            sharding.write_state(self.accelerator, trainable, optimizer, saved)
        if self.is_main:
            report, held_out = self.stream.report(), self.stream.held_out
            for line in (
                report and f"data: {report}",
                held_out and f"held-out loss: {held_out.said}",
                self.folder.begin(self.done),
            ):
                if line:
                    print(line)

    def _start_tracker(self) -> None:
        if self.config.tracker != "none":
            # What wandb writes lies with the run, not in the working folder.
            where = {"wandb": {"dir": str(self.folder.place)}}
            keys = flat(self.config.model_dump(mode="json"))
            self.accelerator.init_trackers("d2f", config=keys, init_kwargs=where)

    def listening(self) -> AbstractContextManager[None]:
        """Signals ask to stop after the step, as `StopRequest.listening` says."""
        return self.stop.listening()

    @property
    def goes_on(self) -> bool:
        return self.done < self.last and not self.stopped

    def step(self) -> StepResult:
        """Take the next step."""
        rows, following = fill_rows(self.stream, self.sample)
        result = self.stepper.take(self.done, rows)
        self.progress.step()
        self.done, self.sample = self.done + 1, following
        samples = [p.sample.index for row in rows for p in row]
        self.watch.see(self.done, samples, result.loss, result.norm)
        # Asked by all processes after each step, also where none of them has had a signal.
        self.stopped = self.stop.asked()
        return result

    def report(self, result: StepResult) -> None:
        """Show and log the step that was just taken, if it is one to show or log, evaluated where
        it is one to evaluate. Raises NonFiniteLossError."""
        config, done = self.config, self.done
        evaluated = self.evaluator is not None and self.evaluator.due(done)
        logged = evaluated or done % config.log_every == 0 or done == config.steps
        # The first step of every call is shown too: it tells that the run works.
        if not logged and done != self.start + 1:
            return
        # Waits for the device, so only in steps that are shown or saved.
        self.watch.check()
        # Each process has the sum over its own rows, normalised by all: their sum is the step's
        # loss.
        loss = self.accelerator.reduce(result.loss, "sum").item()
        self.progress.report(done, loss, result.rate, last=not self.goes_on)
        if not logged:
            return
        values = {"loss": loss, "lr": result.rate, "grad_norm": float(result.norm)}
        values["samples"] = self.sample
        if self.evaluator is not None and evaluated:
            self.watch.check_state(done, self.stepper.trainable, self.stepper.optimizer)
            # The others wait for the main process at their next common operation.
            if self.is_main:
                values |= (found := self.evaluator.run(done))
                self.progress.say(f"evaluation after step {done:,}: {said(found)}")
        self.accelerator.log(values, step=done)
        if self.log is not None:
            seconds = round(time.time() - self.began, 1)
            self.log.write({"step": done, **values, "seconds": seconds})

    def save(self) -> None:
        """Keep a checkpoint of the step that was just taken, if it is one to keep. Raises
        NonFiniteLossError, CheckpointError."""
        # The last step of a call is always kept, also where a signal made it the last.
        if self.goes_on and self.done % self.config.save_every != 0:
            return
        trainable, optimizer = self.stepper.trainable, self.stepper.optimizer
        self.watch.check()
        self.watch.check_state(self.done, trainable, optimizer)
        state = sharding.read_state(self.accelerator, trainable, optimizer, self.done)
        if self.is_main:
            kept = {"step": self.done, "sample": self.sample, **state}
            checkpoint.save(self.folder.checkpoints, self.done, kept, self.config.keep)

    def finish(self) -> None:
        """Export the result of a run that has come to its end; say where one goes on that was
        stopped. Raises KeyboardInterrupt where SIGINT stopped it."""
        self.progress.close()
        if self.log is not None:
            self.log.close()
        if self.done == self.config.steps:
            export_run(self.accelerator, self.objective, self.stream, self.folder)
            if self.is_main:
                print(result_text(self.config, self.folder.expected))
            return
        self.accelerator.end_training()
        if self.stopped and self.is_main:
            name = signal.Signals(self.stopped).name
            print(
                f"stopped by {name} after step {self.done}, which is saved: "
                "the same command goes on"
            )
        if self.stopped == signal.SIGINT:
            raise KeyboardInterrupt
