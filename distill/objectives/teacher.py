"""Whether the model that `objective: d2f` starts from can be a teacher: it is the same weights
without the adapter, read bidirectionally."""

from __future__ import annotations

import json
from pathlib import Path

from d2f.contract import Contract
from d2f.families import FAMILIES
from d2f.hub import folder_of
from d2f.models import resolve
from distill.config import TrainConfig

_BOTH_SIDES = ("masked_diffusion", "d2f", "wino_plus")  # objectives that read them


def teacher_warning(config: TrainConfig) -> str | None:
    """What is wrong with the teacher of a d2f run, None where nothing is known to be.

    A checkpoint of this project says in its contract what it was trained by, and nothing where it
    was converted and not trained. A published one has no contract: there its kind of model counts.
    """
    if config.objective != "d2f" or config.init is None:
        return None
    folder = folder_of(resolve(config.init), weights=False)
    contract = Contract.load(folder)
    if contract is None:
        known = "was never" if _is_autoregressive(folder) else None
        why = "it is an autoregressive model"
    elif contract.objective is None:
        known, why = "may never have been", "its contract names no objective"
    else:
        known = None if contract.objective in _BOTH_SIDES else "was never"
        why = f"its contract says objective {contract.objective}"
    if known is None:
        return None
    return (
        f"warning: init {config.init} {known} trained to read both sides ({why}). The teacher of "
        "objective d2f is init itself, read so: untrained it teaches nothing of use; train it by "
        "objective masked_diffusion first"
    )


def _is_autoregressive(folder: Path) -> bool:
    """By config.json; one that cannot be read is for loading to refuse."""
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return kind in FAMILIES["causal"].model_types
