"""`DiffusionModel.save`: a folder that `d2f.load` reads back, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend

from d2f import tokenization_d2f
from d2f.adapters import base_name, fingerprint, save_adapter
from d2f.checkpoint import MAX_SHARD_SIZE, is_weight_file, read_object, weights_of, write_shards
from d2f.contract import FILE_NAME
from d2f.errors import CheckpointError, InputError
from d2f.families import FAMILIES, transformers_config
from d2f.files import make_folder, writing_folder
from d2f.parts import ModelParts

# Save a tokenizer so that `AutoTokenizer` reads it back as it is.

CODE = Path(tokenization_d2f.__file__)
OWN_CLASS = {"AutoTokenizer": [None, f"{CODE.stem}.{tokenization_d2f.D2FTokenizer.__name__}"]}


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer into a model's `folder`, its config.json included, so that transformers and
    what is built on it cut text as `d2f.loading` does.

    By itself AutoTokenizer goes by the model's type: beside a config.json that says qwen2 it takes
    Qwen2's way of cutting text, whatever tokenizer_config.json says and tokenizer.json holds::

        " 15"    tokenizer.json of the tiny models    " 1", "5"
                 Qwen2's                              " ", "1", "5"

    It does not where tokenizer_config.json names a class of the folder's own (auto_map): then it
    takes tokenizer.json as it is, with ``trust_remote_code=True`` through that class, which is two
    lines (`d2f.tokenization_d2f`), and without it through its own.
    """
    tokenizer.save_pretrained(folder)
    if type(tokenizer) is not TokenizersBackend:  # of a class that is found by its name
        return
    settings = folder / "tokenizer_config.json"
    values = read_object(settings, CheckpointError)
    values.pop("auto_map", None)  # of the folder that it came from, whose code is not here
    _write(settings, values)
    if type(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)) is TokenizersBackend:
        return
    _write(settings, values | {"auto_map": OWN_CLASS})
    shutil.copy(CODE, folder)


def _write(path: Path, values: dict[str, object]) -> None:
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


# Save a model in transformers' format, with its contract.


def save_model(
    model: ModelParts,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    **contract: object,
) -> None:
    """Write a model to `folder`: config, weights in `dtype`, those of an adapter merged into them
    (in fp32; the model stays as it is), tokenizer, and its contract with the given fields changed.
    Raises CheckpointError for weights that are not finite in `dtype`, InputError for a
    max_shard_size that is none."""
    folder.mkdir(parents=True, exist_ok=True)
    # A copy: the model in memory keeps its dtype.
    config = type(model.backbone.config).from_dict(model.backbone.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(model.backbone).__name__]
    config.save_pretrained(folder)
    write_shards(weights_of(model.backbone), folder, dtype, max_shard_size)
    if model.tokenizer is not None:
        save_tokenizer(model.tokenizer, folder)
    dataclasses.replace(model.contract, **contract).save(folder)  # type: ignore[arg-type]


def save(model: ModelParts, folder: str | Path, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
    """See `DiffusionModel.save`."""
    if model.device.type == "meta":
        raise InputError("a model on the meta device has no weights to save")
    if model.adapter is None and model.quantized:
        raise InputError(
            f"{model.quantized} weights cannot be saved: save the model as it is without quantize, "
            "it is quantised again whenever it is loaded"
        )
    if model.adapter is not None and model.path is None:
        raise InputError(
            "the adapter's base is in no folder, so nothing could load the adapter: "
            "save the base first and load it, or merge_adapter()"
        )
    with replaced(Path(folder)) as beside:
        if model.adapter is None:
            # All of it is written, so it belongs to no base any more.
            save_model(
                model,
                beside,
                dtype=model.dtype,
                max_shard_size=max_shard_size,
                base=None,
                base_hash=None,
            )
        else:
            assert model.path is not None
            # The base as it is named here and now: by its hub or bundled name, which another
            # machine finds too, else by its folder.
            contract = dataclasses.replace(
                model.contract,
                base=base_name(model.path) or str(Path(model.path).resolve()),
                base_hash=model.contract.base_hash or fingerprint(model.path),
            )
            named = ModelParts(model.backbone, contract, adapter=model.adapter)
            save_adapter(named, beside)


@contextlib.contextmanager
def replaced(place: Path) -> Iterator[Path]:
    """An empty folder beside `place`, to be filled in the body, that takes its place afterwards.

    Raises InputError where `place` is there and is neither empty nor a model of the same files, so
    that no file is removed that is not written again. Raises OutputError where it cannot be
    written.
    """
    place = place.resolve()
    if place.exists() and not place.is_dir():
        raise InputError(f"{place}: expected a folder to save to, this is a file")
    # Before anything is written. What else a save holds is known only once it is: the check below
    # raises within `writing_folder`, which then leaves the place as it was.
    there = _names(place)
    if there and FILE_NAME not in there:
        raise InputError(
            f"{place} holds {_some(there)}: expected an empty folder, or a saved model"
        )
    make_folder(place.parent)
    with writing_folder(place) as new:
        yield new
        # Ours, and not beside every model: a tokenizer's code, and weights in other files.
        others = {name for name in _names(place) - _names(new) if not is_weight_file(name)}
        others -= {CODE.name}
        if others:
            raise InputError(f"{place} holds {_some(others)}, which a saved model does not have")


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + f" and {len(names) - 3} more" * (len(names) > 3)


# Save a model in its family's own format: what the published checkpoints look like, so that the
# family's own code, and everything built on it, reads the result.


def save_official(
    model: ModelParts,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> None:
    """Write a model to `folder`: config.json and weights in `dtype` as the family publishes them,
    those of an adapter merged into them as by `save_model`, tokenizer, contract. From an official
    base, its own config.json and the code files that it names come along.

    Raises CheckpointError for a family whose format is not known or a model that it cannot say,
    and as `save_model`.
    """
    values = official_config(model)  # raises before the folder is made
    folder.mkdir(parents=True, exist_ok=True)
    official_name = FAMILIES[model.family].official_name
    weights = {official_name(k): value for k, value in weights_of(model.backbone).items()}
    write_shards(weights, folder, dtype, max_shard_size)
    values["torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if model.tokenizer is not None:
        save_tokenizer(model.tokenizer, folder)
    for path in _code(model, values):
        shutil.copy(path, folder)
    model.contract.save(folder)


def check_official(model: ModelParts) -> None:
    """Raise CheckpointError unless `save_official` can write the model."""
    official_config(model)
    for name in weights_of(model.backbone):
        FAMILIES[model.family].official_name(name)


def official_config(model: ModelParts) -> dict[str, Any]:
    """The model's config.json in the family's own fields: that of the base where it is an official
    one, else made from transformers' configuration. Raises CheckpointError."""
    family = FAMILIES[model.family]
    if family.official_config is None:
        known = sorted(name for name, other in FAMILIES.items() if other.official_config)
        raise CheckpointError(
            f"the official format is known for {' and '.join(known)}, got the family {model.family}"
        )
    raw = _raw_config(model)
    values = raw if raw is not None else family.official_config(model.backbone.config)
    # The contract is what the model was trained with, whatever its base says.
    values["mask_token_id"] = model.contract.mask_id
    # It would name files of code that are not written beside it.
    if values.get("auto_map") and not _code(model, values):
        del values["auto_map"]
    # Read back as a loader would: the family's fields may have no word for what transformers' have,
    # such as a bias, and the export would be another model.
    # Of a copy, as transformers writes into the dictionaries that it is given.
    made = transformers_config(family, deepcopy(values)).to_dict()
    ours = model.backbone.config.to_dict()
    differ = [k for k in _SHAPE if made.get(k) != ours.get(k)]
    if differ:
        raise CheckpointError(
            f"the family {model.family} cannot say what this model is: "
            + "; ".join(f"{k}: expected {ours.get(k)!r}, got {made.get(k)!r}" for k in differ)
        )
    return values


# What decides a forward; a configuration that is read back must give the same.
_SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "max_position_embeddings",
)  # fmt: skip


def _raw_config(model: ModelParts) -> dict[str, Any] | None:
    """The base's config.json where it is an official one of the model's family."""
    path = Path(model.path or "") / "config.json"
    if model.path is None or not path.is_file():
        return None
    raw = read_object(path, CheckpointError)
    return raw if raw.get("model_type") in FAMILIES[model.family].model_types else None


def _code(model: ModelParts, values: Mapping[str, Any]) -> list[Path]:
    """The files of the base's own code, where its config.json names any of them."""
    return sorted(Path(model.path or "").glob("*.py")) if values.get("auto_map") else []
