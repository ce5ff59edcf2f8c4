"""A model that is served, and which decoders a request may ask for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from d2f.contract import Contract
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.commands.decoder_settings import DecoderSettings, option_names
from decode.decoders import DECODERS, Decoder, default_decoder, find_decoder, spelled
from decode.decoders.base import common_options
from decode.engine.async_engine import AsyncEngine

Kind = type[Decoder]
SHARED = (*common_options(), "max_new_tokens", "stop")  # options of every decoder


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One model with its engine.

    default: the decoder of a request that names none. decoders: those that it may name. given: the
    operator's options; those that not every decoder has hold for the default one alone.
    context_length: most tokens of a prompt and its response together.
    """

    name: str
    model: DiffusionModel
    engine: AsyncEngine
    default: Kind
    decoders: Mapping[str, Kind]
    given: Mapping[str, Any]
    context_length: int
    created: int = field(default_factory=lambda: int(time.time()))

    def options(self, kind: Kind) -> dict[str, Any]:
        """The operator's options of a decoder."""
        names = option_names(kind) if kind is self.default else SHARED
        return {name: value for name, value in self.given.items() if name in names}


def choose_default(contract: Contract, settings: DecoderSettings) -> Kind:
    """The decoder that the operator named, where it decodes models like this one, else the one
    that such a model has by default."""
    if settings.name is not None:
        kind = find_decoder(settings.name)
        if fits(kind, contract):
            return kind
    return default_decoder(contract)


def fits(kind: Kind, contract: Contract) -> bool:
    """Whether a decoder decodes models of that contract."""
    try:
        kind(**kind.completed({}, contract)).check(contract)
    except InputError:
        return False
    return True


def fitting(contract: Contract, default: Kind, allowed: Sequence[str] | None) -> dict[str, Kind]:
    """The decoders that requests may name, those that fit the model: of all in this package, or of
    the allowed ones; the default one is always among them."""
    kinds = DECODERS.values() if allowed is None else [find_decoder(name) for name in allowed]
    found = {spelled(kind): kind for kind in kinds if fits(kind, contract)}
    return {spelled(default): default, **found}


def check_settings(models: Sequence[DiffusionModel], settings: DecoderSettings) -> None:
    """Raise InputError where no model would be decoded with what the operator says."""
    kinds = [choose_default(model.contract, settings) for model in models]
    if settings.name is not None and find_decoder(settings.name) not in kinds:
        raise InputError(f"the decoder {settings.name} fits none of the models")
    own = [name for name in settings.given if name not in SHARED]
    if own and not any(set(own) <= set(option_names(kind)) for kind in kinds):
        raise InputError(
            f"none of the models is decoded by default with the options {', '.join(own)}: expected "
            "some of one decoder, named by --decoder"
        )


def serve_model(
    name: str,
    model: DiffusionModel,
    engine: AsyncEngine,
    settings: DecoderSettings | None = None,
    *,
    allowed: Sequence[str] | None = None,
    max_model_len: int | None = None,
) -> ServedModel:
    """A model under a name, with the operator's decoder settings. allowed: names of the decoders
    that requests may ask for, None for all that fit. Raises InputError."""
    settings = settings or DecoderSettings(None, {})
    default = choose_default(model.contract, settings)
    served = ServedModel(
        name,
        model,
        engine,
        default,
        fitting(model.contract, default, allowed),
        settings.given,
        min(model.context_length, max_model_len or model.context_length),
    )
    default(**default.completed(served.options(default), model.contract)).check(model.contract)
    return served
