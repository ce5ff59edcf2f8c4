"""Forwards of a decoding engine through `torch.compile`: the same arithmetic without what it costs
to call it operator by operator from Python.

Attention and the cache stay outside the graph, behind the operator ``d2f::attend``, as vLLM does:
it writes a layer's new keys and values to their slots and attends over the plan of the forward that
is running. So one graph serves every number of rows, every batch and every cache; a single row,
which `torch.compile` always specialises, has a graph of its own. On an x86 CPU the linear layers
are packed (`d2f.cpu.packed`), elsewhere those with one input are joined (`d2f.cpu.packed`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.cpu import can_attend, pays, write_and_attend
from d2f.cpu.packed import JoinedModel, MadeCode, PackedModel, Product, can_join, can_pack
from d2f.errors import CompileError
from triton_kernels.dispatch import VARIABLE


class _Running(threading.local):
    """The forward that a thread is running. native: whether C++ attends (`d2f.cpu`)."""

    cache: SlotCache
    plan: SpanPlan
    native: bool = False


_running = _Running()
_library = torch.library.Library("d2f", "FRAGMENT")
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer, float scale) -> Tensor")


def _attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    # Not arguments of the operator: the graph would be of this cache and this plan.
    if _running.native:
        cache, spans = _running.cache, _running.plan.spans[0]
        assert cache.slots is not None
        return write_and_attend(query, key, value, cache.slots, *cache.layers[layer], spans, scale)
    keys, values = _running.cache.update(key, value, layer)
    return _running.plan.attend(None, query, keys, values, scale).contiguous()


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    batch, heads, rows, dim = query.shape
    return value.new_empty((batch, rows, heads, dim))  # as `SpanPlan.attend` gives it


_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("d2f::attend", _attend_fake, lib=_library)


class _PlanOfTheForward(SpanPlan):
    """What the model is traced with in place of a plan: its `attend` puts the operator
    ``d2f::attend`` into the graph, which finds the real plan of the forward when it runs."""

    def __init__(self) -> None:
        """Without spans: they are not the graph's."""

    def attend(
        self,
        layer: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
    ) -> Tensor:
        assert layer is not None and scale is not None
        # Here, where it is fused with RoPE, which may run in fp32; behind the operator it would be
        # a pass of its own.
        query, key = query.to(value.dtype), key.to(value.dtype)
        out: Tensor = torch.ops.d2f.attend(query, key, value, layer.layer_idx, scale)
        return out


def _guards(guards: Sequence[Any]) -> list[bool]:
    """Which of its conditions a graph checks at a call: the shapes. The weights and the model's
    attributes do not change, and of the state of the process, its number of threads among it,
    nothing does that the graph depends on."""
    kept = torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)
    pairs = zip(kept, guards, strict=True)
    return [keep and guard.guard_type != "GLOBAL_STATE" for keep, guard in pairs]


def _with_products(backbone: PreTrainedModel) -> PackedModel | None:
    """The model with layers packed or joined to products, None where they can be neither."""
    if can_pack(backbone):
        return PackedModel(backbone)
    return JoinedModel(backbone) if can_join(backbone) else None


def _can_attend(backbone: PreTrainedModel, new_cache: Callable[[int], SlotCache]) -> bool:
    """Whether C++ may compute the attention of this model here."""
    key = new_cache(1).layers[0][0]  # [1, H_kv, 1, D]
    fits = key.device.type == "cpu" and key.dtype == backbone.dtype == torch.float32
    return fits and os.environ.get(VARIABLE) != "0" and can_attend(key.shape[-1])


class CompiledRows:
    """The hidden states of flat rows, compiled at once; takes some seconds.

    Raises CompileError where `torch.compile` cannot, on a CPU mostly for want of a C++ compiler.
    """

    def __init__(self, backbone: PreTrainedModel, new_cache: Callable[[int], SlotCache]):
        plan = _PlanOfTheForward()
        packed = self.packed = _with_products(backbone)
        model = backbone.model if packed is None else packed.model
        self.code = MadeCode(packed.products) if type(packed) is PackedModel else None

        def hidden(tokens: Tensor, positions: Tensor) -> Tensor:
            out: Tensor = model(
                input_ids=tokens, position_ids=positions, spans=plan, use_cache=False
            ).last_hidden_state
            if packed is not None:
                packed.forget()
            return out

        self._native = _can_attend(backbone, new_cache)
        # Graphs are kept by code object, a few to each: this model's are its own.
        hidden.__code__ = hidden.__code__.replace()
        # With any number of threads, as the engine sets them.
        options: dict[str, Any] = {"guard_filter_fn": _guards, "cpp.dynamic_threads": True}
        self._run = torch.compile(hidden, dynamic=True, fullgraph=True, options=options)
        try:
            # One row has a graph of its own; the second number of rows makes them symbolic in the
            # other graph, and the third shows that it serves any.
            for rows in (1, 3, 2):
                self._try(rows, new_cache(rows), backbone.device)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise CompileError(
                "the model cannot be compiled; on a CPU torch.compile needs a C++ compiler "
                f"(g++ or clang++): {reason}"
            ) from error

    def __call__(
        self, tokens: Tensor, positions: Tensor, plan: SpanPlan, cache: SlotCache
    ) -> Tensor:
        """Last hidden states ``[T, C]`` of rows ``[T]`` fed through the cache."""
        _running.cache, _running.plan = cache, plan  # what `d2f::attend` finds inside the graph
        _running.native = self._native and pays(plan.spans[0], len(plan.segments or [None]))
        try:
            out: Tensor = self._run(tokens[None], positions[None])[0]
        finally:
            del _running.cache, _running.plan, _running.native
        return out

    @property
    def products(self) -> list[Product]:
        """Of the linear layers that are computed together; none where they are as they were."""
        return [] if self.packed is None else self.packed.products

    def _try(self, rows: int, cache: SlotCache, device: torch.device) -> None:
        with torch.inference_mode():  # tensors made outside would need graphs of their own
            places = torch.arange(rows, device=device)
            cache.slots = places
            spans = torch.tensor([[[0, rows]]] * rows, dtype=torch.int32, device=device)
            self(torch.zeros_like(places), places, SpanPlan(spans), cache)
