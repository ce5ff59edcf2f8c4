"""The decoder of a request: its own fields over the operator's options."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from d2f.errors import InputError, repr_of
from decode.decoders import Decoder
from decode.decoders.base import common_options
from decode.decoders.options import options_of
from decode.engine.likelihood import Likelihood
from decode.server.api_error import ApiError
from decode.server.fields import Asked
from decode.server.served_model import Kind, ServedModel


def choose_decoder(served: ServedModel, asked: Asked, most: int | None) -> Decoder:
    """The decoder that a request asks for, its seed that of the whole request. most: tokens of a
    response, where the request says it. Raises ApiError (400), which names the field."""
    kind = _kind(served, asked)
    values = _own_options(kind, asked)
    for name in common_options():
        value = getattr(asked, name)
        if name == "top_k" and value in (0, -1):  # vLLM's words for off
            values[name] = None
        elif value is not None:
            values[name] = value
    if asked.stops is not None:
        values["stop"] = asked.stops
    if most is not None:
        values["max_new_tokens"] = most
    for option in options_of(kind):
        if option.name in values:
            try:
                option.verify(values[option.name])
            except InputError as error:
                raise ApiError(400, str(error), param=option.name) from error
    values = served.options(kind) | values
    values.setdefault("seed", secrets.randbits(48))
    try:
        decoder = kind(**kind.completed(values, served.model.contract))
        decoder.check(served.model.contract)
    except InputError as error:  # options that do not go together
        raise ApiError(400, str(error), param="decoder") from error
    if decoder.sampling.greedy:
        decoder = replace(decoder, seed=0)
        if asked.n > 1:
            raise ApiError(
                400,
                f"n is {asked.n}, and greedy decoding gives the same answer each time: expected "
                "n 1, or a temperature above 0",
                param="n",
            )
    return decoder


def likelihood_of(served: ServedModel) -> Likelihood:
    """What reads the likelihoods of prompts. Raises ApiError (400) for a bidirectional model."""
    try:
        return Likelihood.of(served.model.contract)
    except InputError as error:
        raise ApiError(400, f"echo with logprobs: {error}", param="echo") from error


def _kind(served: ServedModel, asked: Asked) -> Kind:
    if asked.decoder is None:
        return served.default
    # Looked up and never imported: what a client names is no code to be run.
    kind = served.decoders.get(asked.decoder)
    if kind is None:
        raise ApiError(
            400,
            f"decoder must be one of {', '.join(served.decoders)} for the model {served.name}, got "
            f"{repr_of(asked.decoder)}",
            param="decoder",
            code="decoder_not_found",
        )
    return kind


def _own_options(kind: Kind, asked: Asked) -> dict[str, Any]:
    """The fields that are options of the decoder."""
    given = asked.model_extra or {}
    # max_tokens is what OpenAI calls the length.
    known = [option.name for option in options_of(kind) if option.name != "max_new_tokens"]
    for name in given:
        if name not in known:
            raise ApiError(
                400,
                f"there is no field {name}, and no such option of the decoder {kind.name}, which "
                f"has {', '.join(known)}",
                param=name,
                code="unknown_field",
            )
    return dict(given)
