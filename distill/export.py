"""What a run leaves: the model (and the adapter, where one was trained) with contract and card."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import EvalResult, ModelCardData
from torch import Tensor

import d2f
from d2f.adapters import attach, new_lora
from d2f.checkpoint import fingerprint, folder_of, stored_dtype
from d2f.convert import build, convert
from d2f.errors import InputError
from d2f.files import says_what_is_kept, writing_folder
from d2f.loading import load_tokenizer
from d2f.model import DiffusionModel
from d2f.models import resolve
from d2f.quantize import keep_differentiable
from d2f.saving import check_official, save_adapter, save_model, save_official
from d2f.tasks import DEFAULT_TASKS, TASKS
from d2f.tasks.tokenizer import train_tokenizer
from distill import checkpoint, sharding
from distill.checkpoint import RunFolder, file_digest
from distill.config import Lora, TrainConfig
from distill.data import Stream
from distill.log import extension_text
from distill.objectives import OBJECTIVES
from distill.objectives.base import Objective

# The head of a card that the Hugging Face hub reads: what it lists a model under.


def front_matter(
    name: str,
    objective: str,
    tags: Sequence[str] = (),
    reports: list[dict[str, Any]] | None = None,
    license: str | None = None,
    language: str | None = None,
) -> list[str]:
    """Its lines, with the ``---`` around them.

    objective: what it was trained by. tags: more of them. reports: of `decode.evaluate`, each with
    a `label`. license, language: by the names that the hub has for them.
    """
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=row["task"],
            dataset_name=f"{row['task']}, held out",
            metric_type="accuracy",
            metric_name=f"accuracy, {report['label']}",
            metric_value=row["accuracy"],
        )
        for report in reports or []
        for row in report["rows"]
    ]
    kind = [] if objective == "next_token" else ["diffusion-language-model"]
    data = ModelCardData(
        library_name="d2f-toolkit",
        pipeline_tag="text-generation",
        tags=["d2f", *kind, objective, *tags],
        model_name=name if results else None,
        eval_results=results or None,
        license=license,
        language=language,
    )
    return ["---", *data.to_yaml().splitlines(), "---"]


# The training card: what made a result, so that it can be made again.

CARD = "README.md"
_HASHED = 256  # samples
_POINTS = 10  # of the curve
_EVALUATED = tuple(
    f"evaluation/{name}" for name in ("accuracy", "tokens_per_forward", "kl", "cross_entropy")
)


def card(
    config: TrainConfig, stream: Stream, log: Path, extended: list[dict[str, int]] | None = None
) -> str:
    """Markdown with the command, hashes of the data, the curve of the loss, what was evaluated on
    the way, and the resolved configuration.

    log: the run's ``log.jsonl``, which is only read. extended: when the run was given more steps,
    as its `RunFolder` has it.
    """
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    last = lines[-1]
    entries = [
        ("made by", f"d2f-toolkit {d2f.__version__}"),
        ("command", "`accelerate launch -m distill.train --config config.yaml`"),
        ("starts from", config.init or "random weights"),
        ("data", data_name(config)),
        (f"SHA-256 of the first {_HASHED} samples", f"`{samples_hash(stream)}`"),
    ]
    if stream.held_out is not None:
        entries.append(("held-out loss", stream.held_out.said))
    for file in (config.data.file, config.evaluation.loss_file):
        if file is not None:
            entries.append((f"SHA-256 of {Path(file).name}", f"`{file_digest(Path(file))}`"))
    entries.append(("steps", f"{last['step']:,}, {last['samples']:,} samples"))
    entries += [("", extension_text(config, more)) for more in extended or []]
    table = [f"| {name} | {value} |" for name, value in entries]
    return "\n".join(
        [
            *front_matter(Path(config.output).name, config.objective.name),
            "",
            f"# {Path(config.output).name}",
            "",
            f"Trained by the objective `{config.objective.name}`.",
            "",
            "| | |",
            "|---|---|",
            *table,
            "",
            *curve(lines),
            "",
            "config.yaml, every key resolved:",
            "",
            "```yaml",
            config.yaml.rstrip(),
            "```",
            "",
        ]
    )


def curve(lines: list[dict[str, Any]]) -> list[str]:
    """A table of the loss at some of the logged steps, evenly apart, the first and the last among
    them, and of every evaluation."""
    # As many points as asked for, or every line where there are fewer.
    apart = max(1, len(lines) - 1) / (_POINTS - 1)
    chosen = {min(round(i * apart), len(lines) - 1) for i in range(_POINTS)}
    evaluated = [name for name in _EVALUATED if any(name in line for line in lines)]
    head = ["step", "loss", *(name.rsplit("/", 1)[1].replace("_", " ") for name in evaluated)]
    table = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for number, line in enumerate(lines):
        values = [line.get(name) for name in evaluated]
        if number in chosen or any(value is not None for value in values):
            cells = [f"{line['step']:,}", f"{line['loss']:.4f}"]
            cells += ["" if value is None else f"{value:.3f}" for value in values]
            table.append(f"| {' | '.join(cells)} |")
    return table


def data_name(config: TrainConfig) -> str:
    """What was trained on, in words."""
    if config.data.tasks is not None:
        return f"generated {', '.join(config.data.tasks)} problems, split train, seed {config.seed}"
    return Path(config.data.file or config.data.dataset or "").name


def samples_hash(stream: Stream) -> str:
    """SHA-256 over the ids of the first samples, prompts and responses apart, as training sees
    them."""
    digest = hashlib.sha256()
    for index in range(_HASHED):
        sample = stream.sample(index)
        if sample is not None:  # left out
            digest.update(json.dumps([sample.prompt, sample.response]).encode())
    return digest.hexdigest()


# The model that a run begins with, and what of it cannot be trained as the configuration asks.


def prepare_model(
    config: TrainConfig,
    device: torch.device | str = "cpu",
    *,
    base_dtype: torch.dtype | None = None,
) -> DiffusionModel:
    """The model to train, with a LoRA where the objective trains one. What is trained is in fp32.

    device: ``meta`` gives shapes without weights; a 4-bit base is loaded onto it. base_dtype: of
    the base, which is not quantised then, whatever the configuration says.
    Raises InputError where objective, family and model do not go together.
    """
    # Every process draws the same new weights and the same LoRA.
    torch.manual_seed(config.seed)
    device = torch.device(device)
    place = device if device.type == "meta" else contextlib.nullcontext()
    if config.init is not None:
        dtype = base_dtype or getattr(torch, config.base_dtype)
        quantized = config.quantize == "4bit" and not base_dtype and device.type != "meta"
        quantize = "nf4" if quantized else None
        model = d2f.load(config.init, dtype=dtype, device=device, quantize=quantize)
        if model.adapter is not None:
            raise InputError(
                f"init {config.init} is an adapter of {model.contract.base or model.path}: "
                "expected its base as init, and it as init_adapter"
            )
        if quantize:
            keep_differentiable(model.backbone)
        with place:
            family = config.family or model.family
            model = convert(model, family, drop_biases=config.drop_biases)
    else:
        assert config.model is not None and config.family is not None
        if config.tokenizer is None:
            named = config.data.tasks or {}
            tasks = [task for task in TASKS if task in DEFAULT_TASKS or task in named]
            tokenizer: Any = train_tokenizer(1024, tasks=tasks)
        else:
            folder = folder_of(resolve(config.tokenizer), weights=False)
            tokenizer = load_tokenizer(str(folder))
            if tokenizer is None:
                raise InputError(f"tokenizer {config.tokenizer}: expected a tokenizer, found none")
        with place:
            model = build(config.family, tokenizer, **config.model.model_dump())
    # Before an adapter is attached: a wrong family is told as such, not as weights that do not fit.
    check_fits(model, config)
    lora = config.objective.trained_lora
    if lora is not None:
        # Before the adapter is put in, whose own parameters then are the only ones that are
        # trained.
        model.backbone.requires_grad_(False)
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
        _recompute(model.backbone)
    return model


def _recompute(backbone: Any) -> None:
    """Turn gradient checkpointing on, by the name that this transformers has for it."""
    # The reentrant kind needs an input with a gradient, which a frozen embedding does not give.
    settings = {"use_reentrant": False}
    if hasattr(backbone, "activation_checkpointing_enable"):
        backbone.activation_checkpointing_enable(settings)
    else:  # an older transformers
        backbone.gradient_checkpointing_enable(settings)


def check_fits(model: DiffusionModel, config: TrainConfig) -> None:
    """Raise InputError where objective, family and model do not go together."""
    if model.tokenizer is None:
        raise InputError(f"{config.init}: training needs a tokenizer, the checkpoint has none")
    OBJECTIVES[config.objective.name].check_model(model, config)
    if config.export_official:
        check_official(model)


def as_trained(
    model: DiffusionModel, config: TrainConfig, *, hashed: bool = True
) -> DiffusionModel:
    """The same modules with the contract of what the run makes of them. hashed: with the hash of
    an adapter's base, which reads some of its weights."""
    changes = config.objective.contract()
    if model.adapter is not None:
        assert config.init is not None and model.path is not None
        here = Path(config.init)
        base = here.name if here.is_dir() else config.init  # a hub name keeps its owner
        changes |= {"base": base, "base_hash": fingerprint(model.path) if hashed else None}
    contract = dataclasses.replace(model.contract, **changes)  # type: ignore[arg-type]
    return DiffusionModel(
        model.backbone, contract, tokenizer=model.tokenizer, adapter=model.adapter, path=model.path
    )


def export_run(
    accelerator: Accelerator, objective: Objective, stream: Stream, folder: RunFolder
) -> None:
    """End the training, write what it made, and note in the run's folder that it is finished. All
    processes call this; only the main one writes."""
    config, model = folder.config, objective.model
    whole = not sharding.is_sharded(accelerator) and _has_whole_base(config)
    # All processes take part in gathering shards, so this comes before all but one return.
    trained = checkpoint.trainable(objective)
    weights = {} if whole else sharding.read_weights(accelerator, trained)
    accelerator.end_training()
    if not accelerator.is_main_process:
        return
    if not whole:
        model = _on_whole_base(config, weights)
    text = card(config, stream, folder.log, folder.record.get("extended", []))
    export(model, config, folder.place, text)
    folder.finish()


def _has_whole_base(config: TrainConfig) -> bool:
    """Whether a process that holds the whole model has every bit of the base's weights."""
    if config.quantize != "none":
        return False
    return config.base_dtype == "float32" or config.base_dtype == _stored_dtype(config)


def _on_whole_base(config: TrainConfig, weights: dict[str, Tensor]) -> DiffusionModel:
    """What was trained on the base as it is stored, which is read as it is written out again; or,
    where all of it was trained, on none."""
    if config.trains_adapter:
        dtype = getattr(torch, _stored_dtype(config))
        model = prepare_model(config, base_dtype=dtype)
    else:
        model = prepare_model(config, "meta")
    objective = OBJECTIVES[config.objective.name](model, config)
    assert weights.keys() == checkpoint.trainable(objective).keys()
    objective.load_state_dict(weights, strict=False, assign=True)
    model.backbone.tie_weights()  # undone by assigning
    return model


def _stored_dtype(config: TrainConfig) -> str:
    """The dtype of the base's weights as they are stored."""
    names = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
    assert config.init is not None
    return names[stored_dtype(folder_of(resolve(config.init)))]


def export(model: DiffusionModel, config: TrainConfig, output: Path, card: str) -> None:
    """Write ``model/``, where one was trained ``adapter/``, and where asked for ``official/`` under
    `output`, each whole or not, with the card. The adapter is merged as the weights are written,
    one after the other: the model stays as it is, and no second one is made."""
    made = as_trained(model, config)
    if made.adapter is not None:
        write_result(made, config, output / "adapter", {CARD: card})
        # Merged weights belong to no base any more.
        made.contract = dataclasses.replace(made.contract, base=None, base_hash=None)
    files = {"dtype": getattr(torch, config.export_dtype), "max_shard_size": config.max_shard_size}
    with replacing(output / "model") as beside:
        save_model(made, beside, **files)
        (beside / CARD).write_text(card, encoding="utf-8")
    if config.export_official:
        with replacing(output / "official") as beside:
            save_official(made, beside, **files)
            (beside / CARD).write_text(card, encoding="utf-8")


def write_result(
    model: DiffusionModel, config: TrainConfig, place: Path, texts: dict[str, str]
) -> None:
    """Write a model's adapter, or where it has none the whole model, and texts by file name, as
    the folder `place`: whole, or as it was before. Raises OutputError."""
    with replacing(place) as beside:
        if model.adapter is not None:
            save_adapter(model, beside)
        else:
            dtype, size = getattr(torch, config.export_dtype), config.max_shard_size
            save_model(model, beside, dtype=dtype, max_shard_size=size)
        for name, text in texts.items():
            (beside / name).write_text(text, encoding="utf-8")


@contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the place of `place`. Raises OutputError."""
    with says_what_is_kept(place, "checkpoints and earlier results are kept; run it again"):
        with writing_folder(place) as beside:
            yield beside
