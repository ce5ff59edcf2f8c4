"""What a finished run leaves: the model (for D2F the adapter too) with its contract."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch

from d2f.adapters import fingerprint, save_adapter
from d2f.export import save_model
from d2f.model import DiffusionModel
from distill.config import TrainConfig

_PROMPT_RULES = {"next_token": "causal", "masked_diffusion": "bidirectional", "d2f": "block"}


def export(model: DiffusionModel, config: TrainConfig, output: Path) -> None:
    """Write ``model/`` (and ``adapter/`` for the objective d2f) under `output`, whole or not."""
    changes: dict[str, object] = {
        "objective": config.objective,
        "prompt_rule": _PROMPT_RULES[config.objective],
    }
    if config.objective == "d2f":
        assert config.init is not None and model.path is not None
        changes |= {
            "block_size": next(iter(config.block_shares)),
            "noise": (config.noise.low, config.noise.high),
        }
        base = {"base": Path(config.init).name, "base_hash": fingerprint(model.path)}
        model.contract = dataclasses.replace(model.contract, **changes, **base)  # type: ignore[arg-type]
        beside = _beside(output / "adapter")
        save_adapter(model, beside)
        _swap(beside, output / "adapter")
        model.merge_adapter()
        changes |= {"base": None, "base_hash": None}
    beside = _beside(output / "model")
    save_model(model, beside, dtype=getattr(torch, config.export_dtype), **changes)
    _swap(beside, output / "model")


def _beside(place: Path) -> Path:
    beside = place.with_name(place.name + ".writing")
    shutil.rmtree(beside, ignore_errors=True)
    return beside


def _swap(beside: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    beside.rename(place)
