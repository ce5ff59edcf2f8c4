"""Load a model by folder or hub name, with or without an adapter; every misfit is an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from safetensors import SafetensorError
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from d2f import attention
from d2f.contract import Contract
from d2f.device import parse_device
from d2f.errors import CheckpointError, InputError
from d2f.families import Family, family_of, get_family
from d2f.json_file import read_object
from d2f.model import DiffusionModel
from d2f.model_config import MODEL_CLASSES, check_fits_files, check_size, empty_model, model_config
from d2f.models import resolve
from d2f.quantize import four_bits
from d2f.quiet import loading_bars
from d2f.weight_files import stored, weight_files

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
# What transformers raises for files that are not what they should be, its generation_config.json
# among them.
_UNREADABLE = (
    OSError,
    SafetensorError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
)


def load(
    name_or_path: str | Path,
    *,
    adapter: str | Path | None = None,
    family: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    quantize: bool = False,
    progress: bool = False,
) -> DiffusionModel:
    """Load a checkpoint into transformers' own class.

    name_or_path: a folder, a hub name, or the name of a model that ships with this package
    (`d2f.models.names()`); where that is an adapter alone, the base that it names is loaded and it
    goes onto it. adapter: folder or hub name of a LoRA adapter, official or of this project.
    family: overrides what the checkpoint says of itself. dtype: default fp32 on a CPU, bf16
    elsewhere. device: default CUDA where there is one; on ``meta`` no weights are read, nor
    fetched: the model has shapes and nothing else. quantize: 4-bit weights (`d2f.quantize`).
    progress: a bar while the weights are read; a download has its own either way.

    Raises CheckpointError, naming what was expected and what came, for missing, unexpected or
    misshapen weights, a damaged file, or an adapter that does not belong to this base; InputError
    for a dtype or device that there is not.
    """
    where = parse_device(device)
    place = str(folder_of(resolve(str(name_or_path)), weights=where.type != "meta"))
    base = base_of_adapter(place)
    if base is not None:
        if adapter is not None:
            raise CheckpointError(f"{place} is an adapter: expected a model for {adapter}")
        try:
            found = str(folder_of(resolve(base), weights=where.type != "meta"))
        except CheckpointError as error:
            raise CheckpointError(
                f"{place} is an adapter of {base}, which is not at hand: expected that base as the "
                "model, and this as its adapter"
            ) from error
        return load(
            found,
            adapter=place,
            family=family,
            dtype=dtype,
            device=device,
            quantize=quantize,
            progress=progress,
        )
    raw = _read_config(place)
    contract = Contract.load(Path(place))
    chosen = get_family(
        family or (contract.family if contract else family_of(raw.get("model_type")).name)
    )
    with loading_bars(progress):
        backbone = _load_backbone(place, chosen, raw, parse_dtype(dtype, where), where, quantize)
    tokenizer = load_tokenizer(place)
    if contract is None or contract.family != chosen.name:
        contract = _derive_contract(chosen, raw, backbone.config, tokenizer)
    check_ids(place, contract, backbone.config.vocab_size)
    model = DiffusionModel(backbone.eval(), contract, tokenizer=tokenizer, path=place)
    if adapter is not None:
        from d2f.adapters import attach

        attach(model, resolve(str(adapter)))
    return model


def folder_of(place: str, *, weights: bool = True) -> Path:
    """The folder that `place` names, fetched from the hub where it is not one here; without
    `weights` all but the weight files.

    Raises CheckpointError where there is neither.
    """
    try:
        if Path(place).is_dir():
            return Path(place)
        ignored = ["*.bin", "*.pth", "*.gguf", *([] if weights else ["*.safetensors"])]
        return Path(snapshot_download(place, ignore_patterns=ignored))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{place}: no such folder or hub name: {error}") from error


def base_of_adapter(place: str) -> str | None:
    """The base that the adapter in a folder names, None where the folder holds no adapter alone.
    Raises CheckpointError where it names none."""
    path = Path(place) / "adapter_config.json"
    if path.with_name("config.json").is_file() or not path.is_file():
        return None
    base = read_object(path, CheckpointError).get("base_model_name_or_path")
    if not isinstance(base, str) or not base or resolve(base) == place:
        raise CheckpointError(f"{path} names no base: give the base as model, and this as adapter")
    return base


def parse_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """A torch dtype from its name; None is fp32 on a CPU and bf16 elsewhere."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise InputError(f"dtype must be one of {sorted(_DTYPES)}, got {dtype!r}")
    return _DTYPES[dtype]


def _read_config(place: str) -> dict[str, Any]:
    path = Path(place) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{place}: expected a model folder with a config.json, found none")
    raw = read_object(path, CheckpointError)
    for name in ("quantization_config", "transformers_weights"):
        if raw.get(name):
            raise CheckpointError(
                f"{path}: {name} must be absent (weights are read as they are, from "
                f"model.safetensors), got {raw[name]!r}"
            )
    return raw


def _load_backbone(
    place: str,
    family: Family,
    raw: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    quantize: bool,
) -> Any:
    config = model_config(place, family, raw)
    kind = MODEL_CLASSES[config.model_type]
    if device.type == "meta":
        return empty_model(place, kind, config, dtype)
    tensors = stored(weight_files(Path(place)))
    check_fits_files(place, config, tensors)
    check_size(place, empty_model(place, kind, config, dtype), tensors)
    more = {"quantization_config": four_bits(dtype), "device_map": {"": device}} if quantize else {}
    try:
        backbone, info = kind.from_pretrained(
            place,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            key_mapping=dict(family.key_mapping) or None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            trust_remote_code=False,
            **more,
        )
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{place}: weights cannot be read: {type(error).__name__}: {error}"
        ) from error
    _check_loaded(place, family, info)
    head, embeddings = backbone.lm_head.weight, backbone.model.embed_tokens.weight
    if config.tie_word_embeddings and head is not embeddings and not torch.equal(head, embeddings):
        raise CheckpointError(
            f"{place}: config.json says that the output weights are the embeddings "
            "(tie_word_embeddings): expected none in the file, got others"
        )
    if not backbone.model.rotary_emb.inv_freq.isfinite().all():
        raise CheckpointError(
            f"{place}: config.json: RoPE must have finite frequencies, {config.rope_parameters} "
            "gives others"
        )
    return backbone if quantize else backbone.to(device)


def _check_loaded(place: str, family: Family, info: Mapping[str, Any]) -> None:
    problems = []
    for key, came, expected in sorted(info["mismatched_keys"]):
        problems.append(f"{key}: expected shape {list(expected)}, got {list(came)}")
    for what in ("missing", "unexpected"):
        keys = sorted(info[f"{what}_keys"])
        if keys:
            problems.append(f"{len(keys)} {what}: {', '.join(keys[:4])}{', ...' * (len(keys) > 4)}")
    if problems:
        raise CheckpointError(
            f"{place}: the weights do not fit a model of the family {family.name}: "
            + "; ".join(problems)
        )


def check_ids(place: str, contract: Contract, vocabulary: int) -> None:
    """Raise CheckpointError unless a contract says of a vocabulary and its family what can be."""
    family = get_family(contract.family)
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


def load_tokenizer(place: str) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer, None where it has none or one without a vocabulary, which makes
    no token of any text; its own code is never run. Raises CheckpointError where it cannot be read
    without."""
    folder = Path(place)
    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        tokenizer = _read_tokenizer(folder)
        return tokenizer if tokenizer.get_vocab().keys() - tokenizer.get_added_vocab() else None
    except Exception as error:  # tokenizers raises Exception itself, transformers whatever comes
        raise CheckpointError(f"{place}: its tokenizer cannot be read: {error}") from error


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    if _is_generic(folder):
        return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (KeyError, ValueError, OSError):
        # Dream's tokenizer is Qwen2's under a class of its own that only remote code provides.
        if (folder / "vocab.json").is_file():
            return Qwen2Tokenizer.from_pretrained(folder, trust_remote_code=False)
        raise


def _is_generic(folder: Path) -> bool:
    """Whether tokenizer.json is all there is to the tokenizer. AutoTokenizer would go by the
    model's type instead and cut text as that model's own tokenizer does."""
    settings = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file():
        return False
    kind = read_object(settings, CheckpointError) if settings.is_file() else {}
    generic = (None, "TokenizersBackend", "PreTrainedTokenizerFast")
    return kind.get("tokenizer_class") in generic


def _derive_contract(
    family: Family,
    raw: Mapping[str, Any],
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Contract:
    """What an official checkpoint implies."""
    mask_id = raw.get("mask_token_id")
    if mask_id is None and tokenizer is not None:
        mask_id = tokenizer.mask_token_id
    if family.needs_mask and mask_id is None:
        raise CheckpointError(
            f"the family {family.name} needs a mask id: expected mask_token_id in config.json "
            "or a mask token in the tokenizer, found neither"
        )
    eos = raw.get("eos_token_id")
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
    """The block size in config.json of a family that is trained on blocks. Raises
    CheckpointError."""
    size = raw.get("block_size") if family.prompt_rule == "block_causal" else None
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise CheckpointError(
            f"config.json: block_size must be a whole number of at least 1, got {size!r}"
        )
    return size
