"""What the references share: forwards of whole sequences under dense masks, and predictions from
their logits by what the engine takes them with."""

from __future__ import annotations

import torch
from torch import Tensor

from d2f.attention import SpanPlan
from d2f.contract import Contract
from d2f.errors import NonFiniteLogitsError
from d2f.model import DiffusionModel
from decode.decoders import Decoder
from decode.decoders.autoregressive import Autoregressive
from decode.decoders.session import SDAR_BLOCK_SIZE
from decode.engine.batch import PredictionRequest, Sampler, split, table_of, wanted_of
from decode.step import Predictions


class DensePlan(SpanPlan):
    """Attention under a mask ``[rows, keys]`` or ``[B, rows, keys]`` that was written out."""

    def __init__(self, allowed: Tensor):
        super().__init__(torch.zeros(allowed.shape[-2], 1, 2, dtype=torch.int32))
        self.allowed = allowed if allowed.dim() == 3 else allowed[None]

    def mask(self, keys: int) -> Tensor:
        return self.allowed


def dense_logits(
    model: DiffusionModel, tokens: list[int], allowed: Tensor, positions: list[int] | None = None
) -> Tensor:
    """Logits ``[L, V]`` of tokens under a boolean mask ``[L, L]``; without positions, in order."""
    at = None if positions is None else torch.tensor([positions])
    with torch.inference_mode():
        return model.forward(torch.tensor([tokens]), DensePlan(allowed), positions=at)[0]


def allowed_pairs(contract: Contract, prompt_length: int, length: int) -> Tensor:
    """Which query sees which key, ``[length, length]``, under the mask of the model's training."""
    if contract.objective == "d2f" and contract.block_size:
        size = contract.block_size  # the prompt is block 0
        block = [0 if p < prompt_length else 1 + (p - prompt_length) // size for p in range(length)]
    elif contract.prompt_rule == "block_causal":
        block = [p // (contract.block_size or SDAR_BLOCK_SIZE) for p in range(length)]
    else:
        block = [0] * length
    return seen_blocks(block)


def seen_blocks(block: list[int]) -> Tensor:
    """Mask ``[L, L]`` of positions in numbered blocks: each sees its own and those before."""
    of = torch.tensor(block)
    return of[:, None] >= of[None, :]


def choosing(
    temperature: float = 0.0, top_p: float = 1.0, top_k: int | None = None, seed: int = 0
) -> Decoder:
    """Make a decoder of which only the choice of tokens matters."""
    return Autoregressive(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


def predict(logits: Tensor, groups: list[PredictionRequest], forward: int) -> list[Predictions]:
    """Predictions of each group from logits ``[N, V]`` of one model, rows group after group.

    Raises NonFiniteLogitsError that names the forward.
    """
    found = []
    table = table_of(logits, wanted_of(groups)).cpu().numpy()
    for group, predictions in zip(groups, split(table, groups), strict=True):
        group.sampler.took(group.rows, whole=True)
        if predictions is None:
            raise NonFiniteLogitsError(
                f"the model gave NaN or infinite logits at forward {forward}"
            )
        found.append(predictions)
    return found


def scored(rows: Tensor, sampler: Sampler) -> Predictions:
    """All that may be asked of the logits ``[N, V]`` of wanted rows."""
    return predict(rows, [PredictionRequest(sampler, len(rows), uncertainty=True)], forward=0)[0]
