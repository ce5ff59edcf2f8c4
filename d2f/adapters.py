"""LoRA adapters through PEFT: the official ones, this project's own, and new ones to train."""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from d2f.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    folder_of,
    inside,
    read_object,
    stored,
    weight_files,
    write_weights,
)
from d2f.contract import Contract
from d2f.errors import CheckpointError, UnverifiedBaseWarning
from d2f.families import FAMILIES, Family, check_ids
from d2f.models import HERE, resolve
from d2f.parts import ModelParts

# Whether an adapter belongs to the base that it is put on: by hash where it carries one, else by
# the name in its configuration.

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]")


def base_name(path: str | None) -> str | None:
    """What a model in the folder `path` is called where its place says so for certain: owner/name
    for a snapshot in the hub's cache, a bundled model's name; None for any other folder."""
    if path is None:
        return None
    place = Path(path).absolute()
    repository = place.parent.parent.name
    if place.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return place.name if place.parent == HERE else None


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
    # Where both names are certain, different ones are an error. The name of a folder is not: there
    # the same is taken for good, and another is a warning.
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
    """The fingerprint of a base that is a folder here or a bundled model, else None."""
    try:
        place = resolve(named or "")
        return fingerprint(place) if named and Path(place).is_dir() else None
    except (CheckpointError, OSError):  # holds something else, or no name
        return None


def fingerprint(place: str) -> str:
    """Identity of a checkpoint's weights, whatever the dtype they are loaded in: a hash over the
    name, shape and up to three rows (first, middle, last) of every tensor in its weight files.

    Raises CheckpointError where there are none.
    """
    folder = folder_of(place)
    entries: dict[str, bytes] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="np"):  # its header is looked at
            pass
        # Read, not mapped: a system may map megabytes around each row, which then count as ours.
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                shape, (begin, end) = tensor["shape"], tensor["data_offsets"]
                # Only these rows: the whole of 8B weights is 16 GB.
                rows = sorted({0, shape[0] // 2, shape[0] - 1}) if shape and shape[0] else []
                parts = [str(shape).encode()]
                for row in rows:
                    size = (end - begin) // shape[0]
                    file.seek(8 + length + begin + row * size)
                    parts.append(file.read(size))
                entries[name] = b"".join(parts)
    digest = hashlib.sha256()
    # By name: how the tensors are split into files does not matter.
    for name, content in sorted(entries.items()):
        digest.update(name.encode() + content)
    return digest.hexdigest()


def _last(name: str) -> str:
    """A model's name without owner or folder, as the hub compares names."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


# adapter_config.json, checked: what this project carries out is read, anything else is refused.
#
# PEFT writes every field of its LoraConfig, most of them with the value that changes nothing. A
# field
# that would change what the adapter computes, or the base that it goes on, must have that value.

# Read here, or of no effect on a trained adapter: how it was made, on which tool, for which task.
_FREE = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config",
        "inference_mode", "init_lora_weights", "layers_pattern", "lora_alpha", "lora_dropout",
        "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision",
        "runtime_config", "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip
# Others (pissa, olora, corda, loftq, lora_ga, ...) change the base's weights at the start.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter_config.json says.

    r, alpha, dropout, use_rslora: the LoRA's rank and scale as PEFT means them. targets: names of
    the modules that it adapts, as the file has them: the family's own or transformers'. base: name
    or path of the base, None where it names none. base_class: name of the class that it was trained
    on, empty where the file does not say.
    """

    r: int
    alpha: float
    dropout: float
    use_rslora: bool
    targets: tuple[str, ...]
    base: str | None
    base_class: str

    @property
    def scaling(self) -> float:
        """What the product of its matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The adapter_config.json in `folder`. Raises CheckpointError that names the field, what was
    expected and what came."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder}: expected an adapter with a {ADAPTER_CONFIG}")
    values = read_object(path, CheckpointError)

    def expect(name: str, what: str, is_right: bool) -> None:
        if not is_right:
            raise CheckpointError(f"{path}: {name} must be {what}, got {values.get(name)!r}")

    if values.get("peft_type") != "LORA" or values.get("use_dora"):
        kind = "DoRA" if values.get("use_dora") else values.get("peft_type")
        raise CheckpointError(f"{path}: expected a LORA adapter, got {kind!r}")
    for name, value in values.items():
        says_nothing = value is None or value is False or value in ("none", [], {})
        if name not in _FREE and not says_nothing:  # 0 is a layer, though it equals False
            raise CheckpointError(
                f"{path}: {name} is not supported: expected it absent or empty, got {value!r}"
            )
    start = values.get("init_lora_weights", True)
    # By identity first: 1 and 0 equal True and False, but are none of PEFT's values.
    is_plain = any(start is plain for plain in _PLAIN_STARTS[:3]) or start in _PLAIN_STARTS[3:]
    expect("init_lora_weights", f"one of {list(_PLAIN_STARTS)} (others change the base)", is_plain)
    r: Any = values.get("r")
    alpha: Any = values.get("lora_alpha")
    expect("r", "a whole number of at least 1", _is_number(r) and r >= 1 and r == int(r))
    expect("lora_alpha", "a positive number", _is_number(alpha) and alpha > 0)
    dropout = values.get("lora_dropout") or 0.0
    expect("lora_dropout", "a number in [0, 1)", _is_number(dropout) and 0 <= dropout < 1)
    rslora = values.get("use_rslora") or False
    expect("use_rslora", "true or false", isinstance(rslora, bool))
    base = values.get("base_model_name_or_path")
    expect("base_model_name_or_path", "text", isinstance(base, str | None))
    mapping = values.get("auto_mapping") or {}
    expect("auto_mapping", "an object", isinstance(mapping, dict))
    # PEFT takes a regular expression too, and a word for all layers: not one name of a module.
    targets = values.get("target_modules")
    if not isinstance(targets, list) or not targets or not all(isinstance(t, str) for t in targets):
        raise CheckpointError(f"{folder}: expected a list of target_modules, got {targets!r}")
    return AdapterConfig(
        r=int(r),
        alpha=alpha,
        dropout=float(dropout),
        use_rslora=rslora,
        targets=tuple(targets),
        base=base,
        base_class=str(mapping.get("base_model_class") or ""),
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**53  # a whole number that a float holds exactly
    return isinstance(value, float) and math.isfinite(value)


_PREFIX = "base_model.model."  # PEFT's wrappers, which its files put before every weight's name
Shape = tuple[int, ...]
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


@dataclass(frozen=True)
class FittingAdapter:
    """An adapter that fits its base, read whole. config: what its file says. targets: the base's
    layers that it changes, by name. weights: by PEFT's names. contract: None where it has none."""

    config: AdapterConfig
    targets: dict[str, nn.Linear]
    weights: dict[str, Tensor]
    contract: Contract | None

    def delta(self, target: str) -> Tensor:
        """What merging adds to a layer's weight, ``[out, in]`` in fp32, as PEFT computes it."""
        a, b = (self.weights[f"{_PREFIX}{target}.lora_{x}.weight"].float() for x in "AB")
        return (b @ a) * self.config.scaling


def fitting_adapter(model: ModelParts, place: str) -> FittingAdapter:
    """Read an adapter for `model`, which stays as it is. Raises and warns as `attach`."""
    folder = folder_of(place)
    if model.adapter is not None:
        raise CheckpointError(f"{folder}: the model already has an adapter; merge it first")
    came = read_adapter_config(folder)
    _check_base_class(model, folder, came.base_class)
    contract = Contract.load(folder)
    if contract is not None:
        _check_contract(model, folder, contract)
    # Whose it is before what it holds: an adapter fits every base of the same shape, and on the
    # wrong one it loads without a word and answers wrongly.
    named = (contract.base if contract else None) or came.base
    check_base(folder, named, contract.base_hash if contract else None, model.path)
    targets = _targets(model, folder, came.targets)
    weights = _rename(model, _read_weights(folder))
    expected = {}  # known from the configuration: nothing of a rank that no file has is allocated
    for name, layer in targets.items():
        key = f"{_PREFIX}{name}.lora_"
        expected[f"{key}A.weight"] = (came.r, layer.in_features)
        expected[f"{key}B.weight"] = (layer.out_features, came.r)
    problem = _difference(expected, {key: tuple(value.shape) for key, value in weights.items()})
    if problem:
        raise CheckpointError(f"{folder}: the adapter does not fit this base: {problem}")
    return FittingAdapter(came, targets, weights, contract)


def attach(
    model: ModelParts, place: str, *, trainable: bool = False, targets: Sequence[str] = ()
) -> None:
    """Load an adapter onto `model`, whose contract becomes the adapter's where it has one.
    trainable: its weights are to be trained on. targets: the layers that it shall change, by the
    last part of their names, its own among them; the others' B matrices are 0, so that it computes
    what it did. Default: its own.

    Raises CheckpointError for a missing or damaged file, target modules that the base or `targets`
    lacks, another shape, or another base; warns with UnverifiedBaseWarning where the base cannot be
    told (`d2f.adapters`).
    """
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict

    adapter = fitting_adapter(model, place)
    # PEFT finds the modules by the last part of their names, in all layers.
    own = {name.rsplit(".", 1)[-1] for name in adapter.targets}
    if targets and not own <= set(targets):
        raise CheckpointError(
            f"{folder_of(place)}: expected an adapter of {', '.join(sorted(targets))}, or of some "
            f"of them, got one of {', '.join(sorted(own))}"
        )
    config = LoraConfig(
        r=adapter.config.r,
        lora_alpha=adapter.config.alpha,
        lora_dropout=adapter.config.dropout,
        use_rslora=adapter.config.use_rslora,
        target_modules=sorted(own.union(targets)),
        inference_mode=not trainable,
    )
    wrapped = PeftModel(model.backbone, config)
    set_peft_model_state_dict(wrapped, adapter.weights)
    model.adapter = wrapped.eval()
    # What the adapter was trained to do (objective, block size) is now what the model does.
    if adapter.contract is not None:
        model.contract = adapter.contract


def save_adapter(model: ModelParts, folder: Path) -> None:
    """Write the adapter's weights, configuration and the model's contract into `folder`. Raises
    CheckpointError for weights that are not finite."""
    assert model.adapter is not None
    config = model.adapter.peft_config["default"]
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        # PEFT's name of the adapter in memory, which is not in its files.
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


def _read_weights(folder: Path) -> dict[str, Tensor]:
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise CheckpointError(f"{folder}: expected an adapter with a {ADAPTER_WEIGHTS}")
    path = inside(folder, ADAPTER_WEIGHTS)
    stored([path])  # raises for a damaged file, and for weights that are not floating point
    return load_file(path)


def _check_base_class(model: ModelParts, folder: Path, base_class: str) -> None:
    """An official adapter names the class it was trained on; it must be of the same family."""
    for family in FAMILIES:
        if base_class.lower().startswith(family) and family != model.family:
            raise CheckpointError(
                f"{folder}: the adapter was made for the family {family} ({base_class}), "
                f"this base is {model.family}"
            )


def _check_contract(model: ModelParts, folder: Path, contract: Contract) -> None:
    if contract.family != model.family:
        raise CheckpointError(
            f"{folder}: the adapter was made for the family {contract.family}, "
            f"this base is {model.family}"
        )
    check_ids(str(folder), contract, model.vocab_size)
    if contract.mask_id != model.mask_id:
        raise CheckpointError(
            f"{folder}: the adapter's mask id is {contract.mask_id}, this base's is {model.mask_id}"
        )


def _targets(model: ModelParts, folder: Path, came: Sequence[str]) -> dict[str, nn.Linear]:
    """The base's linear layers that the adapter targets, by transformers' names."""
    linear = {n: m for n, m in model.backbone.named_modules() if isinstance(m, nn.Linear)}
    if model.backbone.config.tie_word_embeddings:
        linear.pop("lm_head")  # it would change the embeddings too
    # An official adapter targets attn_out, one of this project o_proj: either is understood.
    names = _official_modules(FAMILIES[model.family], linear)
    targets = {names.get(name, name) for name in came}
    have = {name.rsplit(".", 1)[-1] for name in linear}
    unknown = sorted(targets - have)
    if unknown:
        raise CheckpointError(
            f"{folder}: the adapter targets {unknown}, which this base does not have; "
            f"expected some of {sorted(have)}"
        )
    return {name: m for name, m in linear.items() if name.rsplit(".", 1)[-1] in targets}


def _official_modules(family: Family, linear: Iterable[str]) -> dict[str, str]:
    """Of the base's linear layers, the last part of the family's name to that of transformers'. One
    that means two is left out: LLaDA calls both the down projection and the head ff_out."""
    meant = defaultdict(set)
    for name in linear:
        official = family.official_name(f"{name}.weight").removesuffix(".weight")
        meant[official.rsplit(".", 1)[-1]].add(name.rsplit(".", 1)[-1])
    return {official: ours.pop() for official, ours in meant.items() if len(ours) == 1}


def _rename(model: ModelParts, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adapter weights under transformers' module names, whichever the file has. Of LLaDA the first
    of these becomes the second::

        base_model.model.model.transformer.blocks.0.attn_out.lora_A.weight
        base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight
    """
    family = FAMILIES[model.family]
    # Some files have PEFT's name of the adapter in their keys: lora_A.default.weight.
    names = {key: key.removeprefix(_PREFIX).replace(".default.", ".") for key in weights}
    return {_PREFIX + family.native_name(names[key]): value for key, value in weights.items()}


def _difference(expected: Mapping[str, Shape], came: Mapping[str, Shape]) -> str:
    """What is missing, unexpected or misshapen, empty where nothing is."""
    problems = []
    for what, keys in (
        ("missing", sorted(expected.keys() - came.keys())),
        ("unexpected", sorted(came.keys() - expected.keys())),
    ):
        if keys:
            problems.append(f"{len(keys)} {what}, such as {keys[0]}")
    for key in sorted(expected.keys() & came.keys()):
        if expected[key] != came[key]:
            problems.append(f"{key}: expected shape {list(expected[key])}, got {list(came[key])}")
            break  # one says it: of another rank or size all are
    return "; ".join(problems)
