"""Run a decoding engine's forwards through `torch.compile`: the same arithmetic without the cost of
calling it operator by operator from Python.

Attention and the cache stay outside the graph, behind the operator ``d2f::attend``, as in vLLM: it
writes a layer's new keys and values to their slots and attends over the plan of the running
forward. So one graph serves every number of rows, every batch and every cache; a single row, which
`torch.compile` always specialises, has a graph of its own. Linear layers with one input (q, k and
v; gate and up) become one product, for a device that pays for each launch.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.errors import CompileError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CompiledRows:
    """Compute logits of flat rows by a compiled model."""

    def __init__(self, backbone: PreTrainedModel, new_cache: Callable[[int], SlotCache]):
        """Compile at once, which takes some seconds. Raises CompileError where `torch.compile`
        cannot, on a CPU mostly for want of a C++ compiler."""
        plan, self._head = _TracedPlan(), backbone.lm_head
        model, self.products = joined(backbone)

        def hidden(tokens: Tensor, positions: Tensor) -> Tensor:
            out: Tensor = model(
                input_ids=tokens, position_ids=positions, spans=plan, use_cache=False
            ).last_hidden_state
            for product in self.products:
                product.forget()
            return out

        # torch keeps a few graphs for each code object: give this model one of its own.
        hidden.__code__ = hidden.__code__.replace()
        # Works with any number of threads, as the engine sets them.
        options: dict[str, Any] = {"guard_filter_fn": _guards, "cpp.dynamic_threads": True}
        self._run = torch.compile(hidden, dynamic=True, fullgraph=True, options=options)
        try:
            # A single row gets a graph of its own. The second count makes the number of rows
            # symbolic in the other graph, and the third shows that it serves any count.
            for rows in (1, 3, 2):
                self._try(rows, new_cache(rows), backbone.device)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise CompileError(
                "the model cannot be compiled; on a CPU torch.compile needs a C++ compiler "
                f"(g++ or clang++): {reason}"
            ) from error

    def __call__(
        self, tokens: Tensor, positions: Tensor, plan: SpanPlan, cache: SlotCache, read: Tensor
    ) -> Tensor:
        """Logits ``[N, V]`` of the rows `read` ``[N]`` of rows ``[T]`` fed through the cache."""
        _running.cache, _running.plan = cache, plan  # `d2f::attend` finds them inside the graph
        try:
            hidden = self._run(tokens[None], positions[None])[0]
        finally:
            del _running.cache, _running.plan
        logits: Tensor = self._head(hidden.index_select(0, read))
        return logits

    def _try(self, rows: int, cache: SlotCache, device: torch.device) -> None:
        with torch.inference_mode():  # tensors made outside would need graphs of their own
            places = torch.arange(rows, device=device)
            cache.slots = places
            spans = torch.tensor([[[0, rows]]] * rows, dtype=torch.int32, device=device)
            self(torch.zeros_like(places), places, SpanPlan(spans), cache, places)


def _guards(guards: Sequence[Any]) -> list[bool]:
    """Keep a graph's conditions on shapes. Weights and the model's attributes do not change, and no
    state of the process that does (such as the number of threads) matters to the graph."""
    kept = torch.compiler.skip_guard_on_all_nn_modules_unsafe(guards)
    pairs = zip(kept, guards, strict=True)
    return [keep and guard.guard_type != "GLOBAL_STATE" for keep, guard in pairs]


class _Running(threading.local):
    """Hold the forward that a thread is running."""

    cache: SlotCache
    plan: SpanPlan


_running = _Running()
_library = torch.library.Library("d2f", "FRAGMENT")
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer, float scale) -> Tensor")


def _attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    # Cache and plan are not arguments of the operator: the graph would be bound to them.
    keys, values = _running.cache.update(key, value, layer)
    return _running.plan.attend(None, query, keys, values, scale).contiguous()


def _attend_fake(query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
    batch, heads, rows, dim = query.shape
    return value.new_empty((batch, rows, heads, dim))  # as `SpanPlan.attend` returns it


_library.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("d2f::attend", _attend_fake, lib=_library)


class _TracedPlan(SpanPlan):
    """Stand for the plan while the model is traced: put ``d2f::attend`` into the graph."""

    def __init__(self) -> None:
        """Have no spans: they are not the graph's."""

    def attend(
        self,
        layer: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
    ) -> Tensor:
        assert layer is not None and scale is not None
        # Here it is fused with RoPE, which may run in fp32; behind the operator it would be a pass
        # of its own.
        query, key = query.to(value.dtype), key.to(value.dtype)
        out: Tensor = torch.ops.d2f.attend(query, key, value, layer.layer_idx, scale)
        return out


_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def joined(backbone: PreTrainedModel) -> tuple[nn.Module, list[Product]]:
    """Return the model without its head with layers of one input joined, and the joined ones; as it
    is where weights cannot be rows of one, because they are quantised or in parts.

    The weights become views of the joined one, so nothing is held twice, and whatever reads or
    changes them (saving, merging) finds them where they were::

        q_proj.weight [Q, C]  k_proj.weight [K, C]  v_proj.weight [K, C]
        one weight [Q + 2 K, C], of which they are the rows 0 to Q, Q to Q + K, and the rest
    """
    products: list[Product] = []
    plain = all(type(weight.data) is Tensor for weight in backbone.parameters())
    if not plain or getattr(backbone, "quantized", None):
        return backbone.model, products
    # deepcopy does not copy what its memo has: the twin shares every tensor.
    shared = itertools.chain(backbone.parameters(), backbone.buffers())
    twin = copy.deepcopy(backbone.model, {id(tensor): tensor for tensor in shared})
    for module in list(twin.modules()):
        layers = {n: m for n, m in module.named_children() if isinstance(m, nn.Linear)}
        for names in _ONE_INPUT:
            if all(name in layers for name in names):
                product = Product([layers[name] for name in names])
                products.append(product)
                for i, name in enumerate(names):
                    setattr(module, name, _Part(product, i))
    return twin, products


class Product:
    """Layers with one input as one product. The first that is called computes it for all; the
    others take their columns of it::

        [T, C] @ q_proj k_proj v_proj  =  [T, q | k | v]    split into the three layers' outputs
    """

    def __init__(self, layers: list[nn.Linear]):
        self.inputs = layers[0].in_features
        self.outputs = [layer.out_features for layer in layers]
        self.weight = _join([layer.weight for layer in layers])  # [outputs of all, inputs]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = _join(biases) if biases else None
        self.x: Tensor | None = None  # the last input, and its outputs of each layer
        self.parts: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute all layers' outputs ``[..., sum of outputs]`` of x ``[..., inputs]``."""
        return F.linear(x, self.weight, self.bias)

    def part(self, x: Tensor, i: int) -> Tensor:
        if self.x is not x:  # q_proj, k_proj and v_proj are called with the very same tensor
            self.x = x
            self.parts = self(x).split(self.outputs, -1)
        return self.parts[i]

    def forget(self) -> None:
        """Release the last forward's outputs, which would be held until the next one."""
        self.x, self.parts = None, ()


class _Part(nn.Module):
    """Take the place of one of a product's layers."""

    def __init__(self, product: Product, i: int):
        super().__init__()
        self.product, self.i = product, i

    def forward(self, x: Tensor) -> Tensor:
        return self.product.part(x, self.i)


def _join(parameters: Sequence[Tensor]) -> Tensor:
    """Concatenate the parameters and make each a view of the whole."""
    whole = torch.cat([parameter.data for parameter in parameters])
    parts = whole.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole
