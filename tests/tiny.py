"""Small random models for the tests: quick to build, with confidences spread over (0, 1)."""

from __future__ import annotations

import hashlib
import tempfile
import threading
import weakref
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from d2f.convert import build
from d2f.model import DiffusionModel
from d2f.tasks import DEFAULT_TASKS, TASKS
from d2f.tasks.tokenizer import train_tokenizer


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(300)


@cache
def saved_tokenizer() -> str:
    """The folder of what a training from scratch makes for the default tasks, in half a second."""
    folder, names = tempfile.mkdtemp(), [name for name in TASKS if name in DEFAULT_TASKS]
    train_tokenizer(1024, tasks=names).save_pretrained(folder)
    return folder


_shared: list[tuple[str, DiffusionModel, str]] = []  # name, model, its state when it was built


@cache
def random_model(family: str, seed: int = 0) -> DiffusionModel:
    """Two layers, four heads over two key heads; shared between tests, so never to be changed."""
    model = fresh_model(family, seed)
    _shared.append((f"random_model({family!r}, {seed})", model, _state(model)))
    return model


def changed_models() -> list[str]:
    """Shared models that are not what they were built as, each named once."""
    changed = []
    for i, (name, model, state) in enumerate(_shared):
        now = _state(model)
        if now != state:
            changed.append(name)
            _shared[i] = (name, model, now)
    return changed


def _state(model: DiffusionModel) -> str:
    """A digest of all that decides what the model computes."""
    config = model.backbone.config
    parts = (
        model.contract,
        model.adapter,
        model.compiled_rows,
        config,
        config._attn_implementation,
    )
    digest = hashlib.sha256("".join(map(str, parts)).encode())
    for name, module in model.backbone.named_modules():
        digest.update(
            f"{name}{type(module).__name__}{module.training}{module._forward_hooks}".encode()
        )
    for named in (model.backbone.named_parameters(), model.backbone.named_buffers()):
        for name, tensor in named:
            digest.update(f"{name}{tensor.dtype}".encode())
            digest.update(tensor.detach().view(torch.uint8).numpy())
    return digest.hexdigest()


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


POISON = 7  # a token whose embedding is NaN, and which is never chosen


def poisoned_model() -> DiffusionModel:
    """A model whose rows are NaN where they see `POISON`."""
    model = fresh_model("llada")
    with torch.no_grad():
        model.backbone.model.embed_tokens.weight[POISON] = torch.nan

    def rule_out(module, inputs, logits):
        ruled = logits.clone()
        ruled[..., POISON] = -torch.inf
        return ruled

    model.backbone.lm_head.register_forward_hook(rule_out)
    return model


class Gate:
    """Hold a model's forwards until some, or all, are let through."""

    patience = 30.0  # seconds after which a forward goes on: a test that fails comes to its end

    def __init__(self, model: DiffusionModel):
        self._real = model.decode_rows
        self._passes = threading.Semaphore(0)
        self.error: Exception | None = None  # raised in place of a forward
        self.activations: weakref.ref | None = None  # what that forward had in memory
        model.decode_rows = self._forward  # type: ignore[method-assign]

    def _forward(self, *arguments: Any) -> Any:
        self._passes.acquire(timeout=self.patience)
        if self.error is not None:
            activations = torch.zeros(1)
            self.activations = weakref.ref(activations)
            raise self.error
        return self._real(*arguments)

    def let(self, forwards: int = 1) -> None:
        """Let some through."""
        self._passes.release(forwards)

    def open(self) -> None:
        """Let all through from now on."""
        self._passes.release(10**6)
