"""Predictions of whole groups at once, by what the engine takes them with."""

from __future__ import annotations

from torch import Tensor

from d2f.errors import NonFiniteLogitsError
from decode.decoders import Decoder
from decode.decoders.autoregressive import Autoregressive
from decode.engine.batch import PredictionRequest, split, table_of, wanted_of
from decode.step import Predictions


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
