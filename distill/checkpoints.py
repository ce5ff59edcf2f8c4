"""Checkpoints of a run: written beside and renamed, so that a killed run leaves whole ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write ``step-N`` under `folder` and drop all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"step-{step:07d}"
    beside = place.with_suffix(".writing")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    torch.save(state, beside / "state.pt")
    if place.exists():
        shutil.rmtree(place)
    beside.rename(place)
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / f"step-{old:07d}")


def steps(folder: Path) -> list[int]:
    """Steps that have a whole checkpoint, ascending."""
    found = folder.glob("step-*[0-9]/state.pt") if folder.is_dir() else []
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def newest(folder: Path) -> dict[str, Any] | None:
    """The state of the newest checkpoint, None where there is none."""
    found = steps(folder)
    if not found:
        return None
    return torch.load(folder / f"step-{found[-1]:07d}" / "state.pt", weights_only=True)


def trainable(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
