"""The last decoder layer of a training step, computed only as far as the loss reads it.

Its keys and values come from all places; behind its attention nothing but the places that the loss
reads is of use: about a third of a step's, and of the layer mostly the MLP::

    hidden [R, L, C] -> norm, attention, sum -> index [1, N, C] -> norm, MLP, sum -> [1, N, C]

By its operations that is about a tenth of a step of four layers and a hundredth of one of 32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from distill.objectives.training_plan import TrainingPlan


def read_rows_only(backbone: PreTrainedModel) -> None:
    """Have the last layer, and the norm behind it, compute what a `TrainingPlan` says is read;
    forwards under any other plan stay as they are. In place; a second call changes nothing."""
    layer: Any = backbone.model.layers[-1]
    # As FSDP does: a class of its own, with the layer's weights and names.
    layer.__class__ = _reading(layer.__class__)


@cache
def _reading(kind: Any) -> Any:
    """The class of a last layer, for layers of Llama's structure (Qwen2's and Qwen3's too)."""
    if getattr(kind, "reads", False):
        return kind

    class Reading(kind):
        reads = True

        def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
            plan = given.get("spans")
            if not isinstance(plan, TrainingPlan):
                out: Tensor = super().forward(hidden_states, **given)
                return out
            normed = self.input_layernorm(hidden_states)
            attended, _ = self.self_attn(hidden_states=normed, **given)
            read = (hidden_states + attended).flatten(0, 1).index_select(0, plan.read)[None]
            return read + self.mlp(self.post_attention_layernorm(read))

    Reading.__name__ = kind.__name__  # by which FSDP finds the layers
    return Reading
