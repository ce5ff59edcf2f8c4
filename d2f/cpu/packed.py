"""Linear layers as oneDNN's kernels want them: weights laid out once in the order in which they are
read, and layers with one input joined to one product.

PyTorch's own fp32 product on a CPU takes the weights as they lie, at every call, which the few rows
of a decoding step do not pay for. The packed weights are a second copy.

For each number of rows and of threads that oneDNN has not met it makes code for each layer's shape,
which takes a small model as long as some forwards, and it keeps that of the last 1,024 (its
environment variable ONEDNN_PRIMITIVE_CACHE_CAPACITY). Forwards of a decoder have any number of
rows; so above 32 not every number is multiplied, but the next one of 16 an octave, up to a
sixteenth more. And `MadeCode` makes it before the forward: no forward's measured time has it. Where
it takes longer to make than to run, of a small model, it is made before there is any forward.
"""

from __future__ import annotations

import copy
import itertools
import platform
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

USUAL = 512  # rows up to which code is made beforehand
SMALL = 2 << 20  # weights of the different shapes together, up to which it is
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # read one input


@dataclass(frozen=True)
class _Weights:
    weight: Tensor  # in oneDNN's layout
    bias: Tensor | None
    outputs: int


_weights: dict[int, _Weights] = {}  # by handle: a graph cannot take a tensor of that layout
_handles = itertools.count()
_library = torch.library.Library("d2f", "FRAGMENT")
_library.define("packed_linear(Tensor x, int handle) -> Tensor")


def multiplied_rows(rows: int) -> int:
    """The rows of a product that is to have `rows`: behind those that are asked for lie zeros."""
    step = 1 << max(0, (rows - 1).bit_length() - 5)
    return -(-rows // step) * step


def _linear(x: Tensor, handle: int) -> Tensor:
    w, rows = _weights[handle], x.shape[:-1].numel()
    more = multiplied_rows(rows) - rows
    given = F.pad(x.reshape(rows, -1), (0, 0, 0, more)) if more else x
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(
        given, w.weight, w.bias, "none", [], ""
    )
    return out[:rows].view(*x.shape[:-1], -1) if more else out


def _linear_fake(x: Tensor, handle: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], _weights[handle].outputs))  # [..., outputs of all parts]


_library.impl("packed_linear", _linear, "CPU")
torch.library.register_fake("d2f::packed_linear", _linear_fake, lib=_library)


def can_pack(backbone: PreTrainedModel) -> bool:
    """Whether the model's layers can be packed here: fp32 on an x86 CPU, not quantised."""
    return (
        getattr(backbone, "quantized", None) is None
        and backbone.device.type == "cpu"
        and backbone.dtype == torch.float32
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedModel:
    """The same model with its layers packed, for `torch.compile`; all other weights are shared."""

    def __init__(self, backbone: PreTrainedModel):
        # deepcopy's memo: what is in it already is not copied, so the twin shares every tensor.
        shared = itertools.chain(backbone.parameters(), backbone.buffers())
        twin = copy.deepcopy(backbone, {id(tensor): tensor for tensor in shared})
        self.model: nn.Module = twin.model
        self.products: list[Product] = []
        for module in list(self.model.modules()):
            layers = {n: m for n, m in module.named_children() if isinstance(m, nn.Linear)}
            for names in _JOINED:
                if all(name in layers for name in names):
                    self._replace(module, {name: layers.pop(name) for name in names})
            for name, layer in layers.items():
                self._replace(module, {name: layer})

    def _replace(self, module: nn.Module, layers: dict[str, nn.Linear]) -> None:
        product = Product(list(layers.values()))
        self.products.append(product)
        for i, name in enumerate(layers):
            setattr(module, name, _Part(product, i))

    def forget(self) -> None:
        """Let go of the last forward's products, which would be held until the next one."""
        for product in self.products:
            product.forget()


class Product:
    """Layers that read one input, as one product. The first of them that is called computes it for
    all; the others take their columns of it::

        [T, C] @ q_proj k_proj v_proj  =  [T, q | k | v]    split into the three layers' outputs
    """

    def __init__(self, layers: list[nn.Linear]):
        weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        layout = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.handle = next(_handles)
        self.outputs = [layer.out_features for layer in layers]
        _weights[self.handle] = _Weights(layout, torch.cat(biases) if biases else None, len(weight))
        # The table would keep the second copy of the weights after the model is gone.
        weakref.finalize(self, _weights.pop, self.handle)
        self.x: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

        self.inputs = weight.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None]:
        """The weight in oneDNN's layout and the bias, of all layers."""
        return _weights[self.handle].weight, _weights[self.handle].bias

    def __call__(self, x: Tensor) -> Tensor:
        """All layers' outputs ``[..., sum of outputs]`` of x ``[..., inputs]``."""
        out: Tensor = torch.ops.d2f.packed_linear(x, self.handle)
        return out

    def part(self, x: Tensor, i: int) -> Tensor:
        if self.x is not x:  # q_proj, k_proj and v_proj are called with the very same tensor
            self.x = x
            self.parts = self(x).split(self.outputs, -1)
        return self.parts[i]

    def forget(self) -> None:
        self.x, self.parts = None, ()


class MadeCode:
    """The code that oneDNN has made for these products."""

    def __init__(self, products: Sequence[Product]):
        by_shape = {(p.inputs, sum(p.outputs), p.tensors[1] is None): p for p in products}
        self._products = list(by_shape.values())
        self._made: set[tuple[int, int]] = set()  # numbers of rows and of threads

    def make_usual(self) -> None:
        """That of all usual numbers of rows, of a small model: its first requests would wait for
        code at nearly every forward."""
        if sum(product.inputs * sum(product.outputs) for product in self._products) <= SMALL:
            for rows in sorted({multiplied_rows(rows) for rows in range(1, USUAL + 1)}):
                self.make(rows)

    @torch.inference_mode()
    def make(self, rows: int) -> None:
        """That of forwards of so many rows with torch's present number of threads."""
        place = multiplied_rows(rows), torch.get_num_threads()
        if place not in self._made:
            for product in self._products:
                product(torch.zeros(rows, product.inputs))
            self._made.add(place)


class _Part(nn.Module):
    """Stands where one of a product's layers stood."""

    def __init__(self, product: Product, i: int):
        super().__init__()
        self.product, self.i = product, i

    def forward(self, x: Tensor) -> Tensor:
        return self.product.part(x, self.i)


# Linear layers with one input as one product, for a device that pays for each launch: q, k and v,
# gate and up. Their weights become views of the joined one, so that nothing is held twice, and what
# reads or changes them (saving, merging) finds them where they were::
#
#     q_proj.weight [Q, C]  k_proj.weight [K, C]  v_proj.weight [K, C]
#     one weight [Q + 2 K, C], of which they are the rows 0 to Q, Q to Q + K, and the rest


def can_join(backbone: PreTrainedModel) -> bool:
    """Whether the model's weights can be rows of one: plain tensors, neither quantised nor a part
    of a process's (tensor parallel)."""
    return getattr(backbone, "quantized", None) is None and all(
        type(weight.data) is Tensor for weight in backbone.parameters()
    )


class JoinedModel(PackedModel):
    """The same model with such layers joined, for `torch.compile`; it shares all weights."""

    def _replace(self, module: nn.Module, layers: dict[str, nn.Linear]) -> None:
        if len(layers) > 1:
            product = _Joined(list(layers.values()))
            self.products.append(product)
            for i, name in enumerate(layers):
                setattr(module, name, _Part(product, i))


class _Joined(Product):
    """Layers that read one input, by their joined weight; the layers keep views of it."""

    def __init__(self, layers: list[nn.Linear]):
        self.outputs = [layer.out_features for layer in layers]
        self.weight = _join([layer.weight for layer in layers])  # [outputs of all, inputs]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = _join(biases) if biases else None
        self.forget()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _join(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters one below the other, of which they are views from here on."""
    whole = torch.cat([parameter.data for parameter in parameters])
    parts = whole.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole
