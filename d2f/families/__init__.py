"""The model families by name. A family is one file of this folder, which says all there is to know
of it as its `FAMILY`; the files are found, so a new one is enough.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from transformers import PretrainedConfig

from d2f.contract import PROMPT_RULES
from d2f.errors import CheckpointError
from d2f.families.family import Family, check_complete


def find_families() -> dict[str, Family]:
    """The family of each file here that has one, by name; whose prompts see most comes first."""
    modules = [
        import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
    ]
    families = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    families.sort(key=lambda f: (PROMPT_RULES.index(f.prompt_rule), f.logit_shift, f.name))
    return {family.name: family for family in families}


FAMILIES = find_families()


def family_of(model_type: str | None) -> Family:
    """The family whose official checkpoints have this ``model_type``. Raises CheckpointError."""
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    known = sorted(kind for family in FAMILIES.values() for kind in family.model_types)
    raise CheckpointError(
        f"config.json: model_type must be one of {known}, got {model_type!r}; "
        "or name the family yourself"
    )


def get_family(name: str) -> Family:
    """A family by name. Raises CheckpointError that lists the known ones."""
    if name not in FAMILIES:
        raise CheckpointError(f"family must be one of {sorted(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def model_classes() -> dict[str, Any]:
    """transformers' classes that the families run on, by transformers' model type."""
    kinds = [kind for family in FAMILIES.values() for kind in family.classes]
    return {kind.config_class.model_type: kind for kind in kinds}


def transformers_config(family: Family, raw: Mapping[str, Any]) -> PretrainedConfig:
    """The transformers configuration of a config.json, be it the family's own or transformers'
    (what this project saves, whatever the family). Raises CheckpointError."""
    native = model_classes().get(raw.get("model_type", ""))
    if native is None:
        return family.make_config(raw)
    check_complete(raw)
    return native.config_class.from_dict(dict(raw))
