"""LoRA adapters through PEFT: the official ones, this project's own, and new ones to train."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor

from d2f.base import check_base
from d2f.checkpoint import folder_of
from d2f.contract import Contract
from d2f.errors import CheckpointError
from d2f.families import FAMILIES
from d2f.json_file import read_object
from d2f.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, inside, stored
from d2f.weights import write_weights

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

_NOT_SUPPORTED = ("alpha_pattern", "rank_pattern", "modules_to_save", "bias", "fan_in_fan_out")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def new_lora(
    model: DiffusionModel,
    *,
    r: int,
    alpha: int,
    dropout: float,
    targets: Sequence[str] = ATTENTION,
) -> None:
    """Put a fresh, zero-effect LoRA on `model` in place, ready to train."""
    from peft import LoraConfig, PeftModel

    config = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets))
    model.adapter = PeftModel(model.backbone, config)


def attach(model: DiffusionModel, place: str, *, trainable: bool = False) -> None:
    """Load an adapter onto `model`, whose contract becomes the adapter's where it has one.
    trainable: its weights are to be trained on.

    Raises CheckpointError for a missing or damaged file, other target modules, another shape, or
    another base; warns with UnverifiedBaseWarning where the base cannot be told (`d2f.base`).
    """
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict

    folder = folder_of(place)
    if model.adapter is not None:
        raise CheckpointError(f"{folder}: the model already has an adapter; merge it first")
    raw = _read_config(folder)
    _check_base_class(model, folder, raw)
    contract = Contract.load(folder)
    if contract is not None:
        _check_family(model, folder, contract)
    named = (contract.base if contract else None) or raw.get("base_model_name_or_path")
    check_base(folder, named, contract.base_hash if contract else None, model.path)
    weights = _rename(model, _read_weights(folder))

    config = LoraConfig(
        r=raw["r"],
        lora_alpha=raw["lora_alpha"],
        lora_dropout=raw.get("lora_dropout", 0.0),
        use_rslora=raw.get("use_rslora", False),
        target_modules=_targets(model, folder, raw),
        inference_mode=not trainable,
    )
    wrapped = PeftModel(model.backbone, config)
    expected = {
        key.replace(".default.", "."): value
        for key, value in wrapped.state_dict().items()
        if ".lora_" in key
    }
    problem = _difference(expected, weights)
    if problem:
        wrapped.unload()
        raise CheckpointError(f"{folder}: the adapter does not fit this base: {problem}")
    set_peft_model_state_dict(wrapped, weights)
    model.adapter = wrapped.eval()
    if contract is not None:
        model.contract = contract


def save_adapter(model: DiffusionModel, folder: Path) -> None:
    """Write the adapter's weights, configuration and the model's contract into `folder`. Raises
    CheckpointError for weights that are not finite."""
    assert model.adapter is not None
    config = model.adapter.peft_config["default"]
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        key.replace(".default.", "."): value.detach().cpu().contiguous()
        for key, value in model.adapter.state_dict().items()
        if ".lora_" in key
    }
    write_weights(weights, folder / ADAPTER_WEIGHTS)
    values = {
        "peft_type": "LORA",
        "base_model_name_or_path": model.contract.base or "",
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "target_modules": sorted(config.target_modules),
        "bias": "none",
        "task_type": None,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    model.contract.save(folder)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: expected an adapter with a {ADAPTER_CONFIG}")
    values = read_object(path, CheckpointError)
    if values.get("peft_type") != "LORA" or values.get("use_dora"):
        kind = "DoRA" if values.get("use_dora") else values.get("peft_type")
        raise CheckpointError(f"{path}: expected a LORA adapter, got {kind!r}")
    for name in ("r", "lora_alpha"):
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{path}: {name} must be a positive number, got {value!r}")
    base = values.get("base_model_name_or_path")
    if not isinstance(base, str | None):
        raise CheckpointError(f"{path}: base_model_name_or_path must be text, got {base!r}")
    for name in _NOT_SUPPORTED:
        if values.get(name) not in (None, False, "none", [], {}):
            raise CheckpointError(f"{path}: {name} is not supported, got {values[name]!r}")
    return values


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise CheckpointError(f"{folder}: expected an adapter with a {ADAPTER_WEIGHTS}")
    path = inside(folder, ADAPTER_WEIGHTS)
    stored([path])
    return load_file(path)


def _check_base_class(model: DiffusionModel, folder: Path, raw: dict[str, Any]) -> None:
    """An official adapter names the class it was trained on; it must be of the same family."""
    base_class = ((raw.get("auto_mapping") or {}).get("base_model_class") or "").lower()
    for family in FAMILIES:
        if base_class.startswith(family) and family != model.family:
            raise CheckpointError(
                f"{folder}: the adapter was made for the family {family} "
                f"({raw['auto_mapping']['base_model_class']}), this base is {model.family}"
            )


def _check_family(model: DiffusionModel, folder: Path, contract: Contract) -> None:
    if contract.family != model.family:
        raise CheckpointError(
            f"{folder}: the adapter was made for the family {contract.family}, "
            f"this base is {model.family}"
        )


def _targets(model: DiffusionModel, folder: Path, raw: dict[str, Any]) -> list[str]:
    """The adapter's target modules by transformers' names; each must exist in the base."""
    names = FAMILIES[model.family].adapter_modules
    came = raw.get("target_modules")
    if not isinstance(came, list) or not came:
        raise CheckpointError(f"{folder}: expected a list of target_modules, got {came!r}")
    targets = [names.get(name, name) for name in came]
    have = {name.rsplit(".", 1)[-1] for name, _ in model.backbone.named_modules()}
    unknown = sorted(set(targets) - have)
    if unknown:
        raise CheckpointError(
            f"{folder}: the adapter targets {unknown}, which this base does not have; "
            f"expected some of {sorted(n for n in have if n.endswith('_proj'))}"
        )
    return targets


def _rename(model: DiffusionModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adapter weights under transformers' module names."""
    import re

    prefix = "base_model.model."
    renamed = {}
    for key, value in weights.items():
        name = key.removeprefix(prefix).replace(".default.", ".")
        for pattern, replacement in FAMILIES[model.family].key_mapping.items():
            name, hit = re.subn(pattern, replacement, name)
            if hit:
                break
        renamed[prefix + name] = value
    return renamed


def _difference(expected: dict[str, Tensor], came: dict[str, Tensor]) -> str:
    """What is missing, unexpected or misshapen, empty where nothing is."""
    problems = []
    for what, keys in (
        ("missing", sorted(expected.keys() - came.keys())),
        ("unexpected", sorted(came.keys() - expected.keys())),
    ):
        if keys:
            problems.append(f"{len(keys)} {what}, such as {keys[0]}")
    for key in sorted(expected.keys() & came.keys()):
        if expected[key].shape != came[key].shape:
            problems.append(
                f"{key}: expected shape {list(expected[key].shape)}, got {list(came[key].shape)}"
            )
            break
    return "; ".join(problems)
