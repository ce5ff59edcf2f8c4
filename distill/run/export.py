"""What a run leaves: the model (and the adapter, where one was trained) with contract and card."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator

from d2f.adapter_base import fingerprint
from d2f.adapters import save_adapter
from d2f.files import writing_folder
from d2f.model import DiffusionModel
from d2f.save_official import save_official
from d2f.save_transformers import save_model
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
    # Where what was trained is not lying there as fp32 weights on an fp32 base.
    changed = sharding.is_sharded(accelerator) or config.quantize != "none"
    changed = changed or config.base_dtype != "float32"
    trained = checkpoint.trainable(objective)
    # All processes take part in gathering shards, so this comes before all but one return.
    weights = sharding.read_weights(accelerator, trained) if changed else {}
    accelerator.end_training()
    if not accelerator.is_main_process:
        return
    if changed:  # export from the base as it was, in fp32
        model = prepare_model(config, plain=True)
        fresh = checkpoint.trainable(OBJECTIVES[config.objective](model, config))
        with torch.no_grad():
            for name, value in weights.items():
                fresh[name].copy_(value)
    text = card(config, stream, folder.log, folder.record.get("extended", []))
    export(model, config, folder.place, text)
    folder.finish()


def export(model: DiffusionModel, config: TrainConfig, output: Path, card: str) -> None:
    """Write ``model/``, where one was trained ``adapter/``, and where asked for ``official/`` under
    `output`, each whole or not, with the card. The adapter is merged into `model`."""
    made = as_trained(model, config)
    if made.adapter is not None:
        # The adapter first: merging changes the model that it is taken from.
        write_result(made, config, output / "adapter", {CARD: card})
        made.merge_adapter()
        # Merged weights belong to no base any more.
        made.contract = dataclasses.replace(made.contract, base=None, base_hash=None)
    write_result(made, config, output / "model", {CARD: card})
    if config.export_official:
        with replacing(output / "official") as beside:
            save_official(made, beside, dtype=getattr(torch, config.export_dtype))
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
            save_model(model, beside, dtype=getattr(torch, config.export_dtype))
        for name, text in texts.items():
            (beside / name).write_text(text, encoding="utf-8")


@contextmanager
def replacing(place: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the place of `place`. Raises OutputError."""
    with says_what_is_kept(place, "checkpoints and earlier results are kept; run it again"):
        with writing_folder(place) as beside:
            yield beside
