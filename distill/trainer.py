"""Train a model: data, objective, optimizer, processes, steps, checkpoints and result, in order."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import accelerate
import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from d2f.attention import SpanPlan, Way
from d2f.device import parse_threads, rank, usable_cpus
from d2f.errors import InputError
from d2f.files import write_beside
from d2f.model import DiffusionModel
from distill import checkpoint
from distill.checkpoint import RunFolder, flat
from distill.config import TrainConfig
from distill.data.stream import fill_rows
from distill.export import export_run, prepare_model
from distill.log import Log, Progress, draw_curve, result_text
from distill.objectives import OBJECTIVES
from distill.objectives.base import Batch, Objective, gathered
from distill.sharding import (
    check_compile,
    compile_layers,
    prepare,
    read_state,
    trained_parameters,
    write_state,
)


def train(config: TrainConfig, *, stop_after: int | None = None) -> Path:
    """Train, export the result and return its folder; a run that was stopped goes on.

    stop_after: end after that many steps of this call, as a killed run would. SIGTERM or SIGHUP
    saves a checkpoint at the end of the step and returns; SIGINT does, and raises
    KeyboardInterrupt. All processes call this. Raises NonFiniteLossError, InputError.
    """
    folder = RunFolder(config)
    is_first = rank() == 0  # before accelerate knows
    if folder.is_finished:
        if is_first:
            print(f"nothing is left to do: {result_text(config, folder.expected)}")
        return folder.place
    if is_first:
        for line in doubts(config):
            print(line, file=sys.stderr)

    # Processes
    os.environ.setdefault("WANDB_MODE", config.wandb_mode)  # the user's variable comes first
    accelerator = accelerate.Accelerator(
        # Unless told, accelerate makes no group of processes without an accelerator: each would
        # train the whole run, in one folder.
        cpu=not torch.accelerator.is_available(),
        mixed_precision=config.mixed_precision,
        gradient_accumulation_steps=config.gradient_accumulation,
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=folder.place,
    )
    device, is_main = accelerator.device, accelerator.is_main_process
    launched = "ACCELERATE_USE_CPU" in os.environ  # by accelerate launch, without torchrun
    if launched and device.type == "cpu" and accelerator.num_processes == 1:
        print(
            "notice: one process trains; on a CPU accelerate launch starts several by "
            "--multi_gpu --num_processes N",
            file=sys.stderr,
        )
    if config.attention == "flex" and device.type != "cuda":
        raise InputError(f"attention flex trains on a GPU only, this is {device}: take sdpa")
    if config.compile:
        check_compile(accelerator)
    parts, rows = config.gradient_accumulation, rows_at_once(config, accelerator.num_processes)
    if device.type == "cpu":
        # Sums of gradients round by how many threads share them: the same whatever else runs.
        threads = min(usable_cpus(), torch.get_num_threads())
        torch.set_num_threads(threads if config.threads is None else parse_threads(config.threads))

    # Model, objective and data. A 4-bit base is quantised as it is loaded, on its device.
    model = prepare_model(config, "cpu" if config.quantize == "none" else device)
    if config.compile:
        compile_layers(model.backbone)
    objective = OBJECTIVES[config.objective.name](model, config)
    module = LossModule(objective).train()
    stream = objective.stream()
    evaluator, eval_every = None, config.eval_every or 0
    if eval_every:
        from distill.evaluation import Evaluator, evaluation_text

        evaluator = Evaluator(objective, stream.held_out, accelerator)

    # Optimizer
    settings = config.optimizer
    adamw = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    wrapped, optimizer = prepare(accelerator, module, adamw, rows=rows, clip=settings.clip)
    trained = trained_parameters(module)

    # The newest checkpoint; only after it was taken is the folder written to.
    done = sample = 0
    saved = checkpoint.newest(folder.checkpoints)
    if saved is not None:
        done, sample = saved["step"], saved["sample"]
        write_state(accelerator, trained, optimizer, saved)
        del saved
    if is_main:
        data, held_out = stream.report(), stream.held_out
        for said in (
            data and f"data: {data}",
            held_out and f"held-out loss: {held_out.said}",
            folder.begin(done),
        ):
            if said:
                print(said)
    if config.tracker != "none":
        keys = {key: str(value) for key, value in flat(config.model_dump(mode="json")).items()}
        # wandb writes beside the run, not into the working folder.
        where = {"wandb": {"dir": str(folder.place)}}
        accelerator.init_trackers("d2f", config=keys, init_kwargs=where)

    # Steps
    start, last = done, config.steps
    if stop_after is not None:
        last = min(last, done + stop_after)
    log = Log(folder.log, done) if is_main else None
    progress = Progress(done, config.steps, shown=is_main)
    stop = StopRequest(accelerator.num_processes, says=is_main)
    stopped, recent = 0, []  # the signal to stop; losses since the last line on the screen
    finite: dict[str, Tensor] = {}  # whether each step since the last check was
    with stop.listening():
        while done < last and not stopped:
            packed, following = fill_rows(stream, sample)
            rate = learning_rate(config, done)
            for group in optimizer.param_groups:
                # From the step's number alone, so that a resume has no scheduler to restore.
                group["lr"] = rate
            loss = torch.zeros((), device=device)
            for part in range(parts):
                # Each part is the same rows whichever process feeds it: processes in order, parts
                # within.
                first = (accelerator.process_index * parts + part) * rows
                batch = objective.batch(packed, slice(first, first + rows)).to(device)
                if objective.attention is None:  # chosen once: the first batch has all's shape
                    objective.attention = choose_attention(accelerator, config, model, batch.spans)
                seed_dropout(config.seed, done, first)
                with accelerator.accumulate(wrapped):
                    with accelerator.autocast():
                        part_loss = wrapped(batch)
                    # Gradients are averaged over processes and parts; the loss is a sum.
                    accelerator.backward(part_loss * (accelerator.num_processes * parts))
                loss += part_loss.detach()
            norm = accelerator.clip_grad_norm_(list(trained.values()), settings.clip)
            # DeepSpeed has none before its first step; FSDP's is a DTensor.
            norm = gathered(norm) if isinstance(norm, Tensor) else torch.tensor(norm or 0.0)
            norm = norm.to(device)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.bar.update()
            done, sample = done + 1, following
            recent.append(loss)
            # fp16's scaler meets infinite gradients and skips those steps: they are no failure.
            seen = torch.stack([loss, norm] if accelerator.scaler is None else [loss])
            samples = f"{packed[0][0].sample.index} to {sample - 1}"
            what = f"the loss or its gradient at step {done} (samples {samples})"
            finite[what] = seen.isfinite().all()
            # Asked by all processes after each step, also where none of them has had a signal.
            stopped = stop.asked()
            is_last = done == last or bool(stopped)

            # Log and evaluation. The first step of a call is shown too: it tells that it works.
            ends = done == config.steps
            evaluates = eval_every > 0 and (ends or done % eval_every == 0)
            logs = evaluates or ends or done % config.log_every == 0
            saves = is_last or done % config.save_every == 0
            shows = logs or done == start + 1
            if shows or saves:  # reading them waits for the device
                require_finite(accelerator, finite)
                finite.clear()
            if shows:
                # Each process has the sum over its own rows, normalised by all.
                losses = accelerator.reduce(torch.stack(recent), "sum")
                progress.report(done, losses.mean().item(), len(recent), rate, last=is_last)
                recent.clear()
            if logs:
                values = {"loss": losses[-1].item(), "lr": rate, "grad_norm": float(norm)}
                values |= {"samples": sample}
                # The others wait for the main process at their next common operation.
                if evaluates and evaluator is not None and is_main:
                    found = evaluator.run(done)
                    values |= found
                    progress.say(f"evaluation after step {done:,}: {evaluation_text(found)}")
                accelerator.log(values, step=done)
                if log is not None:
                    log.write({"step": done, **values})

            # Checkpoint; the last step of a call is always one, also where a signal made it so.
            if saves:
                state = read_state(accelerator, trained, optimizer, done)
                if is_main:
                    state |= {"step": done, "sample": sample}
                    checkpoint.save(folder.checkpoints, done, state, config.keep)
    progress.bar.close()

    # Result
    if done == config.steps:
        export_run(accelerator, objective, stream, folder)
        if is_main:
            print(result_text(config, folder.expected))
        return folder.place
    accelerator.end_training()
    if is_main:
        draw_curve(folder.log)
    if stopped and is_main:
        name = signal.Signals(stopped).name
        # Of Ctrl-C the command itself says the rest.
        goes_on = "" if stopped == signal.SIGINT else ": the same command goes on"
        print(f"stopped by {name} after step {done}, which is saved{goes_on}")
    if stopped == signal.SIGINT:
        raise KeyboardInterrupt
    return folder.place


class LossModule(nn.Module):
    """Give accelerate an objective's loss as a module that has the parameters of its network."""

    def __init__(self, objective: Objective):
        super().__init__()
        self.network, self.loss = objective.network, objective.forward
        self._no_split_modules = objective.model.backbone._no_split_modules  # FSDP's units

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(batch)


def doubts(config: TrainConfig) -> list[str]:
    """Return the warnings to print before a run begins, which goes on all the same."""
    found = OBJECTIVES[config.objective.name].doubt(config)
    lines = [] if found is None else [found]
    on_cpu = not torch.accelerator.is_available()
    if config.mixed_precision == "bf16" and on_cpu and not cpu_has_bf16():
        lines.append(
            "warning: this CPU has no bf16 arithmetic, so that mixed_precision bf16 is several "
            "times slower here than fp32: --mixed_precision no"
        )
    return lines


def cpu_has_bf16() -> bool:
    """Tell whether matrices of bf16 are multiplied as such: without AVX-512 or AMX a CPU goes
    through fp32, number by number."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of a step, counted from 0: linear warm-up, then constant or cosine."""
    settings = config.optimizer
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    done = (step - settings.warmup) / max(1, config.steps - settings.warmup)
    floor = settings.final_lr_share
    return settings.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def rows_at_once(config: TrainConfig, processes: int) -> int:
    """Return how many rows a process feeds at once. Raises InputError."""
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


# On a GPU attention is computed in the way that is fastest at the run's own shape, measured before
# the first step and kept beside the run: ways differ in rounding, a resume takes the same.

ATTENTION = "attention.json"
WAYS: tuple[Way, ...] = ("flex", "sdpa")
_REPEAT = 10


def choose_attention(
    accelerator: Accelerator, config: TrainConfig, model: DiffusionModel, spans: Tensor
) -> Way:
    """Return the way to compute attention: the configured one, or for "auto" sdpa on a CPU, on a
    GPU the one kept in the run's folder, else the fastest, which the main process writes there.

    spans: int32 ``[R, L, K, 2]`` of a step.
    """
    if config.attention != "auto":
        return config.attention
    if not spans.is_cuda:
        return "sdpa"
    path, chosen = Path(config.output) / ATTENTION, [""]
    if accelerator.is_main_process:
        if not path.is_file():
            kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
            dtype = kinds.get(accelerator.mixed_precision, torch.float32)
            found = measure_attention(model, spans, dtype)
            best = min(found, key=found.__getitem__)
            write_beside(path, json.dumps({"chosen": best, "milliseconds": found}) + "\n")
            print(f"attention: {best} (milliseconds a layer, forward and backward: {found})")
        chosen = [json.loads(path.read_text(encoding="utf-8"))["chosen"]]
    way: Way = broadcast_object_list(chosen)[0]
    return way


def measure_attention(model: DiffusionModel, spans: Tensor, dtype: torch.dtype) -> dict[Way, float]:
    """Time a layer's attention, forward and backward, with its share of making the mask, by each
    way that works here; in milliseconds."""
    config = model.backbone.config
    heads, kv_heads, layers = (
        config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers,
    )  # fmt: skip
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    batch, length = spans.shape[:2]
    options: dict[str, Any] = {"dtype": dtype, "device": spans.device, "requires_grad": True}
    q, k, v = (
        torch.randn(batch, count, length, dim, **options) for count in (heads, kv_heads, kv_heads)
    )
    upstream = torch.randn(batch, length, heads, dim, dtype=dtype, device=spans.device)

    def step(way: Way) -> None:
        plan = SpanPlan(spans, way=way)  # made once a forward and shared by the layers
        for _ in range(layers):
            torch.autograd.grad(plan.attend(None, q, k, v), (q, k, v), upstream)

    found: dict[Way, float] = {}
    for way in WAYS:
        try:
            timer = Timer("step(way)", globals={"step": step, "way": way})
            found[way] = round(1e3 * timer.timeit(_REPEAT).median / layers, 3)
        except (RuntimeError, NotImplementedError) as error:  # memory, or no such kernel
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"attention by {way} does not work here: {reason}", stacklevel=2)
    return found


class NonFiniteLossError(FloatingPointError):
    """The loss or its gradient became NaN or infinite; nothing of it was saved."""


def require_finite(accelerator: Accelerator, finite: Mapping[str, Tensor]) -> None:
    """Raise NonFiniteLossError that names the first of these that is not finite in some process.
    All processes call this with the same names, and raise together."""
    if not finite:
        return
    bad = accelerator.reduce((~torch.stack(list(finite.values()))).int(), "sum").tolist()
    for what, count in zip(finite, bad, strict=True):
        if count:
            raise NonFiniteLossError(
                f"{what} is not finite: a lower optimizer.lr may help; nothing of it was saved"
            )


class StopRequest:
    """Ask a training to stop at SIGTERM, SIGHUP (the terminal is gone) or SIGINT (Ctrl-C) to any of
    its processes; all of them get the same answer. A second SIGINT is a KeyboardInterrupt at once.

    says: this process tells of it. A launcher passes on the SIGINT that the terminal has sent to
    all processes already: what comes within `PASSED_ON` seconds is the same one.
    """

    PASSED_ON = 1.0

    def __init__(self, processes: int, *, says: bool = True):
        self._received, self._first, self._says = 0, 0.0, says
        # A group on the CPU: asking waits for the other processes, not for the device.
        self._group = dist.new_group(backend="gloo") if processes > 1 else None

    def asked(self) -> int:
        """Return the number of the signal that any process has received, else 0. All processes call
        this at the end of each step: one that went on alone would wait for gradients for ever."""
        if self._group is None:
            return self._received
        flag = torch.tensor(self._received)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return int(flag)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Let the signals ask to stop instead of ending the process."""
        asking = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # which nohup has set
            asking.pop()
        if threading.current_thread() is not threading.main_thread():
            asking = []  # Python lets only the main thread set handlers
        before = {number: signal.signal(number, self._receive) for number in asking}
        try:
            yield
            if self._group is not None:  # no process may destroy it while another still asks
                dist.barrier(group=self._group)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._group is not None:
                # Its threads would wait for the interpreter's lock in the garbage collector.
                dist.destroy_process_group(self._group)
                self._group = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._received:
            self._first = now
            if self._says and number == signal.SIGINT:  # print may be under way: it cannot be used
                with suppress(OSError):  # nobody may read it any more
                    os.write(
                        2, b"\nstopping after this step, which is saved; Ctrl-C again: at once\n"
                    )
        elif number == signal.SIGINT and now - self._first > self.PASSED_ON:
            raise KeyboardInterrupt
        self._received = max(self._received, number)
