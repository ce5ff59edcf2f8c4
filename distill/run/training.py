"""A training in its process, which may be one of several: set up, step, report, save, finish."""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager

import accelerate
import torch

from distill.data import fill_rows
from distill.objectives import OBJECTIVES
from distill.prepare_model import prepare_model
from distill.run import checkpoint, sharding
from distill.run.attention_choice import check_attention
from distill.run.compiled_layers import check_compile, compile_layers
from distill.run.evaluation import Evaluator, said
from distill.run.export import export_run
from distill.run.finite import FiniteWatch
from distill.run.heldout_loss import HeldoutLoss
from distill.run.log import Log
from distill.run.progress import Progress, result_text
from distill.run.run_folder import RunFolder, flat
from distill.run.stop import StopRequest
from distill.run.training_step import Stepper, StepResult, rows_at_once


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
        self.objective = OBJECTIVES[config.objective](model, config)
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
        values.update(self.stream.counts())
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
