"""Prepare the model that a run trains, and write what the run made: model, adapter, card."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import ModelCardData

import d2f
from d2f.adapters import attach, new_lora
from d2f.checkpoint import fingerprint, folder_of, stored_dtype
from d2f.convert import build, convert
from d2f.errors import InputError
from d2f.files import says_what_is_kept, writing_folder
from d2f.model import DiffusionModel
from d2f.models import resolve
from d2f.quantize import keep_differentiable
from d2f.saving import check_official, save_adapter, save_model, save_official
from d2f.tasks import DEFAULT_TASKS, TASKS
from d2f.tasks.tokenizer import train_tokenizer
from d2f.tokenizer import load_tokenizer
from distill.checkpoint import RunFolder, file_digest
from distill.config import Lora, TrainConfig
from distill.data.stream import Stream
from distill.log import CURVE, draw_curve, extension_text, read_log
from distill.objectives import OBJECTIVES
from distill.objectives.base import Objective
from distill.sharding import is_sharded, read_weights, trained_parameters

CARD = "README.md"
_HASHED = 256  # samples
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
_EVALUATED = tuple(
    f"evaluation/{name}" for name in ("accuracy", "tokens_per_forward", "kl", "cross_entropy")
)


def front_matter(objective: str, tags: Sequence[str] = (), **more: Any) -> list[str]:
    """Return the lines at the head of a card that the Hugging Face hub lists a model under.

    objective: what it was trained by. more: license, results and so on, by the hub's names.
    """
    kind = [] if objective == "next_token" else ["diffusion-language-model"]
    data = ModelCardData(
        library_name="d2f-toolkit",
        pipeline_tag="text-generation",
        tags=["d2f", *kind, objective, *tags],
        **more,
    )
    return ["---", *data.to_yaml().splitlines(), "---"]


CARD_TEXT = """\
{head}

# {name}

Trained by the objective `{objective}`.

| | |
|---|---|
{facts}

<details><summary>Loss and evaluations, every logged step</summary>

{curve}

</details>

config.yaml, every key resolved:

```yaml
{config}
```
"""


def card(
    config: TrainConfig,
    stream: Stream,
    lines: Sequence[Mapping[str, Any]],
    extended: Sequence[dict[str, int]] = (),
) -> str:
    """Write the training card: command, hashes of the data, every logged loss and evaluation, and
    the resolved configuration.

    lines: of the run's log. extended: when the run was given more steps.
    """
    files = [Path(file) for file in (config.data.file, config.evaluation.loss_file) if file]
    facts = [
        ("made by", f"d2f-toolkit {d2f.__version__}"),
        ("command", "`d2f train --config config.yaml`"),
        ("starts from", config.init or "random weights"),
        ("data", data_name(config)),
        (f"SHA-256 of the first {_HASHED} samples", f"`{samples_hash(stream)}`"),
        *([("held-out loss", stream.held_out.said)] if stream.held_out is not None else []),
        *((f"SHA-256 of {file.name}", f"`{file_digest(file)}`") for file in files),
        ("steps", f"{lines[-1]['step']:,}, {lines[-1]['samples']:,} samples"),
        *(("", extension_text(config, more)) for more in extended),
    ]
    return CARD_TEXT.format(
        head="\n".join(front_matter(config.objective.name)),
        name=Path(config.output).name,
        objective=config.objective.name,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts),
        curve="\n".join(curve(lines)),
        config=config.yaml.rstrip(),
    )


def curve(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a Markdown table of the loss and the evaluations in a log's lines."""
    evaluated = [name for name in _EVALUATED if any(name in line for line in lines)]
    head = ["step", "loss", *(name.rsplit("/", 1)[1].replace("_", " ") for name in evaluated)]
    table = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for line in lines:
        cells = [f"{line['step']:,}", f"{line['loss']:.4f}"]
        cells += [f"{line[name]:.3f}" if name in line else "" for name in evaluated]
        table.append(f"| {' | '.join(cells)} |")
    return table


def data_name(config: TrainConfig) -> str:
    """Say in words what was trained on."""
    if config.data.tasks is not None:
        return f"generated {', '.join(config.data.tasks)} problems, split train, seed {config.seed}"
    return Path(config.data.file or config.data.dataset or "").name


def samples_hash(stream: Stream) -> str:
    """Return the SHA-256 of the ids of the first samples as training sees them."""
    digest = hashlib.sha256()
    for index in range(_HASHED):
        sample = stream.sample(index)
        if sample is not None:  # left out
            digest.update(json.dumps([sample.prompt, sample.response]).encode())
    return digest.hexdigest()


def prepare_model(
    config: TrainConfig,
    device: torch.device | str = "cpu",
    *,
    base_dtype: torch.dtype | None = None,
) -> DiffusionModel:
    """Make the model to train, with a LoRA where the objective trains one; what is trained is fp32.

    device: ``meta`` gives shapes without weights; a 4-bit base is loaded onto it. base_dtype: of
    the base, which is not quantised then, whatever the configuration says. Raises InputError where
    objective, family and model do not go together.
    """
    # Every process draws the same new weights and the same LoRA.
    torch.manual_seed(config.seed)
    device = torch.device(device)
    place = device if device.type == "meta" else contextlib.nullcontext()
    if config.init is not None:
        quantized = config.quantize == "4bit" and not base_dtype and device.type != "meta"
        model = d2f.load(
            config.init,
            dtype=base_dtype or getattr(torch, config.base_dtype),
            device=device,
            quantize="nf4" if quantized else None,
        )
        if model.adapter is not None:
            raise InputError(
                f"init {config.init} is an adapter of {model.contract.base or model.path}: "
                "expected its base as init, and it as init_adapter"
            )
        if quantized:
            keep_differentiable(model.backbone)
        with place:
            model = convert(model, config.family or model.family, drop_biases=config.drop_biases)
    else:
        assert config.model is not None and config.family is not None
        with place:
            model = build(config.family, _new_tokenizer(config), **config.model.model_dump())
    # Check before an adapter is attached: else a wrong family is reported as misfitting weights.
    if model.tokenizer is None:
        raise InputError(f"{config.init}: training needs a tokenizer, the checkpoint has none")
    OBJECTIVES[config.objective.name].check_model(model, config)
    if config.export_official:
        check_official(model)
    lora = config.objective.trained_lora
    if lora is not None:
        model.backbone.requires_grad_(False)  # then only the adapter's own are trained
        if config.init_adapter is not None:
            with warnings.catch_warnings():  # on meta: for each tensor that it is not copied
                warnings.filterwarnings("ignore", message=".*to a meta parameter")
                # The default says nothing about an adapter that is there: it keeps its own layers.
                targets = lora.targets if lora.targets != Lora().targets else ()
                attach(model, resolve(config.init_adapter), trainable=True, targets=targets)
        else:
            with place:
                new_lora(model, **lora.model_dump())
    if config.gradient_checkpointing:
        # The reentrant kind needs an input with a gradient, which a frozen embedding does not give.
        name = "activation_checkpointing_enable"  # an older transformers has it by another name
        enable = getattr(model.backbone, name, None) or model.backbone.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def _new_tokenizer(config: TrainConfig) -> Any:
    if config.tokenizer is None:
        named = config.data.tasks or {}
        return train_tokenizer(1024, tasks=[t for t in TASKS if t in DEFAULT_TASKS or t in named])
    tokenizer = load_tokenizer(str(folder_of(resolve(config.tokenizer), weights=False)))
    if tokenizer is None:
        raise InputError(f"tokenizer {config.tokenizer}: expected a tokenizer, found none")
    return tokenizer


def as_trained(
    model: DiffusionModel, config: TrainConfig, *, hashed: bool = True
) -> DiffusionModel:
    """Return the same modules with the contract of what the run makes of them. hashed: with the
    hash of an adapter's base, which reads some of its weights."""
    changes = config.objective.contract() | {"response_length": config.data.longest_response}
    if model.adapter is not None:
        assert config.init is not None and model.path is not None
        here = Path(config.init)
        base = here.name if here.is_dir() else config.init  # a hub name keeps its owner
        changes |= {"base": base, "base_hash": fingerprint(model.path) if hashed else None}
    contract = dataclasses.replace(model.contract, **changes)  # type: ignore[arg-type]
    return DiffusionModel(
        model.backbone, contract, tokenizer=model.tokenizer, adapter=model.adapter,
        gate=model.gate, path=model.path,
    )  # fmt: skip


def export_run(
    accelerator: Accelerator, objective: Objective, stream: Stream, folder: RunFolder
) -> None:
    """Write what a run made and note in its folder that it is finished: ``model/``, where one was
    trained ``adapter/``, and where asked for ``official/``, each whole or not, with the card.

    All processes call this; only the main one writes. Weights are merged one after the other as
    they are written, so no second model is made.
    """
    config, output = folder.config, folder.place
    # If the base was rounded to be loaded, put what was trained on the base as it is stored.
    again = is_sharded(accelerator) or _is_rounded(config)
    # All processes take part in gathering shards, so this comes before all but one return.
    weights = read_weights(accelerator, trained_parameters(objective)) if again else {}
    accelerator.end_training()
    if not accelerator.is_main_process:
        return
    lines = read_log(folder.log)
    text = card(config, stream, lines, folder.record.get("extended", []))
    trained = _read_again(config, weights) if again else objective.model
    model = as_trained(trained, config)
    if model.adapter is not None:
        dtype = getattr(torch, config.export_dtype)
        write_result(output / "adapter", {CARD: text}, save_adapter, model, dtype=dtype)
        # Merged weights belong to no base any more.
        model.contract = dataclasses.replace(model.contract, base=None, base_hash=None)
    files = files_of(config)
    if config.objective.is_merged:
        write_result(output / "model", {CARD: text}, save_model, model, **files)
    if config.export_official:
        write_result(output / "official", {CARD: text}, save_official, model, **files)
    with says_what_is_kept(output / CURVE, "the result is written"):
        draw_curve(folder.log)
    folder.finish()


def _is_rounded(config: TrainConfig) -> bool:
    if config.quantize == "none" and config.base_dtype == "float32":
        return False
    return config.quantize != "none" or _stored(config) != torch.bfloat16


def _stored(config: TrainConfig) -> torch.dtype:
    """Return the dtype of the base's weights on disk."""
    assert config.init is not None
    dtype: torch.dtype = getattr(torch, _DTYPES[stored_dtype(folder_of(resolve(config.init)))])
    return dtype


def _read_again(config: TrainConfig, weights: dict[str, torch.Tensor]) -> DiffusionModel:
    """Put what was trained on the base as it is stored, or on none, if all was trained."""
    if config.trains_adapter:
        model = prepare_model(config, base_dtype=_stored(config))
    else:
        model = prepare_model(config, "meta")
    loaded = OBJECTIVES[config.objective.name](model, config)
    loaded.load_state_dict(weights, strict=False, assign=True)
    model.backbone.tie_weights()  # undone by assigning
    return model


def files_of(config: TrainConfig) -> dict[str, Any]:
    """Return how a model's weights are written, by the arguments of `save_model`."""
    dtype = getattr(torch, config.export_dtype)
    return {"dtype": dtype, "max_shard_size": config.max_shard_size}


def write_result(
    place: Path, texts: dict[str, str], save: Callable[..., None], model: DiffusionModel, **how: Any
) -> None:
    """Write a model by save(model, place, **how), and texts by file name beside it: whole, or
    `place` is as it was before. Raises OutputError."""
    with (
        says_what_is_kept(place, "checkpoints and earlier results are kept; run it again"),
        writing_folder(place) as beside,
    ):
        save(model, beside, **how)
        for name, text in texts.items():
            (beside / name).write_text(text, encoding="utf-8")
