"""Prepare the model that a run trains, write what the run made (model, adapter, card), and bring
models into another form (`d2f convert`)."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import ModelCardData
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

import d2f
from d2f.adapters import attach, new_lora
from d2f.checkpoint import fingerprint, folder_of, stored_dtype
from d2f.convert import build, convert, reserved_tokens
from d2f.device import parse_dtype
from d2f.errors import CheckpointError, InputError
from d2f.families import FAMILIES, get_family
from d2f.files import make_folder, says_what_is_kept, writing_folder
from d2f.loading import describe, load
from d2f.model import DiffusionModel
from d2f.models import resolve
from d2f.parts import Outline
from d2f.quantize import keep_differentiable
from d2f.saving import check_official, save_adapter, save_model, save_official, write_weights
from d2f.tasks import DEFAULT_TASKS, TASKS
from d2f.tasks.tokenizer import train_tokenizer
from d2f.tokenizer import load_tokenizer
from distill.checkpoint import CONFIG, RECORD, RunFolder, file_digest
from distill.config import Lora, TrainConfig, read_config
from distill.data.stream import Stream
from distill.log import CURVE, draw_curve, extension_text, read_log
from distill.objectives import OBJECTIVES
from distill.objectives.base import Objective
from distill.sharding import is_sharded, read_weights, trained_parameters

CARD = "README.md"
MASK_TOKEN = "<|mask|>"
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
    weights = read_weights(accelerator, trained_parameters(objective.network)) if again else {}
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
    loaded.network.load_state_dict(weights, strict=False, assign=True)
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


# Conversion of a model that is there: `d2f convert`.


def export_model(name: str, output: Path, official: bool = False) -> list[str]:
    """Write a trained model, or a finished run's, to `output` as one model, whole or not at all;
    say in lines what was done. Raises InputError."""
    is_run, config = (Path(name) / RECORD).is_file(), None
    if is_run:
        if not (Path(name) / "model").is_dir():
            raise InputError(
                f"{name}: the run has not ended, so it has no result: train it to its end"
            )
        config = read_config(Path(name) / CONFIG)
    outline = describe(f"{name}/model" if is_run else name)
    dtype = parse_dtype(outline.config.dtype, torch.device("cpu"))
    model = load(outline, dtype=dtype, device="cpu", progress=sys.stderr.isatty())
    model.contract = dataclasses.replace(model.contract, base=None, base_hash=None)
    if config is not None and config.init is not None and config.family is None:
        # Its official configuration and code come along.
        model.path = str(folder_of(resolve(config.init), weights=False))
    make_folder(output.parent)
    with writing_folder(output) as beside:
        (save_official if official else save_model)(model, beside, dtype=dtype)
        if is_run:
            shutil.copy(Path(name) / "model" / CARD, beside)
    form = f"{model.family}'s official format" if official else "transformers' format"
    return [f"{output}: {form}, {str(dtype).removeprefix('torch.')}"]


def convert_gguf(file: Path, output: Path) -> list[str]:
    """Write a .gguf file's model to `output` in transformers' format, whole or not at all; say in
    lines what was done. Raises InputError."""
    if importlib.util.find_spec("gguf") is None:
        raise InputError("a .gguf file needs the package gguf: pip install 'd2f-toolkit[gguf]'")
    folder, given = str(file.parent), {"gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(folder, **given)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **given)
        tokenizer = AutoTokenizer.from_pretrained(folder, **given)
    except Exception as error:  # transformers raises whatever comes of what it does not know
        raise InputError(f"{file}: transformers cannot read it: {error}") from error
    config.quantization_config, config.dtype = None, torch.float32  # the file's; now they are fp32
    del config.quantization_config
    config.name_or_path = ""
    config.architectures = [type(model).__name__]
    make_folder(output.parent)
    with writing_folder(output) as beside:
        config.save_pretrained(beside)
        weights = model.state_dict()
        if config.tie_word_embeddings:
            del weights["lm_head.weight"]
        write_weights(weights, beside / "model.safetensors")
        tokenizer.save_pretrained(beside)
        outline = describe(beside)  # what cannot be loaded is said now
    lines = [f"{output}: {config.model_type}, family {outline.family}, weights in float32"]
    if tokenizer.chat_template is None:
        lines.append("it has no chat template: prompts are taken as they are with --raw")
    return lines


def convert_checkpoint(
    name: str, family_name: str, output: Path, mask_token: str | None = None
) -> list[str]:
    """Write the converted checkpoint to `output`, whole or not at all; say in lines what was done.

    name: folder, hub name or bundled model. mask_token: default the tokenizer's own, else
    `MASK_TOKEN`. Raises InputError before any weights are read where model, family and mask token
    do not go together.
    """
    outline = describe(name)
    _check_source(name, outline, family_name)
    tokenizer = outline.tokenizer
    assert tokenizer is not None
    lines = [_add_mask(tokenizer, mask_token, outline.end_ids)]
    mask_id = int(tokenizer.convert_tokens_to_ids(tokenizer.mask_token))
    # Weights are written as they were stored: a conversion rounds nothing.
    dtype = parse_dtype(outline.config.dtype, torch.device("cpu"))
    model = load(outline, dtype=dtype, device="cpu", progress=sys.stderr.isatty())
    lines.append(_make_room(model, mask_id))
    made = convert(model, family_name)
    # Until masked diffusion has trained it, it reads one side only: `d2f` training warns by this.
    made.contract = dataclasses.replace(made.contract, objective="next_token")
    make_folder(output.parent)
    with writing_folder(output) as beside:
        save_model(made, beside, dtype=dtype)
        # Read back before the folder takes its name: some tokenizers drop a token when saved.
        again = describe(beside)
        kept = again.tokenizer is not None and again.tokenizer.mask_token_id == mask_id
        if not kept or again.contract != made.contract:
            raise CheckpointError(f"{name}: its tokenizer does not keep a mask token when saved")
    c = made.contract
    lines.append(
        f"{c.family}: row p predicts position {'p + 1' if c.logit_shift else 'p'}, RoPE in "
        f"{'fp32' if c.rope_fp32 else 'the dtype of the weights'}, prompt rule {c.prompt_rule}, "
        f"end ids {', '.join(map(str, c.end_ids))}; weights in {str(dtype).removeprefix('torch.')}"
    )
    if tokenizer.chat_template is None:
        lines.append("the tokenizer has no chat template: train with data.chat_template: none")
    first = "wedlm" if c.family == "wedlm" else "masked_diffusion"
    lines.append(f"{output}: not trained as a diffusion model yet: next, objective {first}")
    return lines


def _check_source(name: str, outline: Outline, family_name: str) -> None:
    """Raise CheckpointError unless this model can become one of the family."""
    family, kind = get_family(family_name), outline.config.model_type
    tokenizer = outline.tokenizer
    problem = None
    if outline.is_diffusion:
        problem = (
            "expected an autoregressive model, got a diffusion model of the family "
            f"{outline.family}: train it as it is"
        )
    elif not family.needs_mask:
        problem = f"the family must be of a diffusion model, got {family_name}"
    elif kind not in family.starts:
        fit = [other.name for other in FAMILIES.values() if kind in other.starts]
        problem = (
            f"the family {family_name} starts from {' or '.join(family.starts)}, "
            f"got {kind}, from which {' and '.join(fit)} can start"
        )
    elif tokenizer is None:
        problem = "expected a tokenizer beside the model, found none"
    elif not outline.end_ids and tokenizer.eos_token_id is None:
        problem = (
            "expected a token that ends a response, as eos_token_id in config.json or "
            "eos_token of the tokenizer, found neither"
        )
    if problem:
        raise CheckpointError(f"{name}: {problem}")


def _add_mask(
    tokenizer: PreTrainedTokenizerBase, wanted: str | None, end_ids: Sequence[int]
) -> str:
    """Give the tokenizer its mask token and say what was done. Raises InputError for a token that
    means something else."""
    free = [tokenizer.convert_ids_to_tokens(id) for id in reserved_tokens(tokenizer, end_ids)]
    token = str(wanted or tokenizer.mask_token or (free or [MASK_TOKEN])[-1])
    there = tokenizer.get_vocab().get(token)
    if there is None:
        tokenizer.add_special_tokens({"mask_token": token})
        return f"mask token {token}: added to the tokenizer as id {tokenizer.mask_token_id}"
    roles = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id")
    if there in (*end_ids, *(getattr(tokenizer, role) for role in roles)):
        raise InputError(
            f"--mask-token {token} begins, ends, pads or replaces text: expected a token of its own"
        )
    added = tokenizer.added_tokens_decoder.get(there)
    if tokenizer.mask_token != token and not (added is not None and added.special):
        raise InputError(
            f"--mask-token {token} is an ordinary token of the tokenizer (id {there}), which text "
            "may contain: expected a new or a special token"
        )
    tokenizer.add_special_tokens({"mask_token": token})
    return f"mask token {token}: id {there}, which the tokenizer has already"


def _make_room(model: DiffusionModel, mask_id: int) -> str:
    """Resize the embeddings where the mask id does not fit in them, and say so."""
    size = model.vocab_size
    if mask_id < size:
        return f"embeddings: their {size} rows have room for it, none was added"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the new rows are drawn: the same each time
        # A multiple of 64, which matrix products and processes that share the model divide by.
        size_now = -(-(mask_id + 1) // 64) * 64
        model.backbone.resize_token_embeddings(size_now, mean_resizing=True)
    return (
        f"embeddings: resized from {size} to {model.vocab_size} rows, the new ones drawn around "
        "the mean of the others"
    )
