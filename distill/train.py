"""accelerate launch -m distill.train [--config NAME] [--key value ...]

Trains a model: from-scratch or warm-started masked diffusion, the autoregressive baseline, the D2F
student of a bidirectional teacher, WINO+ on rollouts of distill.rollouts.__main__, or WeDLM from an
autoregressive model. A killed run goes on where its newest checkpoint is, to the same weights to
the bit; a finished one says so, and goes on with higher steps. Ctrl-C and SIGTERM save after the
step. The result (adapter, merged model, contract, card, configuration, log) lies in the
configuration's `output`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a file, as accelerate launch does
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from d2f.command import CommandParser
from d2f.errors import InputError
from d2f.locks import locked
from d2f.quiet import quiet
from decode.commands.pipeline_flags import add_verbose

if TYPE_CHECKING:
    from distill.config import TrainConfig

INTERRUPTED = 130  # exit status, as of a command that SIGINT ended


LAUNCH = "accelerate launch -m distill.train"
DEFAULT_CONFIG = "tiny-d2f"
_EPILOG = """\
Every key of the configuration can be overridden: --steps 10 --optimizer.lr 1e-4

d2f train runs in one process; for several call accelerate launch -m distill.train, for their kinds
with --config_file "$(d2f configs ddp)" or another of accelerate in `d2f configs`.
"""


def parse(arguments: list[str] | None = None) -> tuple[TrainConfig, argparse.Namespace]:
    """The configuration that the command line asks for, and the command's own options. Raises
    InputError."""
    usual = LAUNCH if __package__ else "accelerate launch distill/train.py"
    description = (__doc__ or "").replace(LAUNCH, usual)
    parser = CommandParser(usual, description=description, epilog=_EPILOG)
    parser.add_argument(
        "--config",
        help="YAML file, or a name of training in `d2f configs`; default: "
        f"{DEFAULT_CONFIG}, which distils the bundled teacher into a D2F student",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="do not train: say what the run would need, fail on what would fail later",
    )
    add_verbose(parser)
    options, overrides = parser.parse_known_args(arguments)
    from d2f.shipped import TRAINING, shipped
    from distill.config import read_config

    given = options.config
    path = shipped(*TRAINING)[DEFAULT_CONFIG] if given is None else given
    config = read_config(path, overrides)
    if given is None and _is_first():
        print(
            f"notice: no --config: {DEFAULT_CONFIG}, which distils the bundled teacher "
            f"({config.init}) into {config.output}",
            file=sys.stderr,
        )
    return config, options


def train(config: TrainConfig, *, stop_after: int | None = None) -> Path:
    """Run the training and export its result; the folder of the result.

    stop_after: end after that many steps of this call, as a killed run would. SIGTERM saves a
    checkpoint at the end of the step and returns; SIGINT does, and raises KeyboardInterrupt.
    Raises NonFiniteLossError, InputError.
    """
    from distill.objectives import OBJECTIVES
    from distill.run.progress import result_text
    from distill.run.run_folder import RunFolder, flat

    folder = RunFolder(config)
    if folder.is_finished:
        if _is_first():
            print(f"nothing is left to do: {result_text(config, folder.expected)}")
        return folder.place
    folder.check_inputs()
    os.environ.setdefault("WANDB_MODE", config.wandb_mode)
    doubt = OBJECTIVES[config.objective].doubt(config)
    if doubt is not None and _is_first():
        print(doubt, file=sys.stderr)
    from accelerate import Accelerator

    from distill.data import fill_rows
    from distill.prepare_model import prepare_model
    from distill.run import checkpoint, sharding
    from distill.run.attention_choice import check_attention
    from distill.run.evaluation import Evaluator
    from distill.run.export import export_run
    from distill.run.finite import FiniteWatch
    from distill.run.log import Log
    from distill.run.progress import Progress
    from distill.run.stop import StopRequest
    from distill.run.training_step import Stepper, rows_at_once

    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        gradient_accumulation_steps=config.gradient_accumulation,
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=folder.place,
    )
    is_main = accelerator.is_main_process
    check_attention(config.attention, accelerator.device)
    rows_at_once(config, accelerator.num_processes)
    quantized = config.quantize != "none"
    model = prepare_model(config, accelerator.device if quantized else "cpu")
    objective = OBJECTIVES[config.objective](model, config)
    objective.train()
    stream = objective.stream()
    evaluator = Evaluator(model, config, accelerator) if config.eval_every else None
    stepper = Stepper(accelerator, objective, config)
    trainable, optimizer = stepper.trainable, stepper.optimizer

    done, sample = 0, 0
    saved = checkpoint.newest(folder.checkpoints)
    if saved is not None:
        done, sample = saved["step"], saved["sample"]
        sharding.write_state(accelerator, trainable, optimizer, saved)
    if is_main:
        for said in (stream.report() and f"data: {stream.report()}", folder.begin(done)):
            if said:
                print(said)
    if config.tracker != "none":
        # What wandb writes lies with the run, not in the working folder.
        where = {"wandb": {"dir": str(folder.place)}}
        keys = flat(config.model_dump(mode="json"))
        accelerator.init_trackers("d2f", config=keys, init_kwargs=where)

    began = time.time()
    log = Log(folder.log) if is_main else None
    start, last = done, config.steps if stop_after is None else min(config.steps, done + stop_after)
    progress = Progress(done, config.steps, shown=is_main)
    watch = FiniteWatch(accelerator)
    stop, stopped = StopRequest(accelerator.num_processes, says=is_main), 0
    with stop.listening():
        while done < last and not stopped:
            rows, following = fill_rows(stream, sample)
            loss, norm, rate = stepper.take(done, rows)
            progress.step()
            done, sample = done + 1, following
            # fp16's scaler meets infinite gradients and skips those steps: they are no failure.
            seen = (loss,) if accelerator.scaler is not None else (loss, norm)
            watch.see(done, [p.sample.index for row in rows for p in row], *seen)
            stopped = stop.asked()
            evaluated = evaluator is not None and evaluator.due(done)
            logged = evaluated or done % config.log_every == 0 or done == config.steps
            if logged or done == start + 1:
                watch.check()
                total = accelerator.reduce(loss, "sum").item()
                progress.report(done, total, rate, last=done == last or bool(stopped))
            if logged:
                values = {"loss": total, "lr": rate, "grad_norm": float(norm)}
                values["samples"] = sample
                values.update(stream.counts())
                if evaluator is not None and evaluated:
                    watch.check_state(done, trainable, optimizer)
                    values |= evaluator.run(done) if is_main else {}
                accelerator.log(values, step=done)
                if log is not None:
                    log.write({"step": done, **values, "seconds": round(time.time() - began, 1)})
            if done % config.save_every == 0 or done == last or stopped:
                watch.check()
                watch.check_state(done, trainable, optimizer)
                state = sharding.read_state(accelerator, trainable, optimizer, done)
                if is_main:
                    whole = {"step": done, "sample": sample, **state}
                    checkpoint.save(folder.checkpoints, done, whole, config.keep)
    progress.close()
    if log is not None:
        log.close()
    if done == config.steps:
        export_run(accelerator, objective, stream, folder)
        if is_main:
            print(result_text(config, folder.expected))
        return folder.place
    accelerator.end_training()
    if stopped and is_main:
        name = signal.Signals(stopped).name
        print(f"stopped by {name} after step {done}, which is saved: the same command goes on")
    if stopped == signal.SIGINT:
        raise KeyboardInterrupt
    return folder.place


def _is_first() -> bool:
    """Whether this is the process that speaks for all, before accelerate knows."""
    return os.environ.get("RANK", "0") == "0"


def main() -> None:
    try:
        config, options = parse()
        with quiet(options.verbose):
            if options.check:
                from distill.check import check

                print(check(config, int(os.environ.get("WORLD_SIZE", "1"))))
                return
            with locked(Path(config.output)) if _is_first() else contextlib.nullcontext():
                train(config)
    except (InputError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        if _is_first():
            print("interrupted: the same command goes on", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
