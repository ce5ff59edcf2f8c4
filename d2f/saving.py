"""Save a model: for `d2f.load`, or in the format that its family is published in."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn

from d2f.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX,
    base_name,
    fingerprint,
    read_object,
)
from d2f.contract import FILE_NAME
from d2f.errors import CheckpointError, InputError
from d2f.families import FAMILIES, transformers_config
from d2f.files import make_folder, writing_folder
from d2f.parts import ModelParts
from d2f.tokenizer import CODE, save_tokenizer, write_json

MAX_SHARD_SIZE = "5GB"  # most that an export holds in memory besides the model


def save(model: ModelParts, folder: Path, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
    """See `DiffusionModel.save`."""
    if model.device.type == "meta":
        raise InputError("a model on the meta device has no weights to save")
    with replaced(folder) as beside:
        if model.adapter is None:
            # All of it is written, so it belongs to no base any more.
            whole = {"base": None, "base_hash": None}
            save_model(model, beside, dtype=model.dtype, max_shard_size=max_shard_size, **whole)
            return
        if model.path is None:
            raise InputError(
                "the adapter's base is in no folder, so nothing could load the adapter: "
                "save the base first and load it, or merge_adapter()"
            )
        # By its hub or bundled name another machine finds the base, too.
        base = base_name(model.path) or str(Path(model.path).resolve())
        hash_ = model.contract.base_hash or fingerprint(model.path)
        save_adapter(model, beside, base=base, base_hash=hash_)


def save_adapter(
    model: ModelParts, folder: Path, *, dtype: torch.dtype | None = None, **contract: Any
) -> None:
    """Write the adapter's weights, configuration and the model's contract into `folder`. dtype: of
    the weights, default as they are. contract: fields to change in the saved one. Raises
    CheckpointError for weights that are not finite."""
    from peft import get_peft_model_state_dict

    assert model.adapter is not None
    saved = dataclasses.replace(model.contract, **contract)
    config = copy.copy(model.adapter.peft_config["default"])
    config.base_model_name_or_path, config.inference_mode = saved.base or "", True
    folder.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(model.adapter, save_embedding_layers=False)
    write_weights({k: v.to(dtype) for k, v in weights.items()}, folder / ADAPTER_WEIGHTS)
    values = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    write_json(folder / ADAPTER_CONFIG, values)
    saved.save(folder)


def save_model(
    model: ModelParts,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    **contract: Any,
) -> None:
    """Write a model in transformers' format to `folder`.

    Its weights are in `dtype`, those of an adapter merged into them in fp32 (the model stays as it
    is). contract: fields to change in the saved one. Raises CheckpointError for weights that are
    not finite in `dtype`, InputError for quantised ones and for a max_shard_size that is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.backbone.config)  # the model in memory keeps its dtype
    config.dtype = dtype
    config.architectures = [type(model.backbone).__name__]
    config.save_pretrained(folder)
    _write(model, folder, dtype, max_shard_size, {})
    dataclasses.replace(model.contract, **contract).save(folder)


def save_official(
    model: ModelParts,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write a model as its family publishes them, so that the family's own code reads it.

    From an official base, its own config.json and the code files that it names come along. Raises
    CheckpointError for a family whose format is not known or a model that it cannot say, and as
    `save_model`.
    """
    values, names = check_official(model)  # raises before the folder is made
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", values | {"torch_dtype": str(dtype)[len("torch.") :]})
    _write(model, folder, dtype, max_shard_size, names)
    for path in _code(model, values):
        shutil.copy(path, folder)
    model.contract.save(folder)


# These decide a forward: a configuration that is read back must have the same.
_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "max_position_embeddings",
)  # fmt: skip


def check_official(model: ModelParts) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the model in the family's own fields (the config.json of an official base, else one
    made from transformers' configuration) and its weights' official names by transformers'. Raises
    CheckpointError for what the format cannot say."""
    family = FAMILIES[model.family]
    if family.official_config is None:
        known = sorted(name for name, other in FAMILIES.items() if other.official_config)
        raise CheckpointError(
            f"the official format is known for {' and '.join(known)}, got the family {model.family}"
        )
    path = Path(model.path or "") / "config.json"
    values = read_object(path, CheckpointError) if model.path and path.is_file() else {}
    if values.get("model_type") not in family.model_types:
        values = family.official_config(model.backbone.config)
    # The contract is what the model was trained with, whatever its base says.
    values["mask_token_id"] = model.contract.mask_id
    if values.get("auto_map") and not _code(model, values):
        del values["auto_map"]  # it would name files that are not written beside it
    # Read back as a loader would: the family's fields may have no word for what transformers' have,
    # such as a bias. Of a copy, as transformers writes into the dictionaries that it is given.
    made = transformers_config(family, copy.deepcopy(values)).to_dict()
    ours = model.backbone.config.to_dict()
    differ = [k for k in _SHAPE if made.get(k) != ours.get(k)]
    if differ:
        raise CheckpointError(
            f"the family {model.family} cannot say what this model is: "
            + "; ".join(f"{k}: expected {ours.get(k)!r}, got {made.get(k)!r}" for k in differ)
        )
    return values, {name: family.official_name(name) for name in _weights(model.backbone)}


def _code(model: ModelParts, values: Mapping[str, Any]) -> list[Path]:
    """Find the files of the base's own code, where its config.json names any of them."""
    return sorted(Path(model.path or "").glob("*.py")) if values.get("auto_map") else []


# Weights: an adapter is merged into them one layer at a time, as they are written.


def _weights(backbone: Any) -> dict[str, tuple[Tensor, nn.Module | None, str]]:
    """List a model's weights by transformers' names: the tensor, and for one that an adapter
    changes the layer, whose merged copy has it by the name that comes last. Output weights that
    are the embeddings are left out."""
    layers: dict[str, nn.Module] = {}
    for name, module in backbone.named_modules():  # a wrapper comes before its own parts
        if base_of(module) is not None and not name.startswith(tuple(f"{n}." for n in layers)):
            layers[name] = module
    inside = tuple(f"{name}." for name in layers)
    found: dict[str, Any] = {
        name: (value, None, "")
        for name, value in backbone.state_dict().items()
        if not name.startswith(inside)
    }
    for name, layer in layers.items():
        base: Any = base_of(layer)
        found |= {f"{name}.{k}": (value, layer, k) for k, value in base.state_dict().items()}
    if backbone.config.tie_word_embeddings:  # safetensors does not write one tensor twice
        found.pop("lm_head.weight", None)
    return found


def base_of(module: Any) -> nn.Module | None:
    """Return the module that PEFT has put an adapter around, None for others."""
    return getattr(module, "original_module", None) or getattr(module, "base_layer", None)


def merged(layer: Any) -> nn.Module:
    """Return a copy of a module that PEFT adapts, on the CPU in fp32, with the adapter merged."""
    base: Any = base_of(layer)
    layer = copy.deepcopy(layer).to("cpu", torch.promote_types(base.weight.dtype, torch.float32))
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(True, False, None)
    layer.merge()
    return layer.get_base_layer()


def _write(
    model: ModelParts,
    folder: Path,
    dtype: torch.dtype,
    max_shard_size: int | str,
    names: Mapping[str, str],
) -> None:
    """Write tokenizer and weights: ``model.safetensors``, or files of at most `max_shard_size`
    (bytes, or as ``5GB``; a larger tensor has a file of its own) with their index. names: of the
    file, by transformers' names, where they differ."""
    if model.quantized:
        raise InputError(
            f"{model.quantized} weights cannot be saved: save the model as it is without quantize, "
            "it is quantised again whenever it is loaded"
        )
    weights = {names.get(name, name): found for name, found in _weights(model.backbone).items()}
    shapes = {name: found[0].to("meta", dtype) for name, found in weights.items()}
    try:
        if isinstance(max_shard_size, int) and max_shard_size < 1:
            raise ValueError
        plan = split_torch_state_dict_into_shards(
            shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
    except ValueError as error:
        raise InputError(
            f"max_shard_size must be a number of bytes, or as 5GB, got {max_shard_size!r}"
        ) from error
    for file, inside in plan.filename_to_tensors.items():
        shard = {}
        for name in inside:
            value, layer, key = weights[name]
            value = value if layer is None else merged(layer).state_dict()[key]
            shard[name] = value.detach().to("cpu", dtype)
        write_weights(shard, folder / file)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / INDEX, index)
    if model.tokenizer is not None:
        save_tokenizer(model.tokenizer, folder)


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors by name as safetensors. Raises CheckpointError, before anything is written, for
    values that are not finite, as training gone wrong leaves them or a dtype without room."""
    weights = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    # A piece at a time: looking takes a quarter of the memory again.
    broken = [
        name
        for name, value in weights.items()
        if not all(piece.isfinite().all() for piece in value.flatten().split(1 << 20))
    ]
    if broken:
        dtype = str(weights[broken[0]].dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{path}: expected finite weights, got NaN or infinity in {len(broken)} of "
            f"{len(weights)} tensors in {dtype}, first {broken[0]}; nothing was written"
        )
    save_file(weights, path, metadata={"format": "pt"})


# What a save writes; the tokenizer's files are those of any kind of tokenizer.
_SAVED = (
    "config.json", "model*.safetensors*", FILE_NAME, CODE.name, "adapter_*", "tokenizer*",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab*", "merges.txt",
)  # fmt: skip


@contextlib.contextmanager
def replaced(place: Path) -> Iterator[Path]:
    """Make an empty folder, to be filled in the body, that takes the place of `place` afterwards.

    Raises InputError where `place` holds anything but an earlier save, so that no file is lost that
    is not written again. Raises OutputError where it cannot be written.
    """
    place = place.resolve()
    if place.exists() and not place.is_dir():
        raise InputError(f"{place}: expected a folder to save to, this is a file")
    there = {path.name for path in place.iterdir()} if place.is_dir() else set()
    if FILE_NAME in there:
        there = {name for name in there if not any(fnmatch(name, kind) for kind in _SAVED)}
    if there:
        raise InputError(
            f"{place} holds {', '.join(sorted(there)[:3])}, which a saved model does not have: "
            "expected a new folder, or an earlier save"
        )
    make_folder(place.parent)
    with writing_folder(place) as new:
        yield new
