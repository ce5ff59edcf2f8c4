"""Small random models for the tests: quick to build, with confidences spread over (0, 1)."""

from __future__ import annotations

from functools import cache

import torch
from transformers import PreTrainedTokenizerFast

from d2f.build_model import build
from d2f.model import DiffusionModel
from d2f.tasks.tokenizer import train_tokenizer


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(300)


@cache
def random_model(family: str, seed: int = 0) -> DiffusionModel:
    """Two layers, four heads over two key heads; shared between tests, so never to be changed."""
    return fresh_model(family, seed)


def fresh_model(family: str, seed: int = 0) -> DiffusionModel:
    """The same, for a test that changes it."""
    torch.manual_seed(seed)
    model = build(
        family,
        tokenizer(),
        hidden_size=32,
        intermediate_size=64,
        layers=2,
        heads=4,
        kv_heads=2,
        context_length=256,
    )
    for parameter in model.backbone.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.backbone.eval()
    return model
