"""Loading the model of a run, and the identity of its weights."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import d2f
from d2f.contract import Contract
from d2f.device import parse_device, parse_dtype, parse_threads
from d2f.errors import InputError
from d2f.hub import base_of_adapter, folder_of
from d2f.model import DiffusionModel
from d2f.models import names, resolve
from d2f.quantize import check_quantize, slowness
from d2f.tensor_parallel import check_parallel, own_part
from decode.commands.run_command import say


def check_options(options: argparse.Namespace) -> None:
    """Raise InputError for a model, dtype, device or quantisation that cannot be; nothing is loaded
    for it."""
    name = options.model
    owner, *rest = name.split("/")
    is_hub_name = len(rest) == 1 and rest[0] and owner not in ("", ".", "..", "~")
    if not os.path.isdir(resolve(name)) and not is_hub_name:
        raise InputError(
            f"--model {name}: no such folder, no bundled model ({', '.join(names()) or 'none'}), "
            "and no hub name, which is owner/name"
        )
    if options.dtype is not None:
        # Only whether it is a dtype at all; the device is not known to work yet.
        parse_dtype(options.dtype, torch.device("cpu"))
    try:
        parse_threads(options.threads)
    except InputError as error:
        raise InputError(f"--{error}") from error
    if options.address is not None:
        return  # its machines may have other devices than this one
    try:
        device = parse_device(options.device)
    except InputError as error:
        raise InputError(f"--{error}") from error
    if options.tensor_parallel > 1:
        check_parallel(options.tensor_parallel, device)
    if device.type == "meta":
        raise InputError("--device meta: no such device here: it holds shapes and no weights")
    if options.quantize is not None:
        try:
            check_quantize(options.quantize, device, parse_dtype(options.dtype, device))
        except InputError as error:
            raise InputError(f"--{error}") from error


def outline(
    name: str,
    adapter: str | None = None,
    family: str | None = None,
    tensor_parallel: int = 1,
) -> DiffusionModel:
    """A model without its weights, which are neither read nor fetched: contract (the adapter's
    where it has one), tokenizer, context. What a decoder and prompts are checked against before
    the weights are loaded. Raises InputError."""
    name = resolve(name)
    base = base_of_adapter(str(folder_of(name, weights=False)))
    if base is not None and adapter is None:
        name, adapter = base, name  # an adapter alone, on the base that it names
    model = d2f.load(name, family=family, device="meta", tensor_parallel=tensor_parallel)
    if adapter is not None:
        contract = Contract.load(folder_of(resolve(adapter), weights=False))
        model.contract = contract or model.contract
    return model


def load(options: argparse.Namespace) -> tuple[DiffusionModel, str]:
    """The model that the options name, its adapter merged and compiled if asked, and the hash of
    the weights before that (of quantised ones, after merging). Raises InputError."""
    model = d2f.load(
        options.model,
        adapter=options.adapter,
        family=options.family,
        dtype=options.dtype,
        device=options.device,
        quantize=options.quantize,
        progress=options.verbose,
        tensor_parallel=options.tensor_parallel,
        threads=options.threads,
    )
    if options.quantize is not None and (slow := slowness(options.quantize, model.device)):
        say(f"notice: {slow}")
    if model.is_adapted and options.adapter is None:
        options.adapter = options.model  # an adapter alone, on the base that it names
    # Before merging and compiling: with or without them it is the same identity.
    identity = weights_hash(model)
    if options.merge:
        model.merge_adapter()
    if options.compile:
        model.compile()
    return model, identity


def weights_hash(model: DiffusionModel) -> str:
    """Identity of loaded weights, adapter included: a hash over the name, shape and first, middle
    and last row of every tensor, or of the parts of them that this process has."""
    digest = hashlib.sha256()
    own = {name: own_part(tensor) for name, tensor in model.backbone.state_dict().items()}
    for name, tensor in sorted(stored_tensors(own)):
        rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim else tensor.reshape(1, 1)
        # Three rows of each tensor: all weights of an 8B model are gigabytes to hash.
        sample = rows[[0, len(rows) // 2, -1]].cpu().contiguous()  # [3, columns]
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def stored_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor; for a quantised weight those that it is made of, values and scales."""
    for name, tensor in tensors.items():
        if is_traceable_wrapper_subclass(tensor):
            parts, _ = tensor.__tensor_flatten__()
            yield from ((f"{name}.{part}", getattr(tensor, part)) for part in parts)
        else:
            yield name, tensor
