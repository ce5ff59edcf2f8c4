"""Find the model families. A family is one file of this folder with a `FAMILY`; adding the file is
enough.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from d2f.contract import PROMPT_RULES, Contract
from d2f.errors import CheckpointError, not_one_of
from d2f.families.family import Family, check_complete
from d2f.quiet import quiet


def find_families() -> dict[str, Family]:
    """Import the files of this folder; return families by name, those whose prompts see most
    first."""
    with quiet():  # transformers' models import torchao where it is installed, which says much
        modules = [
            import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__)
        ]
    families = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    families.sort(key=lambda f: (PROMPT_RULES.index(f.prompt_rule), f.logit_shift, f.name))
    return {family.name: family for family in families}


FAMILIES = find_families()


def family_of(raw: Mapping[str, Any]) -> Family:
    """Find the family of an official config.json, by ``model_type`` and the names of its classes:
    other families borrow the type of the one that they began as. Raises CheckpointError."""
    kind = raw.get("model_type")
    classes = [str(name) for name in raw.get("architectures") or ()]
    codes = (raw.get("auto_map") or {}).items()
    own = [str(name) for key, name in codes if key.startswith("AutoModel")]
    for family in FAMILIES.values():
        if kind in family.model_types:
            known = [*family.architectures, *(one.__name__ for one in family.classes)]
            other = [name for name in classes if name not in known]
            # A plain model has no code of its own.
            other += [] if family.needs_mask else own
            if other:
                raise CheckpointError(
                    f"config.json: model_type {kind} is of the family {family.name}, but the class "
                    f"is {other[0]}, which is none of {', '.join(known)}: a family that is not "
                    "there; name the family to load it all the same"
                )
            return family
    types = sorted(kind for family in FAMILIES.values() for kind in family.model_types)
    said = f" ({classes[0]})" if classes else ""
    raise CheckpointError(
        f"config.json: model_type must be one of {types}, got {kind!r}{said}; "
        "or name the family yourself"
    )


def get_family(name: str) -> Family:
    """Return a family by name. Raises CheckpointError that lists the known ones."""
    if name not in FAMILIES:
        raise CheckpointError(f"family: {not_one_of(name, sorted(FAMILIES))}")
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
    name: str = "",
    *,
    strict: bool = False,
    given: Mapping[str, Any] | None = None,
) -> tuple[Contract, list[str]]:
    """Make the contract of an official checkpoint, which has none, from its family, the fields of
    its config.json (`raw`), its tokenizer and its name; return it and what had to be supposed.

    strict: a mask of a plain causal model is an error. given: fields that the caller sets instead.
    Raises CheckpointError for fields of the wrong type, and where a mask id is needed and nothing
    names it.
    """
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    given, supposed = given or {}, []
    mask_id = given.get("mask_id", raw.get("mask_token_id"))
    if mask_id is None and tokenizer is not None:
        mask_id = tokenizer.mask_token_id
    if not family.needs_mask:
        # <M>: open-dcoder's, a Qwen2 that reads both sides and says so nowhere.
        if strict and (raw.get("mask_token_id") is not None or "<M>" in vocabulary):
            raise CheckpointError(
                f"config.json is that of an autoregressive {raw.get('model_type')}, but there is a "
                f"mask token ({raw.get('mask_token_id') or '<M>'}): a diffusion model of a family "
                "that is not there; name the family to load it all the same"
            )
        mask_id = None
    elif mask_id is None and family.mask_id is not None:
        mask_id = family.mask_id
        supposed.append(f"no mask id is given: {mask_id}, that of published {family.name} models")
    elif mask_id is None:
        raise CheckpointError(
            f"the family {family.name} needs a mask id: expected mask_token_id in config.json "
            "or a mask token in the tokenizer, found neither"
        )
    # Published models with block-causal prompts are trained on blocks (SDAR).
    in_blocks = family.prompt_rule == "block_causal"
    block_size = given.get("block_size", raw.get("block_size") if in_blocks else None)
    in_name = re.search(r"-b(\d+)\b", name)
    if in_blocks and block_size is None and in_name:
        block_size = int(in_name[1])
        supposed.append(f"no block size is given: {block_size}, from the name")
    eos = raw.get("eos_token_id")
    # config.json names one end, the base model's; a chat template ends its answers with another.
    ends = list(eos) if isinstance(eos, list) else [] if eos is None else [eos]
    ends += [vocabulary[token] for token in family.end_tokens if token in vocabulary]
    contract = Contract.check(
        {
            "family": family.name,
            "mask_id": mask_id,
            "end_ids": list(dict.fromkeys(ends)),
            "logit_shift": family.logit_shift,
            "rope_fp32": family.rope_fp32,
            "prompt_rule": family.prompt_rule,
            "objective": None if family.needs_mask else "next_token",
            "block_size": block_size,
        },
        "config.json",
    )
    return contract, supposed


def new_contract(family: Family, tokenizer: PreTrainedTokenizerBase) -> Contract:
    """Make the contract of a new model with this tokenizer's mask and end ids and no objective yet.
    Raises CheckpointError for a tokenizer without an end token, or without a mask token where the
    family needs one."""
    for name, wanted in (("eos_token", True), ("mask_token", family.needs_mask)):
        if wanted and getattr(tokenizer, name) is None:
            raise CheckpointError(
                f"the family {family.name} needs a tokenizer with a {name}, "
                f"{tokenizer.name_or_path or 'this one'} has none: add one with add_special_tokens"
            )
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
    and a mask that does not end a response, as it is never chosen."""
    family = get_family(contract.family)
    # Facts of the published weights, which no training here changes.
    for name in ("logit_shift", "rope_fp32"):
        expected, came = getattr(family, name), getattr(contract, name)
        if came != expected:
            raise CheckpointError(
                f"{place}: {name} must be {expected} in the family {family.name}, got {came}"
            )
    mask = contract.mask_id
    if mask is None and family.needs_mask:
        raise CheckpointError(f"{place}: the family {family.name} needs a mask id, got none")
    if mask is not None and mask in contract.end_ids:
        raise CheckpointError(
            f"{place}: the mask id must not be one of the end ids {list(contract.end_ids)}, "
            f"got {mask}"
        )
    ids = [("mask_id", mask), ("draft_id", contract.draft_id)]
    for name, i in (*ids, *(("end_ids", end) for end in contract.end_ids)):
        if i is not None and not 0 <= i < vocabulary:
            raise CheckpointError(
                f"{place}: {name} must lie in the vocabulary [0, {vocabulary}), got {i}"
            )
