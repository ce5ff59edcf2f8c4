"""What a user should know of a model and a decoder before they run."""

from __future__ import annotations

from weakref import WeakSet

from d2f.model import DiffusionModel
from decode.decoders import Decoder

_told: WeakSet[DiffusionModel] = WeakSet()


def doubt_of(model: DiffusionModel, decoder: Decoder) -> str | None:
    """Why the decoder may decode the model badly, the first time that it is asked; None where it
    should not. An official adapter, which does not say what trained it, is taken at its word."""
    doubt = decoder.doubt(model.contract)
    if doubt is None or model in _told:
        return None
    if model.contract.objective is None and model.is_adapted:
        return None
    _told.add(model)
    return f"{model.path or 'the model'} {doubt}"
