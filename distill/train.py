"""accelerate launch -m distill.train --config NAME [--key value ...]

Trains a model: from-scratch or warm-started masked diffusion, the autoregressive baseline, the D2F
student of a bidirectional teacher, WINO+ on rollouts of distill.rollouts, or WeDLM from an
autoregressive model. A killed run goes on where its newest checkpoint is, to the same weights to
the bit. The result (adapter, merged model, contract, card, configuration, log) lies in the
configuration's `output`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a file, as accelerate launch does
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from d2f.command import CommandParser
from d2f.errors import InputError
from d2f.locks import locked

if TYPE_CHECKING:
    from distill.config import TrainConfig


LAUNCH = "accelerate launch -m distill.train"
_EPILOG = """\
Every key of the configuration can be overridden: --steps 10 --optimizer.lr 1e-4

d2f train runs in one process; for several call accelerate launch -m distill.train, for their kinds
with --config_file "$(d2f configs ddp)" or another of accelerate in `d2f configs`.
"""


def parse(arguments: list[str] | None = None) -> tuple[TrainConfig, bool]:
    """The configuration that the command line asks for, and whether only to check it. Raises
    InputError."""
    usual = LAUNCH if __package__ else "accelerate launch distill/train.py"
    description = (__doc__ or "").replace(LAUNCH, usual)
    parser = CommandParser(usual, description=description, epilog=_EPILOG)
    parser.add_argument(
        "--config", required=True, help="YAML file, or a name of training in `d2f configs`"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="do not train: say what the run would need, fail on what would fail later",
    )
    options, overrides = parser.parse_known_args(arguments)
    from distill.config import read_config

    return read_config(options.config, overrides), options.check


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of a step, counted from 0: linear warm-up, then constant or cosine."""
    import math

    settings = config.optimizer
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return settings.lr
    done = (step - settings.warmup) / max(1, config.steps - settings.warmup)
    floor = settings.final_lr_share
    return settings.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def train(config: TrainConfig, *, stop_after: int | None = None) -> Path:
    """Run the training and export its result; the folder of the result.

    stop_after: end after that many steps of this call, as a killed run would. SIGTERM saves a
    checkpoint at the end of the step and returns. Raises NonFiniteLossError, InputError.
    """
    os.environ.setdefault("WANDB_MODE", config.wandb_mode)
    import torch
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list
    from tqdm import tqdm

    from distill import checkpoints, sharded
    from distill.attention import attention_dtype, check_attention, choose_attention
    from distill.card import card
    from distill.data import fill_rows
    from distill.evaluation import Evaluator
    from distill.export import export
    from distill.objectives import OBJECTIVES
    from distill.start import prepare_model
    from distill.watch import FiniteWatch, StopRequest

    output = Path(config.output)
    refuse_another_run(config, output)
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        gradient_accumulation_steps=config.gradient_accumulation,
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=output,
    )
    check_attention(config.attention, accelerator.device)
    rank, world = accelerator.process_index, accelerator.num_processes
    parts = config.gradient_accumulation
    share = rows_at_once(config, world)
    quantized = config.quantize != "none"
    model = prepare_model(config, accelerator.device if quantized else "cpu")
    objective = OBJECTIVES[config.objective](model, config)
    objective.train()
    stream = objective.stream()
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        [p for p in objective.parameters() if p.requires_grad],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    evaluator = Evaluator(model, config, accelerator) if config.eval_every else None
    sharded.settle(accelerator, rows=share, clip=settings.clip)
    wrapped, optimizer = sharded.prepare(accelerator, objective, optimizer)
    trainable = checkpoints.trainable(objective)

    done, sample = 0, 0
    saved = checkpoints.newest(output / "checkpoints")
    if saved is not None:
        done, sample = saved["step"], saved["sample"]
        sharded.write_state(accelerator, trainable, optimizer, saved)
    if accelerator.is_main_process:
        if stream.report() is not None:
            print(f"data: {stream.report()}")
        output.mkdir(parents=True, exist_ok=True)
        config.save(output / "config.yaml")
        _keep_lines(output / "log.jsonl", done)
    if config.tracker != "none":
        accelerator.init_trackers("d2f", config=_flat(config.model_dump(mode="json")))

    bar = tqdm(
        total=config.steps,
        initial=done,
        disable=not accelerator.is_main_process or not sys.stderr.isatty(),
    )
    began = time.time()
    log = (output / "log.jsonl").open("a") if accelerator.is_main_process else None
    last = config.steps if stop_after is None else min(config.steps, done + stop_after)
    watch, stop, stopped = FiniteWatch(accelerator), StopRequest(world), False
    with stop.listening():
        while done < last and not stopped:
            rows, following = fill_rows(stream, sample)
            rate = learning_rate(config, done)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = torch.zeros((), device=accelerator.device)
            for part in range(parts):
                first = (rank * parts + part) * share
                batch = objective.batch(rows, slice(first, first + share)).to(accelerator.device)
                if objective.attention is None:
                    chosen: list[Any] = [None]  # by one process for all
                    if accelerator.is_main_process:
                        dtype = attention_dtype(accelerator)
                        chosen[0] = choose_attention(
                            config.attention, model, batch.spans, dtype, output
                        )
                    objective.attention = broadcast_object_list(chosen)[0]
                seed_dropout(config.seed, done, first)
                with accelerator.accumulate(wrapped):
                    with accelerator.autocast():
                        part_loss = wrapped(batch)
                    # Gradients are averaged over processes and parts; the loss is a sum.
                    accelerator.backward(part_loss * (world * parts))
                loss += part_loss.detach()
            norm = accelerator.clip_grad_norm_(list(trainable.values()), settings.clip)
            norm = sharded.as_norm(norm, accelerator.device)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            bar.update()
            done, sample = done + 1, following
            # fp16's scaler meets infinite gradients and skips those steps: they are no failure.
            seen = (loss,) if accelerator.scaler is not None else (loss, norm)
            watch.see(done, [p.sample.index for row in rows for p in row], *seen)
            stopped = stop.asked()
            due = evaluator is not None and evaluator.due(done)
            if due or done % config.log_every == 0 or done == config.steps:
                watch.check()
                total = accelerator.reduce(loss, "sum").item()
                values: dict[str, Any] = {"loss": total, "lr": rate, "grad_norm": float(norm)}
                values["samples"] = sample
                values.update(stream.counts())
                if evaluator is not None and due and accelerator.is_main_process:
                    values |= evaluator.run(done)
                accelerator.log(values, step=done)
                bar.set_postfix(loss=f"{total:.4f}")
                if log is not None:
                    line = {"step": done, **values, "seconds": round(time.time() - began, 1)}
                    log.write(json.dumps(line) + "\n")
                    log.flush()
            if done % config.save_every == 0 or done == last or stopped:
                watch.check()
                state = sharded.read_state(accelerator, trainable, optimizer, done)
                if accelerator.is_main_process:
                    whole = {"step": done, "sample": sample, **state}
                    checkpoints.save(output / "checkpoints", done, whole, config.keep)
    bar.close()
    if log is not None:
        log.close()
    complete = done == config.steps
    changed = sharded.is_sharded(accelerator) or quantized or config.base_dtype != "float32"
    weights = sharded.read_weights(accelerator, trainable) if complete and changed else {}
    accelerator.end_training()
    if not accelerator.is_main_process:
        return output
    if stopped and not complete:
        print(f"stopped by SIGTERM after step {done}, which is saved: the same command goes on")
    if complete:
        if changed:  # export from the base as it was, in fp32
            model = prepare_model(config, plain=True)
            fresh = checkpoints.trainable(OBJECTIVES[config.objective](model, config))
            with torch.no_grad():
                for name, value in weights.items():
                    fresh[name].copy_(value)
        export(model, config, output, card(config, stream, output / "log.jsonl"))
    return output


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
    import numpy as np
    import torch

    torch.manual_seed(int(np.random.SeedSequence((seed, step, row)).generate_state(1)[0]))


def refuse_another_run(config: TrainConfig, output: Path) -> None:
    """Raise InputError if `output` holds a run of another configuration: going on from its
    checkpoints would mix the two."""
    from d2f.configuration import read_mapping
    from distill.config import parse_config

    path = output / "config.yaml"
    if not path.is_file():
        return
    there = read_mapping(path)
    with contextlib.suppress(InputError):  # a key that came since then has its default
        there = parse_config(there, str(path)).model_dump(mode="json")
    theirs, ours = _flat(there), _flat(config.model_dump(mode="json"))
    free = {"output", "tracker", "wandb_mode", "log_every", "save_every", "keep", "export_official"}
    free |= {"gradient_accumulation", "gradient_checkpointing"}  # the same sums, otherwise taken
    differ = [
        f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} now"
        for key in dict.fromkeys([*ours, *theirs])
        if key not in free and theirs.get(key) != ours.get(key)
    ]
    if differ:
        raise InputError(
            f"{output} holds another run ({'; '.join(differ)}): "
            "expected the same configuration, or another output"
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys, lists as text."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, int | float) else str(value)
    return flat


def _keep_lines(log: Path, step: int) -> None:
    """Drop what a killed run logged after its newest checkpoint: those steps come again."""
    if log.is_file():
        lines = [line for line in log.read_text().splitlines() if line.endswith("}")]
        kept = [line + "\n" for line in lines if json.loads(line)["step"] <= step]
        beside = log.with_name(log.name + ".writing")
        beside.write_text("".join(kept))
        beside.rename(log)


def main() -> None:
    try:
        config, only_check = parse()
        if only_check:
            from distill.check import check

            print(check(config, int(os.environ.get("WORLD_SIZE", "1"))))
        else:
            main_process = os.environ.get("RANK", "0") == "0"
            with locked(Path(config.output)) if main_process else contextlib.nullcontext():
                train(config)
    except (InputError, FloatingPointError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
