"""Linear layers with one input as one product, for a device that pays for each launch: q, k and v,
gate and up. Their weights become views of the joined one, so that nothing is held twice, and what
reads or changes them (saving, merging) finds them where they were::

    q_proj.weight [Q, C]  k_proj.weight [K, C]  v_proj.weight [K, C]
    one weight [Q + 2 K, C], of which they are the rows 0 to Q, Q to Q + K, and the rest
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from d2f.packed import PackedModel, Product, _Part


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
