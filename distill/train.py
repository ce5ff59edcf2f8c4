"""accelerate launch distill/train.py --config configs/NAME.yaml [--key value ...]

Trains a model: from-scratch or warm-started masked diffusion, the autoregressive baseline, the D2F
student of a bidirectional teacher, WINO+ on rollouts of distill.rollouts, or WeDLM from an
autoregressive model. A killed run goes on where its newest checkpoint is, to the same weights to
the bit. The result (adapter, merged model, contract, card, configuration, log) lies in the
configuration's `output`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # run as a file, as accelerate launch does
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from d2f.errors import InputError

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from distill.config import TrainConfig


def parse(arguments: list[str] | None = None) -> TrainConfig:
    """The configuration that the command line asks for. Raises InputError."""
    parser = argparse.ArgumentParser(
        prog="accelerate launch distill/train.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every key of the configuration can be overridden: --steps 10 --optimizer.lr 1e-4",
    )
    parser.add_argument("--config", required=True, help="YAML file, see configs/")
    options, overrides = parser.parse_known_args(arguments)
    from distill.config import read_config

    return read_config(options.config, overrides)


def prepare_model(config: TrainConfig) -> DiffusionModel:
    """The model to train, in fp32, with a LoRA for the objectives that train one."""
    import torch

    import d2f
    from d2f.adapters import attach, new_lora
    from d2f.export import build, convert
    from d2f.official import check_official
    from d2f.tasks.tokenizer import train_tokenizer

    torch.manual_seed(config.seed)
    if config.init is not None:
        model = d2f.load(config.init, dtype=torch.float32, device="cpu")
        model = convert(model, config.family or model.family)
    else:
        assert config.model is not None and config.family is not None
        if config.tokenizer is None:
            tokenizer: Any = train_tokenizer(1024)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(config.tokenizer)
        model = build(config.family, tokenizer, **config.model.model_dump())
    if model.tokenizer is None:
        raise InputError(f"{config.init}: training needs a tokenizer, the checkpoint has none")
    if config.objective == "next_token" and model.is_diffusion:
        raise InputError(f"objective next_token trains the family causal, got {model.family}")
    if config.objective != "next_token" and not model.is_diffusion:
        raise InputError(f"objective {config.objective} needs a family with a mask, got causal")
    if config.objective == "wedlm" and model.contract.prompt_rule != "causal":
        raise InputError(f"objective wedlm trains the family wedlm, got {model.family}")
    if config.noise.causal_share > 0 and model.logit_shift != 1:
        raise InputError(
            "noise.causal_share needs a family whose row p-1 predicts position p, "
            f"got {model.family}"
        )
    if config.export_official:
        check_official(model)
    if config.trains_adapter:
        model.backbone.requires_grad_(False)
        lora = config.lora
        if config.init_adapter is None:
            new_lora(model, r=lora.r, alpha=lora.alpha, dropout=lora.dropout)
        else:
            attach(model, config.init_adapter, trainable=True)
    return model


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

    stop_after: end after that many steps of this call, as a killed run would.
    """
    os.environ.setdefault("WANDB_MODE", config.wandb_mode)
    import torch
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list
    from tqdm import tqdm

    from distill import checkpoints
    from distill.attention import attention_dtype, check_attention, choose_attention
    from distill.card import card
    from distill.data import fill_rows
    from distill.evaluation import Evaluator
    from distill.export import export
    from distill.objectives import OBJECTIVES

    output = Path(config.output)
    refuse_another_run(config, output)
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        log_with=None if config.tracker == "none" else config.tracker,
        project_dir=output,
    )
    check_attention(config.attention, accelerator.device)
    if config.data.rows % accelerator.num_processes:
        raise InputError(
            f"data.rows must be a multiple of the {accelerator.num_processes} processes, "
            f"got {config.data.rows}"
        )
    model = prepare_model(config)
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
    wrapped, optimizer = accelerator.prepare(objective, optimizer)
    trainable = checkpoints.trainable(objective)

    first_step, sample = 0, 0
    saved = checkpoints.newest(output / "checkpoints")
    if saved is not None:
        first_step, sample = saved["step"], saved["sample"]
        with torch.no_grad():
            for name, value in saved["weights"].items():
                trainable[name].copy_(value)
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
    if accelerator.is_main_process:
        if stream.report() is not None:
            print(f"data: {stream.report()}")
        output.mkdir(parents=True, exist_ok=True)
        config.save(output / "config.yaml")
        _keep_lines(output / "log.jsonl", first_step)
    if config.tracker != "none":
        accelerator.init_trackers("d2f", config=_flat(config.model_dump(mode="json")))

    rank, world = accelerator.process_index, accelerator.num_processes
    share = config.data.rows // world
    mine = slice(rank * share, (rank + 1) * share)
    bar = tqdm(
        total=config.steps,
        initial=first_step,
        disable=not accelerator.is_main_process or not sys.stderr.isatty(),
    )
    began = time.time()
    log = (output / "log.jsonl").open("a") if accelerator.is_main_process else None
    last = config.steps if stop_after is None else min(config.steps, first_step + stop_after)
    for step in range(first_step, last):
        rows, sample = fill_rows(stream, sample)
        batch = objective.batch(rows, mine).to(accelerator.device)
        if objective.attention is None:
            chosen: list[Any] = [None]  # by one process for all
            if accelerator.is_main_process:
                dtype = attention_dtype(accelerator)
                chosen[0] = choose_attention(config.attention, model, batch.spans, dtype, output)
            objective.attention = broadcast_object_list(chosen)[0]
        rate = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = wrapped(batch)
        accelerator.backward(loss * world)  # processes average gradients; the loss is a sum
        norm = accelerator.clip_grad_norm_(list(trainable.values()), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.update()
        done = step + 1
        due = evaluator is not None and evaluator.due(done)
        if due or done % config.log_every == 0 or done == config.steps:
            total = accelerator.reduce(loss.detach(), "sum").item()
            if total != total:
                raise FloatingPointError(f"the loss is NaN at step {done}; nothing was saved of it")
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
        if (done % config.save_every == 0 or done == last) and accelerator.is_main_process:
            state = {
                "step": done,
                "sample": sample,
                "weights": {k: v.detach().cpu() for k, v in trainable.items()},
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
            }
            checkpoints.save(output / "checkpoints", done, state, config.keep)
    bar.close()
    if log is not None:
        log.close()
    accelerator.end_training()
    if accelerator.is_main_process and last == config.steps:
        export(model, config, output, card(config, stream, output / "log.jsonl"))
    return output


def refuse_another_run(config: TrainConfig, output: Path) -> None:
    """Raise InputError if `output` holds a run of another configuration: going on from its
    checkpoints would mix the two."""
    import yaml

    if not (output / "config.yaml").is_file():
        return
    theirs = _flat(yaml.safe_load((output / "config.yaml").read_text()))
    ours = _flat(config.model_dump(mode="json"))
    free = {"output", "tracker", "wandb_mode", "log_every", "save_every", "keep", "export_official"}
    differ = [f"{k}: {theirs.get(k)!r} there, {v!r} now" for k, v in ours.items()
              if k not in free and theirs.get(k) != v]  # fmt: skip
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
        train(parse())
    except InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
