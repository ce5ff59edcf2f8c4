"""What a user should know of a model and a decoder before they run."""

from __future__ import annotations

from weakref import WeakSet

from d2f.model import DiffusionModel
from decode.decoders import D2F, Decoder

_told: WeakSet[DiffusionModel] = WeakSet()


def foreign_mask(model: DiffusionModel, decoder: Decoder) -> str | None:
    """That the pipeline's mask is foreign to the model, the first time that it is so; None where it
    is not. An official adapter, which does not say what trained it, is taken at its word."""
    objective = model.contract.objective
    if not isinstance(decoder, D2F) or objective == "d2f" or model in _told:
        return None
    if objective is None and model.is_adapted:
        return None
    _told.add(model)
    return (
        f"{model.path or 'the model'} was not trained by D2F (its objective: "
        f"{objective or 'unknown'}): the pipeline's block-causal mask is foreign to it; expect "
        "lower accuracy"
    )
