"""Load a model by folder or hub name, with or without an adapter; every misfit is an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from d2f import attention
from d2f.adapters import attach
from d2f.contract import Contract
from d2f.device import parse_device, parse_dtype, parse_threads
from d2f.errors import CheckpointError
from d2f.families import Family, family_of, get_family, model_classes
from d2f.family_contract import check_ids, published_contract
from d2f.hub import base_of_adapter, folder_of
from d2f.json_file import read_object
from d2f.leading import announce, kind_of_rank
from d2f.load_tokenizer import load_tokenizer
from d2f.model import DiffusionModel
from d2f.model_config import check_fits_files, check_size, empty_model, model_config
from d2f.models import resolve
from d2f.quantize import check_quantize, loading_settings, quantize_layers
from d2f.quiet import loading_bars
from d2f.ranks import join, reported
from d2f.tensor_parallel import check_divides, check_parallel, sharded
from d2f.weight_files import stored, weight_files
from d2f.weights import read_weights

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
    parts. threads: how many a forward is computed with on a CPU; ``auto`` lets each engine
    measure which number is fastest at the time, up to the processors that the process may use
    (`d2f.cpus`), None up to the number that torch is set to, if that is lower.

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
    counts = parse_threads(threads)
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
    if where.type == "cpu":
        model.thread_counts = counts
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
