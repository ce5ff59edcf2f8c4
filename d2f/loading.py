"""Load a model by folder or hub name, with or without an adapter; every misfit is an error."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from d2f import attention
from d2f.adapters import attach
from d2f.checkpoint import (
    base_name,
    base_of_adapter,
    check_fit,
    folder_of,
    read_object,
    stored,
    weight_files,
)
from d2f.contract import Contract
from d2f.device import parse_device, parse_dtype, parse_threads
from d2f.errors import CheckpointError, InputError, SupposedWarning, out_of_memory
from d2f.families import (
    check_ids,
    family_of,
    get_family,
    model_classes,
    published_contract,
    transformers_config,
)
from d2f.families.family import check_keys
from d2f.model import DiffusionModel
from d2f.models import resolve
from d2f.parts import Outline
from d2f.quantize import check_quantize, loading_settings
from d2f.quiet import loading_bars
from d2f.tensor_parallel import (
    announce,
    check_divides,
    check_parallel,
    join,
    kind_of_rank,
    merge_into_parts,
    sharded,
)
from d2f.tokenizer import load_tokenizer


def load(
    name_or_path: str | Path | Outline,
    *,
    adapter: str | Path | None = None,
    family: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    quantize: str | bool | None = None,
    progress: bool = False,
    tensor_parallel: int = 1,
    threads: int | str | None = None,
    mask_id: int | None = None,
    end_ids: Sequence[int] | None = None,
    block_size: int | None = None,
) -> DiffusionModel:
    """Load a checkpoint into transformers' own class.

    name_or_path: a folder, a hub name, the name of a model that ships with this package
    (`d2f.models.names()`), or what `describe` read of one; where that is an adapter alone, the base
    that it names is loaded and it goes onto it.
    adapter: folder or hub name of a PEFT adapter, official or of this project.
    family: overrides what the checkpoint says of itself; keys of its config.json that the family
    does not know are then no error.
    dtype: default fp32 on a CPU, bf16 elsewhere; ``auto`` is bf16 on a CPU that is fast in it, too.
    device: default CUDA where there is one; on ``meta`` the model has shapes and no weights.
    quantize: weights in few bits, one of `d2f.quantize.QUANTISATIONS`; an adapter is merged into
    the weights first, so that what is quantised is what the two compute together.
    progress: show a bar while the weights are read; a download has its own either way.
    tensor_parallel: how many processes, started by torchrun, hold a part of the model each; all of
    them call this, then rank 0 decodes and the others follow (`d2f.tensor_parallel`). An adapter
    is merged into the parts.
    threads: how many torch computes with on a CPU from here on; ``auto`` the processors that the
    process may use, None no more than torch is set to; either is one where other programs keep all
    of them busy (`d2f.device.parse_threads`).
    mask_id, end_ids, block_size: what the checkpoint does not say, or says wrongly.

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
    asked: dict[str, Any] = {"adapter": adapter, "family": family, "mask_id": mask_id}
    asked |= {"end_ids": end_ids, "block_size": block_size}
    outline = name_or_path
    if not isinstance(outline, Outline):
        outline = describe(outline, **asked)
    elif any(value is not None for value in asked.values()):
        raise InputError(f"expected {', '.join(asked)} where the outline was described")
    check_divides(outline.path, outline.config, tensor_parallel)
    drafts = outline.adapter is not None and outline.contract.draft_id is not None
    if drafts and (quantize is not None or tensor_parallel != 1):
        raise InputError(
            f"{outline.adapter}: a self-drafting adapter stays beside the weights: expected them "
            "without quantize and tensor_parallel"
        )
    in_parts = tensor_parallel > 1 and where.type != "meta"
    if count is not None:
        torch.set_num_threads(count)
    few_bits = {} if quantize is None else loading_settings(quantize, number, where)
    how, kind = few_bits if outline.adapter is None else {}, DiffusionModel
    if in_parts:
        join(where)
        how, kind = sharded(tensor_parallel), kind_of_rank()
    with loading_bars(progress):
        model = kind(
            _load_backbone(outline, number, where, **how),
            outline.base_contract,
            tokenizer=outline.tokenizer,
            path=outline.path,
            tensor_parallel=tensor_parallel,
        )
        if outline.adapter is not None and in_parts:
            whole = _load_backbone(outline, number, torch.device("cpu"))
            adapted = DiffusionModel(whole, outline.base_contract, path=outline.path)
            attach(adapted, outline.adapter)
            merge_into_parts(model, adapted)
        elif outline.adapter is not None:
            attach(model, outline.adapter)
            if quantize is not None:  # once the adapter is in the weights
                model.merge_adapter()
                shape, weights = replace(outline, config=model.config), model.backbone.state_dict()
                backbone = _load_backbone(shape, number, where, weights, **few_bits)
                model = replace(model, backbone=backbone)
    if quantize is not None:
        model.backbone.quantized = quantize
    model.contract = outline.contract
    if in_parts:
        announce(model)
    return model


def describe(
    name_or_path: str | Path,
    *,
    adapter: str | Path | None = None,
    family: str | None = None,
    mask_id: int | None = None,
    end_ids: Sequence[int] | None = None,
    block_size: int | None = None,
) -> Outline:
    """Read all of a checkpoint but its weights, which are neither read nor fetched: the arguments
    and errors are those of `load`, which takes the result instead of a name."""
    folder = folder_of(str(name_or_path), weights=False)
    base = base_of_adapter(folder)
    if base is not None:  # the folder holds an adapter alone, which goes onto its base
        if adapter is not None:
            raise CheckpointError(f"{folder} is an adapter: expected a model for {adapter}")
        adapter = folder
        try:
            folder = folder_of(base, weights=False)
        except CheckpointError as error:
            raise CheckpointError(
                f"{adapter} is an adapter of {base}, which is not at hand: expected that base as "
                f"the model, and this as its adapter ({error})"
            ) from error
    place = str(folder)
    raw, tokenizer, saved = _read_config(folder), load_tokenizer(place), Contract.load(folder)
    # The contract is what this project saved and knows best; an official checkpoint has none, and
    # its config.json says the family.
    strict = saved is None and family is None
    given: dict[str, Any] = {"mask_id": mask_id, "block_size": block_size}
    given["end_ids"] = None if end_ids is None else tuple(end_ids)
    given = {name: value for name, value in given.items() if value is not None}
    try:
        named = family or (saved.family if saved else family_of(raw).name)
        chosen = get_family(named)
        if strict:
            check_keys(chosen, raw)
        config = transformers_config(chosen, raw)
        _check_positions(config)
        # Named as another family by the caller: its contract says nothing of that one.
        if saved is None or saved.family != named:
            name = base_name(place) or folder.name
            saved, supposed = published_contract(
                chosen, raw, tokenizer, name, strict=strict, given=given
            )
            for what in supposed:
                warnings.warn(f"{place}: {what}", SupposedWarning, stacklevel=2)
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error
    except Exception as error:  # transformers raises whatever comes of values of the wrong type
        raise CheckpointError(
            f"{place}: config.json makes no model: {type(error).__name__}: {error}"
        ) from error
    saved = replace(saved, **given)
    check_ids(place, saved, config.vocab_size)
    contract = saved
    if adapter is not None:
        adapter = resolve(str(adapter))
        own = Contract.load(folder_of(adapter, weights=False))
        # The published adapters of D2F have no contract, nor have their bases.
        by_d2f = own is None and saved.objective is None and saved.prompt_rule == "bidirectional"
        if by_d2f:
            what = "it does not say what trained it: D2F, as the published adapters of such models"
            warnings.warn(f"{adapter}: {what}", SupposedWarning, stacklevel=2)
        contract = own or (replace(saved, objective="d2f") if by_d2f else saved)
    return Outline(config, replace(contract, **given), tokenizer, place, adapter, saved)


# longrope's frequencies depend on the longest row of the batch, and so would a request's tokens.
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def _check_positions(config: PretrainedConfig) -> None:
    """Raise CheckpointError for positions and windows that would be computed as something else."""
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in _ROPE_TYPES:
        raise CheckpointError(
            f"config.json: rope_type must be one of {', '.join(_ROPE_TYPES)}, got {rope_type!r}"
        )
    length, window = config.max_position_embeddings, getattr(config, "sliding_window", None)
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if layers and (layers != {"sliding_attention"} or window is None or window < length):
        raise CheckpointError(
            "config.json: use_sliding_window must be false, or its window at least the model's "
            f"{length} positions (no layer sees less), got {', '.join(sorted(layers))}, window "
            f"{window}"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        inside = folder / "model"  # of the output of a training
        meant = f"; did you mean {inside}?" if (inside / path.name).is_file() else ""
        raise CheckpointError(
            f"{folder}: expected a model folder with a config.json, found none{meant}"
        )
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
    outline: Outline,
    dtype: torch.dtype,
    device: torch.device,
    weights: Mapping[str, Tensor] | None = None,
    **how: Any,
) -> Any:
    """Build transformers' model and read its weights. weights: those, instead of the file's. how:
    further options of `from_pretrained`, which places the model where there are any."""
    placed = bool(how)
    place, config = outline.path, outline.config
    family = get_family(outline.family)
    kind = model_classes()[config.model_type]
    how |= {"attn_implementation": attention.NAME, "dtype": dtype}
    if device.type == "meta":
        try:
            with torch.device("meta"):
                return kind._from_config(copy.deepcopy(config), **how).eval()
        except Exception as error:  # of sizes that do not go together
            raise CheckpointError(f"{place}: config.json makes no model: {error}") from error
    folder = None
    if weights is None:
        folder = folder_of(base_name(place) or place)  # fetches the weights
        stored(weight_files(folder))  # raises for what is no whole safetensors file of floats
    try:
        backbone, info = kind.from_pretrained(
            folder,
            config=config,
            state_dict=weights,
            key_mapping=dict(family.key_mapping) or None,
            # transformers fills what is missing or misshapen with random values and goes on;
            # the report says so, and `check_fit` makes it an error.
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            # No pickles and no code of the checkpoint.
            use_safetensors=True,
            trust_remote_code=False,
            **how,
        )
    except Exception as error:  # transformers raises whatever comes of what is wrong
        if out_of_memory(error):
            raise
        raise CheckpointError(
            f"{place}: weights cannot be read: {type(error).__name__}: {error}"
        ) from error
    check_fit(
        f"{place}: the weights do not fit a model of the family {family.name}",
        missing=info["missing_keys"],
        unexpected=info["unexpected_keys"],
        misshapen=info["mismatched_keys"],
    )
    # Tied weights are one tensor; a file that has both must have them equal, else one is lost.
    head, embeddings = backbone.lm_head.weight, backbone.model.embed_tokens.weight
    if config.tie_word_embeddings and head is not embeddings and not torch.equal(head, embeddings):
        raise CheckpointError(
            f"{place}: config.json says that the output weights are the embeddings "
            "(tie_word_embeddings): expected none in the file, got others"
        )
    return backbone.eval() if placed else backbone.eval().to(device)
