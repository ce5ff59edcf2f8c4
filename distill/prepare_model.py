"""The model that a run begins with, and what of it cannot be trained as the configuration asks."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch

import d2f
from d2f.adapters import attach, new_lora
from d2f.build_model import build, convert
from d2f.errors import InputError
from d2f.hub import folder_of
from d2f.load_tokenizer import load_tokenizer
from d2f.model import DiffusionModel
from d2f.models import resolve
from d2f.quantize import keep_differentiable
from d2f.save_official import check_official
from d2f.tasks import DEFAULT_TASKS, TASKS
from d2f.tasks.tokenizer import train_tokenizer
from distill.config import TrainConfig
from distill.config_sections import Lora
from distill.objectives import OBJECTIVES


def prepare_model(
    config: TrainConfig,
    device: torch.device | str = "cpu",
    *,
    base_dtype: torch.dtype | None = None,
) -> DiffusionModel:
    """The model to train, with a LoRA where the objective trains one. What is trained is in fp32.

    device: ``meta`` gives shapes without weights; a 4-bit base is loaded onto it. base_dtype: of
    the base, which is not quantised then, whatever the configuration says.
    Raises InputError where objective, family and model do not go together.
    """
    # Every process draws the same new weights and the same LoRA.
    torch.manual_seed(config.seed)
    device = torch.device(device)
    place = device if device.type == "meta" else contextlib.nullcontext()
    if config.init is not None:
        dtype = base_dtype or getattr(torch, config.base_dtype)
        quantized = config.quantize == "4bit" and not base_dtype and device.type != "meta"
        quantize = "nf4" if quantized else None
        model = d2f.load(config.init, dtype=dtype, device=device, quantize=quantize)
        if model.adapter is not None:
            raise InputError(
                f"init {config.init} is an adapter of {model.contract.base or model.path}: "
                "expected its base as init, and it as init_adapter"
            )
        if quantize:
            keep_differentiable(model.backbone)
        with place:
            family = config.family or model.family
            model = convert(model, family, drop_biases=config.drop_biases)
    else:
        assert config.model is not None and config.family is not None
        if config.tokenizer is None:
            named = config.data.tasks or {}
            tasks = [task for task in TASKS if task in DEFAULT_TASKS or task in named]
            tokenizer: Any = train_tokenizer(1024, tasks=tasks)
        else:
            folder = folder_of(resolve(config.tokenizer), weights=False)
            tokenizer = load_tokenizer(str(folder))
            if tokenizer is None:
                raise InputError(f"tokenizer {config.tokenizer}: expected a tokenizer, found none")
        with place:
            model = build(config.family, tokenizer, **config.model.model_dump())
    # Before an adapter is attached: a wrong family is told as such, not as weights that do not fit.
    check_fits(model, config)
    if config.trains_adapter:
        # Before the adapter is put in, whose own parameters then are the only ones that are
        # trained.
        model.backbone.requires_grad_(False)
        lora = config.lora
        if config.init_adapter is not None:
            with warnings.catch_warnings():  # on meta: for each tensor that it is not copied
                warnings.filterwarnings("ignore", message=".*to a meta parameter")
                # The default says nothing about an adapter that is there: it keeps its own layers.
                targets = lora.targets if lora.targets != Lora().targets else ()
                attach(model, resolve(config.init_adapter), trainable=True, targets=targets)
        else:
            with place:
                new_lora(model, **lora.model_dump())
    if config.gradient_checkpointing:
        _recompute(model.backbone)
    return model


def _recompute(backbone: Any) -> None:
    """Turn gradient checkpointing on, by the name that this transformers has for it."""
    # The reentrant kind needs an input with a gradient, which a frozen embedding does not give.
    settings = {"use_reentrant": False}
    if hasattr(backbone, "activation_checkpointing_enable"):
        backbone.activation_checkpointing_enable(settings)
    else:  # an older transformers
        backbone.gradient_checkpointing_enable(settings)


def check_fits(model: DiffusionModel, config: TrainConfig) -> None:
    """Raise InputError where objective, family and model do not go together."""
    if model.tokenizer is None:
        raise InputError(f"{config.init}: training needs a tokenizer, the checkpoint has none")
    OBJECTIVES[config.objective].check_model(model, config)
    if config.export_official:
        check_official(model)
