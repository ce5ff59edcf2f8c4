"""Find the model families. A family is one file of this folder with a `FAMILY`; adding the file is
enough.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from d2f.contract import PROMPT_RULES, Contract
from d2f.errors import CheckpointError
from d2f.families.family import Family, check_complete


def find_families() -> dict[str, Family]:
    """Import the files of this folder; return families by name, those whose prompts see most
    first."""
    modules = [
        import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
    ]
    families = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    families.sort(key=lambda f: (PROMPT_RULES.index(f.prompt_rule), f.logit_shift, f.name))
    return {family.name: family for family in families}


FAMILIES = find_families()


def family_of(model_type: str | None) -> Family:
    """Find the family whose official checkpoints have this ``model_type``. Raises
    CheckpointError."""
    for family in FAMILIES.values():
        if model_type in family.model_types:
            return family
    known = sorted(kind for family in FAMILIES.values() for kind in family.model_types)
    raise CheckpointError(
        f"config.json: model_type must be one of {known}, got {model_type!r}; "
        "or name the family yourself"
    )


def get_family(name: str) -> Family:
    """Return a family by name. Raises CheckpointError that lists the known ones."""
    if name not in FAMILIES:
        raise CheckpointError(f"family must be one of {sorted(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def model_classes() -> dict[str, Any]:
    """Return transformers' classes that the families run on, by transformers' model type."""
    kinds = [kind for family in FAMILIES.values() for kind in family.classes]
    return {kind.config_class.model_type: kind for kind in kinds}


def transformers_config(family: Family, raw: Mapping[str, Any]) -> PretrainedConfig:
    """Make the transformers configuration of a config.json, in the family's own format or in
    transformers', which this project saves. Raises CheckpointError."""
    native = model_classes().get(raw.get("model_type", ""))
    if native is None:
        return family.make_config(raw)
    check_complete(raw)
    return native.config_class.from_dict(dict(raw))


def published_contract(
    family: Family,
    raw: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
) -> Contract:
    """Make the contract of an official checkpoint, which has none, from its family, the fields of
    its config.json (`raw`) and its tokenizer. Raises CheckpointError where these name no mask
    id."""
    mask_id = raw.get("mask_token_id")
    if mask_id is None and tokenizer is not None:
        mask_id = tokenizer.mask_token_id
    if family.needs_mask and mask_id is None:
        raise CheckpointError(
            f"the family {family.name} needs a mask id: expected mask_token_id in config.json "
            "or a mask token in the tokenizer, found neither"
        )
    eos = raw.get("eos_token_id")
    # config.json names one end, the base model's; a chat template ends its answers with another.
    ends = list(eos) if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ends):
        raise CheckpointError(f"config.json: eos_token_id must be ids, got {eos!r}")
    if tokenizer is not None:
        vocabulary = tokenizer.get_vocab()
        ends += [vocabulary[token] for token in family.end_tokens if token in vocabulary]
    return Contract(
        family=family.name,
        mask_id=mask_id,
        end_ids=tuple(dict.fromkeys(ends)),
        logit_shift=family.logit_shift,
        rope_fp32=family.rope_fp32,
        prompt_rule=family.prompt_rule,
        objective=None if family.needs_mask else "next_token",
        block_size=_trained_blocks(family, raw),
    )


def _trained_blocks(family: Family, raw: Mapping[str, Any]) -> int | None:
    """Read the block size of a family that is trained on blocks. Raises CheckpointError."""
    # Published models with block-causal prompts are trained on blocks (SDAR).
    size = raw.get("block_size") if family.prompt_rule == "block_causal" else None
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise CheckpointError(
            f"config.json: block_size must be a whole number of at least 1, got {size!r}"
        )
    return size


def new_contract(family: Family, tokenizer: PreTrainedTokenizerBase) -> Contract:
    """Make the contract of a new model with this tokenizer's mask and end ids and no objective yet.
    Raises CheckpointError for a tokenizer without a mask token where the family needs one."""
    if family.needs_mask and tokenizer.mask_token_id is None:
        raise CheckpointError(f"the family {family.name} needs a tokenizer with a mask token")
    return Contract(
        family=family.name,
        mask_id=tokenizer.mask_token_id if family.needs_mask else None,
        end_ids=(tokenizer.eos_token_id,),
        logit_shift=family.logit_shift,
        rope_fp32=family.rope_fp32,
        prompt_rule=family.prompt_rule,
    )


def check_ids(place: str, contract: Contract, vocabulary: int) -> None:
    """Raise CheckpointError unless a contract fits its family and a vocabulary of this many tokens:
    the family's logit shift and RoPE, a mask id where the family needs one, ids in the vocabulary,
    and a mask that does not end a response."""
    family = get_family(contract.family)
    # Facts of the published weights, which no training here changes.
    for name in ("logit_shift", "rope_fp32"):
        expected, came = getattr(family, name), getattr(contract, name)
        if came != expected:
            raise CheckpointError(
                f"{place}: {name} must be {expected} in the family {family.name}, got {came}"
            )
    if contract.mask_id is None and family.needs_mask:
        raise CheckpointError(f"{place}: the family {family.name} needs a mask id, got none")
    for name, ids in (("mask_id", (contract.mask_id,)), ("end_ids", contract.end_ids)):
        for i in ids:
            is_id = isinstance(i, int) and not isinstance(i, bool)
            if i is not None and not (is_id and 0 <= i < vocabulary):
                raise CheckpointError(
                    f"{place}: {name} must lie in the vocabulary [0, {vocabulary}), got {i!r}"
                )
    if contract.mask_id is not None and contract.mask_id in contract.end_ids:
        raise CheckpointError(
            f"{place}: the mask id must not be one of the end ids {list(contract.end_ids)}, "
            f"got {contract.mask_id}"
        )
