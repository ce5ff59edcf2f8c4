"""What a run leaves: the model (and the adapter, where one was trained) with contract and card."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from d2f.adapter_base import fingerprint
from d2f.adapters import save_adapter
from d2f.files import writing_folder
from d2f.hub import folder_of
from d2f.model import DiffusionModel
from d2f.models import resolve
from d2f.save_official import save_official
from d2f.save_transformers import save_model
from d2f.weight_files import stored_dtype
from d2f.write_errors import says_what_is_kept
from distill.config import TrainConfig
from distill.data import Stream
from distill.objectives import OBJECTIVES
from distill.objectives.base import Objective
from distill.prepare_model import prepare_model
from distill.run import checkpoint, sharding
from distill.run.card import CARD, card
from distill.run.run_folder import RunFolder


def as_trained(
    model: DiffusionModel, config: TrainConfig, *, hashed: bool = True
) -> DiffusionModel:
    """The same modules with the contract of what the run makes of them. hashed: with the hash of
    an adapter's base, which reads some of its weights."""
    changes = config.kind.contract(config)
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
    objective = OBJECTIVES[config.objective](model, config)
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
