"""Put PEFT adapters onto models: published ones, this project's own, and new ones to train.

PEFT builds, loads and merges them. What is here is what PEFT does not do: whether the adapter
belongs to this base, whether every weight of its file has its place, and the module names of a
family's official code.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from d2f.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    base_name,
    check_fit,
    fingerprint,
    folder_of,
    read_object,
    stored,
)
from d2f.contract import Contract
from d2f.errors import CheckpointError, UnverifiedBaseWarning, did_you_mean
from d2f.families import FAMILIES, Family, check_ids
from d2f.models import resolve
from d2f.parts import Gate, ModelParts
from d2f.quiet import quiet

_PREFIX = "base_model.model."  # PEFT's wrappers, which its files put before every weight's name
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@quiet()  # PEFT imports bitsandbytes where it is installed, and asks for what is deprecated
def new_lora(
    model: ModelParts,
    *,
    r: int,
    alpha: int,
    dropout: float,
    targets: Sequence[str] = ATTENTION,
) -> None:
    """Put a new LoRA on `model` in place, ready to train. Its B matrices are 0, so that until the
    first step the model computes what it did."""
    from peft import LoraConfig, PeftModel

    config = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets))
    model.adapter = PeftModel(model.backbone, config)


@quiet()
def attach(
    model: ModelParts, place: str, *, trainable: bool = False, targets: Sequence[str] = ()
) -> None:
    """Load an adapter onto `model`, whose contract becomes the adapter's where it has one.

    trainable: its weights are to be trained on. targets: further layers that the training shall
    change, by the last part of their names, the adapter's own among them; the others' B matrices
    are 0, so that it computes what it did.

    Raises CheckpointError for a missing or damaged file, weights that are missing, unexpected or
    misshapen, or another base, after which the model may be half adapted; warns with
    UnverifiedBaseWarning where the base cannot be told.
    """
    from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    folder = folder_of(place)
    if model.adapter is not None:
        raise CheckpointError(f"{folder}: the model already has an adapter; merge it first")
    config, contract = _read_config(folder), Contract.load(folder)
    config.inference_mode = not trainable
    _check_family(model, folder, config, contract)
    # Check its base before its weights: an adapter fits every base of the same shape, and on the
    # wrong one it loads without a word and answers wrongly.
    named = (contract.base if contract else None) or config.base_model_name_or_path
    check_base(folder, named, contract.base_hash if contract else None, model.path)
    weights = _read_weights(folder, config, model)
    modules = [n for n, m in model.backbone.named_modules() if isinstance(m, nn.Linear)]
    new: tuple[str, ...] = ()
    if targets:
        adapted = [n for n in modules if any(k.startswith(f"{_PREFIX}{n}.") for k in weights)]
        own = {name.rsplit(".", 1)[-1] for name in adapted}
        if not own <= set(targets):
            raise CheckpointError(
                f"{place}: expected an adapter of {', '.join(sorted(targets))}, or of some of "
                f"them, got one of {', '.join(sorted(own))}"
            )
        chosen = {n for n in modules if n.rsplit(".", 1)[-1] in targets}
        config.target_modules, config.layers_to_transform = set(targets), None
        new = tuple(f"{_PREFIX}{name}." for name in chosen - set(adapted))
    try:
        wrapped = PeftModel(model.backbone, config)
    except Exception as error:  # PEFT raises whatever comes of values that do not go together
        raise CheckpointError(f"{folder}: {type(error).__name__}: {error}") from error
    wanted = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    # PEFT also saves the embeddings themselves where the adapter changes them.
    known = wanted | get_peft_model_state_dict(wrapped, save_embedding_layers=True)
    check_fit(
        f"{folder}: the adapter does not fit this base",
        missing=[k for k in wanted.keys() - weights.keys() if not k.startswith(new)],
        unexpected=weights.keys() - known.keys(),
        misshapen=[
            (key, value.shape, known[key].shape)
            for key, value in weights.items()
            if key in known and value.shape != known[key].shape
        ],
    )
    set_peft_model_state_dict(wrapped, weights)
    _untie(model.backbone)
    model.adapter = wrapped.eval()
    # From now on the model does what the adapter was trained for (objective, block size).
    model.contract = contract or model.contract
    if model.contract.draft_id is not None:
        model.gate = Gate(wrapped, model.contract.draft_id)


def _read_weights(folder: Path, config: Any, model: ModelParts) -> dict[str, Tensor]:
    """Read an adapter's weights under transformers' names; where they were the family's own, its
    configuration gets transformers' names, too."""
    path, family = folder / ADAPTER_WEIGHTS, FAMILIES[model.family]
    if not path.is_file():
        raise CheckpointError(f"{folder}: expected an adapter with a {ADAPTER_WEIGHTS}")
    stored([path])  # raises for a damaged file, and for quantised weights
    weights, official = {}, False
    for key, value in load_file(path).items():
        # Some files have PEFT's name of the adapter in their keys: lora_A.default.weight.
        key = key.replace(".default.", ".")
        name = key.removeprefix(_PREFIX)
        weights[key.removesuffix(name) + family.native_name(name)] = value
        official = official or family.native_name(name) != name
    if official:
        _rename_modules(config, family, model.backbone)
    return weights


def _read_config(folder: Path) -> Any:
    """Read adapter_config.json by PEFT; a key that PEFT does not know is an error, as an adapter
    of a later version would be computed without what the key says."""
    from peft import PeftConfig

    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: expected an adapter with a {ADAPTER_CONFIG}")
    values = read_object(path, CheckpointError)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the keys that are refused below
            config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error
    if config.is_prompt_learning:
        raise CheckpointError(
            f"{path}: expected an adapter that changes weights, got {values.get('peft_type')}"
        )
    for key, value in values.items():
        if value and not hasattr(config, key):
            raise CheckpointError(
                f"{path}: PEFT has no {key} in a {values.get('peft_type')} adapter "
                f"(got {value!r:.60}){did_you_mean(key, vars(config))}; a later PEFT may"
            )
    return config


def _rename_modules(config: Any, family: Family, backbone: nn.Module) -> None:
    """Replace the official module names in a configuration by transformers'. Where LLaDA's says
    ``attn_out``, ours becomes ``o_proj``; patterns are matched against the official names."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    ours = {
        family.official_name(f"{name}.weight").removesuffix(".weight"): name
        for name, module in backbone.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
    }
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field, None) or {}
        keys = {name: get_pattern_key(pattern.keys(), theirs) for theirs, name in ours.items()}
        setattr(config, field, {name: pattern[k] for name, k in keys.items() if k in pattern})
    if config.target_modules not in (None, "all-linear"):
        targets = {name for k, name in ours.items() if check_target_module_exists(config, k)}
        config.target_modules = targets or config.target_modules
    for field in ("exclude_modules", "layers_to_transform", "layers_pattern"):
        setattr(config, field, None)
    if saved := config.modules_to_save:
        config.modules_to_save = [n for k, n in ours.items() if k.endswith(tuple(saved))]


def _untie(backbone: Any) -> None:
    """Give the head weights of its own where they are the embeddings and an adapter changes one of
    the two: merging would change both."""
    head, embeddings = backbone.get_output_embeddings(), backbone.get_input_embeddings()
    plain = type(head) is nn.Linear and type(embeddings) is nn.Embedding
    if backbone.config.tie_word_embeddings and not plain:
        base = getattr(head, "original_module", getattr(head, "base_layer", head))
        base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        backbone.config.tie_word_embeddings = False


def _check_family(model: ModelParts, folder: Path, config: Any, contract: Contract | None) -> None:
    """Raise CheckpointError for an adapter of another family, vocabulary or mask."""
    # An official adapter names the class that it was trained on.
    base_class = str((config.auto_mapping or {}).get("base_model_class") or "").lower()
    made_for = next((name for name in FAMILIES if base_class.startswith(name)), model.family)
    if contract is not None:
        made_for = contract.family
    if made_for != model.family:
        raise CheckpointError(
            f"{folder}: the adapter was made for the family {made_for}, this base is {model.family}"
        )
    if contract is not None:
        check_ids(str(folder), contract, model.vocab_size)
        if contract.mask_id != model.mask_id:
            raise CheckpointError(
                f"{folder}: the adapter's mask id is {contract.mask_id}, this base's is "
                f"{model.mask_id}"
            )


def check_base(adapter: Path, named: str | None, base_hash: str | None, path: str | None) -> None:
    """Compare the base that an adapter was made for with the model in the folder `path`.

    named: the base by the adapter's configuration. base_hash: by its contract, which decides alone.
    Raises CheckpointError, with both, where they are known to differ; warns with
    UnverifiedBaseWarning where that cannot be known: a local folder may hold anything, and the name
    of a folder on the machine where the adapter was trained says little.
    """
    named, here = str(named or ""), base_name(path) or path or ""
    differs = f"{adapter}: the adapter belongs to the base {named}"
    # Hashes settle it, where both can be had; names are only the next best.
    wanted = base_hash or _hash_of(named)
    if wanted and path:
        came = fingerprint(path)
        if came != wanted:
            raise CheckpointError(f"{differs} ({wanted[:12]}), this base is {here} ({came[:12]})")
        return
    # Two different hub names are an error, but for another owner's copy, which may have the same
    # weights. A folder's name proves little: an equal one is accepted, another one is a warning.
    certain = base_name(path) is not None and _HUB_NAME.fullmatch(named) is not None
    # As the hub compares names, without owner or folder.
    alike = bool(named) and Path(named).name.lower() == Path(here).name.lower()
    if certain and not alike:
        raise CheckpointError(
            f"{differs}, this base is {here}; where they are the same weights, give the base as a "
            "folder of your own"
        )
    if alike and (not certain or named.lower() == here.lower()):
        return
    warnings.warn(
        f"{adapter}: the base could not be verified: the adapter was made for "
        f"{named or 'a base that it does not name'}, this base is {here or 'not from a folder'}; "
        "on another base it gives wrong answers",
        UnverifiedBaseWarning,
        stacklevel=2,
    )


def _hash_of(named: str) -> str | None:
    """Fingerprint a base that is a folder here or a bundled model; None for others."""
    try:
        place = resolve(named)
        return fingerprint(place) if named and Path(place).is_dir() else None
    except (CheckpointError, OSError):  # it holds something else
        return None
