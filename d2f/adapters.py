"""LoRA adapters through PEFT: the official ones, this project's own, and new ones to train."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from d2f.adapter_base import check_base
from d2f.adapter_config import AdapterConfig, read_adapter_config
from d2f.contract import Contract
from d2f.errors import CheckpointError
from d2f.families import FAMILIES, Family
from d2f.family_contract import check_ids
from d2f.hub import folder_of
from d2f.model_parts import ModelParts
from d2f.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, inside, stored
from d2f.weights import write_weights

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
    told (`d2f.adapter_base`).
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
