"""Load a model by folder or hub name, with or without an adapter; every misfit is an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.activations import ACT2FN

from d2f import attention
from d2f.adapters import attach
from d2f.checkpoint import (
    Stored,
    base_of_adapter,
    folder_of,
    read_object,
    read_weights,
    refuse_pointer,
    stored,
    weight_files,
)
from d2f.contract import Contract
from d2f.device import parse_device, parse_dtype, parse_threads
from d2f.errors import CheckpointError
from d2f.families import (
    FAMILIES,
    Family,
    check_ids,
    family_of,
    get_family,
    model_classes,
    published_contract,
    transformers_config,
)
from d2f.leading import announce, join, kind_of_rank, reported
from d2f.model import DiffusionModel
from d2f.models import resolve
from d2f.quantize import check_quantize, loading_settings, quantize_layers
from d2f.quiet import loading_bars
from d2f.tensor_parallel import check_divides, check_parallel, sharded

# A checkpoint's config.json as a transformers configuration that can be built, checked before
# anything is allocated of what it says.

# longrope's frequencies depend on the longest row of the batch, and so would a request's tokens.
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")

# How transformers is to be called, not what the model is: this project says that itself; and the
# classes of a classifier, of which transformers makes a list as long as it is told.
_CALLS = ("output_attentions", "output_hidden_states", "return_dict")
_LABELS = ("num_labels", "id2label", "label2id")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


# What the fields of RoPE must be; transformers warns at most, and computes with whatever is there.
_POSITIVE = ("a number above 0", _is_positive)
_ROPE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("rope_theta", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
         "low_freq_factor", "high_freq_factor"), _POSITIVE,
    ),
    "factor": ("a number of at least 1", lambda value: _is_number(value) and value >= 1),
    "original_max_position_embeddings": (
        "a whole number of at least 1", lambda value: _is_positive(value) and isinstance(value, int)
    ),
    "partial_rotary_factor": ("1", lambda value: _is_number(value) and value == 1),
    "truncate": ("true or false", lambda value: isinstance(value, bool)),
}  # fmt: skip


def model_config(place: str, family: Family, raw: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration of the family's model from a config.json. Raises CheckpointError for what
    cannot be built, or would be built and run as something else."""
    try:
        told = {k: v for k, v in raw.items() if k not in (*_CALLS, *_LABELS)}
        config = transformers_config(family, told)
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error
    except Exception as error:  # transformers raises whatever comes of values of the wrong type
        raise CheckpointError(f"{place}: config.json makes no model: {_line(error)}") from error

    def expect(name: str, what: str, came: object, is_right: bool) -> None:
        if not is_right:
            raise CheckpointError(f"{place}: config.json: {name} must be {what}, got {came!r}")

    act, eps = config.hidden_act, config.rms_norm_eps
    expect("hidden_act", f"one of {', '.join(ACT2FN)}", act, isinstance(act, str) and act in ACT2FN)
    expect("rms_norm_eps", "a number from 0 to 1", eps, _is_number(eps) and 0 <= eps <= 1)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    expect("num_key_value_heads", f"a divisor of {heads}", kv_heads, heads % kv_heads == 0)
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type", "default") if isinstance(rope, dict) else rope
    expect("rope_type", f"one of {', '.join(_ROPE_TYPES)}", rope_type, rope_type in _ROPE_TYPES)
    for name, value in rope.items():
        if name in ("rope_type", "type") or value is None:
            continue
        what, fits = _ROPE.get(name, ("absent (it is not supported)", lambda value: False))
        expect(f"RoPE's {name}", what, value, fits(value))
    length, window = config.max_position_embeddings, getattr(config, "sliding_window", None)
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        expect(
            "use_sliding_window",
            f"false, or its window at least the model's {length} positions (no layer sees less)",
            f"{', '.join(sorted(map(str, others)))}, window {window}",
            others == {"sliding_attention"} and _is_number(window) and window >= length,
        )
    return config


def empty_model(
    place: str, kind: Any, config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """The model without weights, on the meta device. Raises CheckpointError."""
    try:
        with torch.device("meta"):
            return kind._from_config(config, attn_implementation=attention.NAME, dtype=dtype)
    except Exception as error:  # of sizes and values that only building tells do not go together
        raise CheckpointError(f"{place}: config.json makes no model: {_line(error)}") from error


def check_fits_files(place: str, config: PretrainedConfig, tensors: Mapping[str, Stored]) -> None:
    """Raise CheckpointError for more layers than the weight files have tensors."""
    if config.num_hidden_layers > len(tensors):
        raise CheckpointError(
            f"{place}: config.json says {config.num_hidden_layers} layers, the weight files hold "
            f"{len(tensors)} tensors in all"
        )


def check_size(place: str, model: PreTrainedModel, tensors: Mapping[str, Stored]) -> None:
    """Raise CheckpointError where the configuration's model is more than twice as large as the
    weight files: what they lack would be allocated before it is found missing."""
    wanted = sum(parameter.numel() for parameter in model.parameters())
    held = sum(math.prod(tensor.shape) for tensor in tensors.values())
    if wanted > 2 * held:
        raise CheckpointError(
            f"{place}: config.json says a model of {wanted:,} parameters, the weight files hold "
            f"{held:,}"
        )


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# Read a checkpoint's tokenizer, as it cuts text and without its own code.

# Classes that are nothing but tokenizer.json.
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_tokenizer(place: str) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer, None where it has none or one without a vocabulary, which makes
    no token of any text; its own code is never run. Raises CheckpointError where it cannot be read
    without."""
    folder = Path(place)
    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        if _has_no_vocabulary(folder):
            return None
        tokenizer = _read_tokenizer(folder)
        return tokenizer if tokenizer.get_vocab().keys() - tokenizer.get_added_vocab() else None
    except Exception as error:  # tokenizers raises Exception itself, transformers whatever comes
        for path in sorted(folder.glob("*.json")):
            refuse_pointer(path, CheckpointError)
        raise CheckpointError(f"{place}: its tokenizer cannot be read: {error}") from error


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    if _is_generic(folder):
        return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (KeyError, ValueError, OSError):
        # Its class is code of the checkpoint's, which is not run: Dream's is Qwen2's tokenizer.
        for kind in {family.tokenizer for family in FAMILIES.values()} - {None}:
            if (folder / kind.vocab_files_names["vocab_file"]).is_file():
                return kind.from_pretrained(folder, trust_remote_code=False)
        raise


def _has_no_vocabulary(folder: Path) -> bool:
    """Whether there are settings of a generic tokenizer alone."""
    settings = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").is_file():
        return False
    return read_object(settings, CheckpointError).get("tokenizer_class") in _GENERIC


def _is_generic(folder: Path) -> bool:
    """Whether tokenizer.json is all there is to the tokenizer. AutoTokenizer would go by the
    model's type instead and cut text as that model's own tokenizer does."""
    settings = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file():
        return False
    kind = read_object(settings, CheckpointError) if settings.is_file() else {}
    return kind.get("tokenizer_class") in (None, *_GENERIC)


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
    quantize: str | bool | None = None,
    progress: bool = False,
    tensor_parallel: int = 1,
    threads: int | str | None = None,
) -> DiffusionModel:
    """Load a checkpoint into transformers' own class.

    name_or_path: a folder, a hub name, or the name of a model that ships with this package
    (`d2f.models.names()`); where that is an adapter alone, the base that it names is loaded and it
    goes onto it. adapter: folder or hub name of a LoRA adapter, official or of this project.
    family: overrides what the checkpoint says of itself. dtype: default fp32 on a CPU, bf16
    elsewhere; ``auto`` is bf16 on a CPU that is fast in it, too (`d2f.device`). device: default
    CUDA where there is one; on ``meta`` no weights are read, nor fetched: the model has shapes and
    nothing else. quantize: weights in few bits, one of `d2f.quantize.QUANTISATIONS`; an adapter is
    merged into the weights first, so that what is quantised is what the two compute together.
    progress: a bar while the weights are read; a download has its own either way. tensor_parallel:
    how many processes, started by torchrun, hold a part of the model each; all of them call this,
    then rank 0 decodes and the others follow it (`d2f.leading`). An adapter is merged into the
    parts. threads: how many torch computes with on a CPU from here on; ``auto`` the processors that
    the process may use, None no more than torch is set to; either is one where other programs keep
    all of them busy (`d2f.device.parse_threads`).

    Raises CheckpointError, naming what was expected and what came, for missing, unexpected or
    misshapen weights, a damaged file, or an adapter that does not belong to this base; InputError
    for a dtype or device that there is not, for a quantisation that the device has not, for
    processes that are not there, or cannot share the model's heads; RankError where one of them
    ends.
    """
    if isinstance(quantize, bool):  # as it was when there was only one
        quantize = "nf4" if quantize else None
    where = parse_device(device)
    number = parse_dtype(dtype, where)
    count = parse_threads(threads) if where.type == "cpu" else None
    if tensor_parallel != 1:
        where = check_parallel(tensor_parallel, where, quantize=quantize is not None)
    if quantize is not None:
        check_quantize(quantize, where, number)
    place = str(folder_of(resolve(str(name_or_path)), weights=where.type != "meta"))
    base = base_of_adapter(place)
    if base is not None:  # the folder holds an adapter alone: load its base, put it on
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
            tensor_parallel=tensor_parallel,
            threads=threads,
        )
    raw = _read_config(place)
    # The contract is what this project saved and knows best; an official checkpoint has none, and
    # its model_type says the family.
    contract = Contract.load(Path(place))
    chosen = get_family(
        family or (contract.family if contract else family_of(raw.get("model_type")).name)
    )
    with loading_bars(progress):
        # With an adapter they are quantised once it is in them.
        at_once = quantize if adapter is None else None
        backbone = _load_backbone(place, chosen, raw, number, where, at_once, tensor_parallel)
    tokenizer = load_tokenizer(place)
    # Named as another family by the caller: its contract says nothing of that one.
    if contract is None or contract.family != chosen.name:
        contract = published_contract(chosen, raw, tokenizer)
    check_ids(place, contract, backbone.config.vocab_size)
    in_parts = tensor_parallel > 1 and where.type != "meta"
    kind = kind_of_rank() if in_parts else DiffusionModel
    model = kind(
        backbone.eval(),
        contract,
        tokenizer=tokenizer,
        path=place,
        tensor_parallel=tensor_parallel,
    )
    if count is not None:
        model.threads = count
        torch.set_num_threads(count)
    if adapter is not None and in_parts:
        with reported():
            model.merge_from(resolve(str(adapter)))
    elif adapter is not None:
        attach(model, resolve(str(adapter)))
        if quantize is not None:
            model.merge_adapter()
            quantize_layers(model.backbone.model, quantize)
            model.backbone.quantized = quantize
    if in_parts:
        announce(model)
    return model


def _read_config(place: str) -> dict[str, Any]:
    path = Path(place) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{place}: expected a model folder with a config.json, found none")
    raw = read_object(path, CheckpointError)
    # With either transformers would read other weights, or read them otherwise, than is checked.
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
    quantize: str | None,
    tensor_parallel: int,
) -> Any:
    config = model_config(place, family, raw)
    kind = model_classes()[config.model_type]
    check_divides(place, config, tensor_parallel)
    if device.type == "meta":
        return empty_model(place, kind, config, dtype)
    # From the files' headers, before anything is allocated: a config.json that asks for a thousand
    # layers must not fill the memory first.
    files = weight_files(Path(place))
    tensors = stored(files)
    check_fits_files(place, config, tensors)
    check_size(place, empty_model(place, kind, config, dtype), tensors)
    source: dict[str, Any] = {"pretrained_model_name_or_path": place}
    if quantize is not None:
        source |= {
            "quantization_config": loading_settings(quantize, dtype),
            "device_map": {"": device},
        }
    elif tensor_parallel > 1:
        join(device)
        source |= sharded(tensor_parallel)
    else:
        source = {"pretrained_model_name_or_path": None, "state_dict": read_weights(files, dtype)}
    with reported():
        backbone = _read_backbone(place, family, kind, config, dtype, source)
    # Tied weights are one tensor; a file that has both must have them equal, else one is lost.
    head, embeddings = backbone.lm_head.weight, backbone.model.embed_tokens.weight
    if config.tie_word_embeddings and head is not embeddings and not torch.equal(head, embeddings):
        raise CheckpointError(
            f"{place}: config.json says that the output weights are the embeddings "
            "(tie_word_embeddings): expected none in the file, got others"
        )
    # Checked on what was built: fields of RoPE that are right one by one may still not go together.
    if not backbone.model.rotary_emb.inv_freq.isfinite().all():
        raise CheckpointError(
            f"{place}: config.json: RoPE must have finite frequencies, {config.rope_parameters} "
            "gives others"
        )
    if quantize is not None:
        backbone.quantized = quantize
        return backbone  # device_map has placed it
    return backbone if tensor_parallel > 1 else backbone.to(device)


def _read_backbone(
    place: str, family: Family, kind: Any, config: Any, dtype: torch.dtype, source: dict[str, Any]
) -> Any:
    """source: where from_pretrained finds the weights, and what becomes of them."""
    try:
        backbone, info = kind.from_pretrained(
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            key_mapping=dict(family.key_mapping) or None,
            # transformers fills what is missing with random values and goes on; the report says
            # so, and `_check_loaded` makes it an error; with misshapen ones in the same one.
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            # No pickles and no code of the checkpoint.
            use_safetensors=True,
            trust_remote_code=False,
            **source,
        )
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{place}: weights cannot be read: {type(error).__name__}: {error}"
        ) from error
    _check_loaded(place, family, info)
    return backbone


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
