"""Which decoder a run uses and with which options: the command line over a YAML file."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from d2f.configuration import read_mapping
from d2f.contract import Contract
from d2f.errors import InputError, one_line
from d2f.model import DiffusionModel
from d2f.validation import refuse_another_kind, shown
from decode.decoders import D2F, DECODERS, Autoregressive, Block, Decoder, Threshold, WeDLM
from decode.decoders.d2f import DEFAULT_BLOCK_SIZE
from decode.decoders.visibility import mask_kind

DEFAULTS: tuple[type[Decoder], ...] = (D2F, Threshold, Block, WeDLM, Autoregressive)
"""Those that a model may be decoded with where none is named."""


def option_names(decoder: type[Decoder]) -> list[str]:
    """The options that a decoder has."""
    return [field.name for field in fields(decoder)]


@dataclass(frozen=True)
class DecoderSettings:
    """The decoder's name, None where none was named, and the options that were given."""

    name: str | None
    given: dict[str, Any]

    def check(self, lengths: Iterable[int]) -> None:
        """Raise InputError where no model could be decoded with the options for responses of these
        lengths: the named decoder refuses them, or every one that some model has by default. It
        needs no model, so it comes before anything is read; `decoder` checks the one in use."""
        for length in lengths:
            refusals = []
            for kind in DEFAULTS if self.name is None else [DECODERS[self.name]]:
                try:
                    self._build(kind, length)
                except InputError as error:
                    refusals.append((kind, error))
                else:
                    break
            else:
                raise self._telling(refusals)

    def _telling(self, refusals: Sequence[tuple[type[Decoder], InputError]]) -> InputError:
        """The refusal that says most: that of a decoder which has all of the options."""
        for kind, error in refusals:
            if set(self.given) <= set(option_names(kind)):
                return error
        if self.name is not None:
            return refusals[0][1]
        having = [d.name for d in DECODERS.values() if set(self.given) <= set(option_names(d))]
        common = set.intersection(*(set(option_names(d)) for d in DECODERS.values()))
        given = ", ".join(name for name in self.given if name not in common)
        if not having:
            return InputError(f"no decoder has all of the options {given}")
        return InputError(
            f"no model is decoded with the options {given} by default: name a decoder that has "
            f"them, {' or '.join(having)}"
        )

    def choose(self, model: DiffusionModel) -> type[Decoder]:
        """The named decoder, else the one that suits the model's mask: the pipeline, WeDLM, block
        diffusion, for a model without a mask id one token at a time; for one that WINO+ trained
        the threshold rule."""
        if self.name is not None:
            return DECODERS[self.name]
        if model.mask_id is None:
            return Autoregressive
        if model.contract.objective == "wino_plus":
            return Threshold
        kinds: dict[str, type[Decoder]] = {"causal": WeDLM, "absolute block-causal": Block}
        return kinds.get(mask_kind(model.contract), D2F)

    def decoder(self, model: DiffusionModel, length: int) -> Decoder:
        """The decoder of a prompt whose response has at most `length` tokens, every option
        resolved. Raises InputError."""
        kind = self.choose(model)
        return self._build(kind, length, _trained_for(kind, model.contract))

    def _build(
        self, kind: type[Decoder], length: int, defaults: Mapping[str, int] = MappingProxyType({})
    ) -> Decoder:
        known = option_names(kind)
        unknown = [name for name in self.given if name not in known]
        if unknown:
            taken = ", the default of this model," if self.name is None else ""
            named = one_line(", ".join(unknown))[:200]
            raise InputError(
                f"the decoder {kind.name}{taken} has no option {named}; it has {', '.join(known)}"
            )
        values = dict(self.given)
        if kind is D2F:
            defaults = {"block_size": DEFAULT_BLOCK_SIZE, **defaults}
        for name, value in defaults.items():
            if name not in values or (kind is D2F and values[name] is None):
                values[name] = value
        return kind(**values | {"max_new_tokens": length})


def read_settings(options: argparse.Namespace) -> DecoderSettings:
    """The decoder settings of a command line. Raises InputError."""
    values = read_mapping(options.config) if options.config is not None else {}
    name, given = split(values, options.config)
    known = _known_options()
    given |= {key: value for key, value in vars(options).items() if key in known}
    return DecoderSettings(options.decoder or name, given)


def split(values: dict[str, Any], where: str) -> tuple[str | None, dict[str, Any]]:
    """The decoder's name, None where none is named, and the options in a mapping of both.

    Raises InputError, naming where, for a key that no decoder has.
    """
    known = _known_options()
    refuse_another_kind(values, ("decoder", *known), where, "options of a decoder")
    unknown = [f"{key}"[:60] for key in values if key not in ("decoder", *known)]
    if unknown:
        raise InputError(
            f"{where}: unknown key {one_line(', '.join(unknown))[:200]}; expected some of "
            f"{', '.join(('decoder', *known))}"
        )
    name = values.get("decoder")
    if "decoder" in values and name not in list(DECODERS):
        names = ", ".join(DECODERS)
        raise InputError(f"{where}: decoder must be one of {names}, got {shown(name)}")
    return name, {key: value for key, value in values.items() if key != "decoder"}


def _trained_for(kind: type[Decoder], contract: Contract) -> dict[str, int]:
    """The decoder's options that follow from the blocks that a model was trained with."""
    name = {
        D2F: "block_size",
        Threshold: "block_size" if contract.objective == "wino_plus" else None,
        WeDLM: "window" if contract.objective == "wedlm" else None,
    }.get(kind)
    return {} if name is None or contract.block_size is None else {name: contract.block_size}


def _known_options() -> list[str]:
    """The options of all decoders, each once."""
    return list(dict.fromkeys(name for d in DECODERS.values() for name in option_names(d)))
