"""Put PEFT adapters onto models: published ones, this project's own, and new ones to train.

PEFT builds, loads and merges them. What is here is what PEFT does not do: whether the adapter
belongs to this base, whether every weight of its file has its place, and the module names of a
family's official code.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from d2f.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    base_name,
    fingerprint,
    folder_of,
    read_object,
    stored,
)
from d2f.contract import Contract
from d2f.errors import CheckpointError, UnverifiedBaseWarning, did_you_mean
from d2f.families import FAMILIES, Family, check_ids
from d2f.models import resolve
from d2f.parts import ModelParts
from d2f.saving import base_of, merged_module

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

_PREFIX = "base_model.model."  # PEFT's wrappers, which its files put before every weight's name
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


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


def attach(
    model: ModelParts, place: str, *, trainable: bool = False, targets: Sequence[str] = ()
) -> None:
    """Load an adapter onto `model`, whose contract becomes the adapter's where it has one.

    trainable: its weights are to be trained on. targets: further layers that the training shall
    change, by the last part of their names, the adapter's own among them; the others' B matrices
    are 0, so that it computes what it did.

    Raises CheckpointError for a missing or damaged file, weights that are missing, unexpected or
    misshapen, or another base; warns with UnverifiedBaseWarning where the base cannot be told.
    """
    from peft import PeftModel, set_peft_model_state_dict

    adapter = fitting_adapter(model, place)
    config: Any = adapter.config
    config.inference_mode = not trainable
    if targets:
        own = {name.rsplit(".", 1)[-1] for name in adapter.modules}
        if not own <= set(targets):
            raise CheckpointError(
                f"{place}: expected an adapter of {', '.join(sorted(targets))}, or of some of "
                f"them, got one of {', '.join(sorted(own))}"
            )
        names = [name for name, module in model.backbone.named_modules() if _is_linear(module)]
        wanted = {name for name in names if name.rsplit(".", 1)[-1] in targets}
        config.target_modules = _shortened(wanted | set(adapter.modules), names)
    try:
        wrapped = PeftModel(model.backbone, config)
    except Exception as error:  # starts that compute with the base's weights, or need data
        raise CheckpointError(f"{place}: {type(error).__name__}: {error}") from error
    set_peft_model_state_dict(wrapped, adapter.weights)
    _untie(model.backbone)
    model.adapter = wrapped.eval()
    # From now on the model does what the adapter was trained for (objective, block size).
    if adapter.contract is not None:
        model.contract = adapter.contract


@dataclass(frozen=True)
class FittingAdapter:
    """Hold an adapter that fits its base, read whole.

    config: in transformers' module names. weights: by PEFT's names. modules: the base's modules
    that it changes, by name. shape: it on a copy of the base that has no weights.
    """

    config: PeftConfig
    weights: dict[str, Tensor]
    contract: Contract | None
    modules: list[str]
    shape: PeftModel

    def fill(self) -> None:
        """Give the copy the adapter's weights, before `merged`."""
        from peft import set_peft_model_state_dict

        for name in self.modules:
            # PEFT moves the adapter to where its base is: not to meta, and no memory is taken.
            base: Any = base_of(self.shape.base_model.model.get_submodule(name))
            for key, value in list(base.named_parameters()):
                setattr(base, key, nn.Parameter(torch.zeros(()).expand(value.shape), False))
        set_peft_model_state_dict(self.shape, self.weights, low_cpu_mem_usage=True)

    def merged(self, name: str, weights: Mapping[str, Tensor]) -> nn.Module:
        """Return the module `name` of a base with these weights, the adapter merged into it."""
        start = getattr(self.config, "init_lora_weights", None)
        if isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal"):
            raise CheckpointError(
                f"init_lora_weights {start!r} changes the base: expected the adapter merged into "
                "it before it is loaded in parts"
            )
        layer: Any = self.shape.base_model.model.get_submodule(name)
        base: Any = base_of(layer)
        base.load_state_dict(dict(weights), assign=True)
        return merged_module(layer)


def fitting_adapter(model: ModelParts, place: str) -> FittingAdapter:
    """Read an adapter for `model`, which stays as it is. Raises and warns as `attach`."""
    from peft import PeftModel, get_peft_model_state_dict

    folder = folder_of(place)
    if model.adapter is not None:
        raise CheckpointError(f"{folder}: the model already has an adapter; merge it first")
    config = _read_config(folder)
    contract = Contract.load(folder)
    _check_family(model, folder, config, contract)
    # Check its base before its weights: an adapter fits every base of the same shape, and on the
    # wrong one it loads without a word and answers wrongly.
    named = (contract.base if contract else None) or config.base_model_name_or_path
    check_base(folder, named, contract.base_hash if contract else None, model.path)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(f"{folder}: expected an adapter with a {ADAPTER_WEIGHTS}")
    stored([folder / ADAPTER_WEIGHTS])  # raises for a damaged file, and for quantised weights
    family = FAMILIES[model.family]
    weights, official = {}, False
    for key, value in load_file(folder / ADAPTER_WEIGHTS).items():
        # Some files have PEFT's name of the adapter in their keys: lora_A.default.weight.
        key = key.replace(".default.", ".")
        name = key.removeprefix(_PREFIX)
        weights[key.removesuffix(name) + family.native_name(name)] = value
        official = official or family.native_name(name) != name
    if official:
        _rename_modules(config, family, model.backbone)
    with torch.device("meta"):
        empty = type(model.backbone)._from_config(copy.deepcopy(model.backbone.config))
        trial = copy.copy(config)
        if hasattr(trial, "init_lora_weights"):
            trial.init_lora_weights = False  # others compute with the base's weights
        try:
            shape = PeftModel(empty, trial, low_cpu_mem_usage=True)
        except Exception as error:  # PEFT raises whatever comes of values that do not go together
            raise CheckpointError(f"{folder}: {type(error).__name__}: {error}") from error
    wanted = get_peft_model_state_dict(shape, save_embedding_layers=False)
    # PEFT also saves the embeddings themselves where the adapter changes them.
    known = wanted | get_peft_model_state_dict(shape, save_embedding_layers=True)
    problem = _difference(wanted, known, weights)
    if problem:
        raise CheckpointError(f"{folder}: the adapter does not fit this base: {problem}")
    modules = [name for name, module in empty.named_modules() if base_of(module) is not None]
    return FittingAdapter(config, weights, contract, modules, shape)


def _read_config(folder: Path) -> Any:
    """Read adapter_config.json by PEFT; a key that PEFT does not know is an error, as an adapter
    of a later version would be computed without what the key says."""
    from peft import PeftConfig, PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: expected an adapter with a {ADAPTER_CONFIG}")
    values = read_object(path, CheckpointError)
    named = values.get("peft_type")
    kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING.get(str(named))
    if kind is None or issubclass(kind, PromptLearningConfig):
        raise CheckpointError(f"{path}: expected an adapter that changes weights, got {named}")
    base = values.get("base_model_name_or_path")
    if not isinstance(base, str | None):
        raise CheckpointError(f"{path}: base_model_name_or_path must be text, got {base!r}")
    known = {field.name for field in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in known and value:
            raise CheckpointError(
                f"{path}: PEFT has no {key} in a {named} adapter (got {value!r:.60})"
                f"{did_you_mean(key, known)}; a later PEFT may"
            )
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error
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
        config.target_modules = _shortened(targets, ours.values()) or config.target_modules
    for field in ("exclude_modules", "layers_to_transform", "layers_pattern"):
        setattr(config, field, None)
    if saved := config.modules_to_save:
        config.modules_to_save = [n for k, n in ours.items() if k.endswith(tuple(saved))]


def _shortened(names: set[str], all_names: Iterable[str]) -> set[str]:
    """Name modules by the last parts of their names where that means the same modules."""
    last = {name.rsplit(".", 1)[-1] for name in names}
    meant = {name for name in all_names if name.rsplit(".", 1)[-1] in last}
    return last if meant == names else names


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _untie(backbone: Any) -> None:
    """Give the head weights of its own where they are the embeddings and an adapter changes one of
    the two: merging would change both."""
    head, embeddings = backbone.get_output_embeddings(), backbone.get_input_embeddings()
    plain = type(head) is nn.Linear and type(embeddings) is nn.Embedding
    if backbone.config.tie_word_embeddings and not plain:
        base = getattr(head, "original_module", getattr(head, "base_layer", head))
        base.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
        backbone.config.tie_word_embeddings = False


def _difference(
    wanted: Mapping[str, Tensor], known: Mapping[str, Tensor], came: Mapping[str, Tensor]
) -> str:
    """Say what is missing, unexpected or misshapen; empty where nothing is."""
    problems = []
    for what, keys in (
        ("missing", sorted(wanted.keys() - came.keys())),
        ("unexpected", sorted(came.keys() - known.keys())),
    ):
        if keys:
            problems.append(f"{len(keys)} {what}, such as {keys[0]}")
    for key in sorted(known.keys() & came.keys()):
        if known[key].shape != came[key].shape:
            problems.append(
                f"{key}: expected shape {list(known[key].shape)}, got {list(came[key].shape)}"
            )
            break  # of another rank or size all are
    return "; ".join(problems)


def _check_family(model: ModelParts, folder: Path, config: Any, contract: Contract | None) -> None:
    """Raise CheckpointError for an adapter of another family, or of another vocabulary."""
    # An official adapter names the class that it was trained on.
    base_class = str((config.auto_mapping or {}).get("base_model_class") or "")
    made_for = next((name for name in FAMILIES if base_class.lower().startswith(name)), None)
    if contract is not None:
        made_for = contract.family
    if made_for not in (None, model.family):
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
    here = base_name(path) or path
    wanted = base_hash or _hash_of(named)
    # Hashes settle it, where both can be had; names are only the next best.
    if wanted is not None and path is not None:
        came = fingerprint(path)
        if came != wanted:
            raise CheckpointError(
                f"{adapter}: the adapter belongs to the base {named} ({wanted[:12]}), "
                f"this base is {here} ({came[:12]})"
            )
        return
    same_name = bool(named and here) and _last(str(named)) == _last(str(here))
    # Two different hub names are an error. A folder's name proves little: an equal one is accepted,
    # another one is a warning.
    if base_name(path) is not None and named and _HUB_NAME.fullmatch(named):
        if named.lower() == str(here).lower():
            return
        if not same_name:  # another owner's copy may be of the same weights
            raise CheckpointError(
                f"{adapter}: the adapter belongs to the base {named}, this base is {here}; where "
                "they are the same weights, give the base as a folder of your own"
            )
    elif same_name:
        return
    warnings.warn(
        f"{adapter}: the base could not be verified: the adapter was made for "
        f"{named or 'a base that it does not name'}, this base is {here or 'not from a folder'}; "
        "on another base it gives wrong answers",
        UnverifiedBaseWarning,
        stacklevel=2,
    )


def _hash_of(named: str | None) -> str | None:
    """Fingerprint a base that is a folder here or a bundled model; None for others."""
    try:
        place = resolve(named or "")
        return fingerprint(place) if named and Path(place).is_dir() else None
    except (CheckpointError, OSError):  # it holds something else
        return None


def _last(name: str) -> str:
    """Return a model's name without owner or folder, as the hub compares names."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()
