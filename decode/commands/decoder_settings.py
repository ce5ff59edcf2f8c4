"""Which decoder a run uses and with which options: the command line over a YAML file."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from d2f.configuration import read_mapping
from d2f.contract import Contract
from d2f.errors import InputError, one_line
from d2f.model import DiffusionModel
from d2f.tasks import Task
from d2f.validation import refuse_another_kind
from decode.commands.decoder_flags import given_options
from decode.decoders import DECODERS, Decoder, default_decoder, find_decoder


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
            # One decoder that takes the options is enough: which one it is follows from the model.
            for kind in _defaults() if self.name is None else [find_decoder(self.name)]:
                try:
                    self._build(kind, length)
                except InputError as error:
                    refusals.append((kind, error))
                else:
                    break
            else:
                raise self._telling(refusals)

    def _telling(self, refusals: Sequence[tuple[type[Decoder], InputError]]) -> InputError:
        """The refusal that says most: that of a decoder which has all of the options; where such
        decoders say different things, what each says."""
        said: dict[str, str] = {}
        for kind, error in refusals:
            # A decoder without one of the options only says that, which the user may not have
            # meant.
            if set(self.given) <= set(option_names(kind)):
                said.setdefault(str(error), kind.name)
        if len(said) == 1:
            return InputError(next(iter(said)))
        if said:
            return InputError("; ".join(f"{name}: {text}" for text, name in said.items()))
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

    def decoder(self, model: DiffusionModel, length: int | None = None) -> Decoder:
        """The decoder of a prompt whose response has at most `length` tokens, by default as many
        as were given or as the decoder itself takes; every option resolved: the named one, else
        the one that suits the model. Raises InputError."""
        contract = model.contract
        kind = default_decoder(contract) if self.name is None else find_decoder(self.name)
        return self._build(kind, length, contract)

    def for_task(self, model: DiffusionModel, task: Task) -> Decoder:
        """The decoder of a task's problems: with its length where none was given, and its stop
        strings beside those that were. Raises InputError."""
        length = self.given.get("max_new_tokens") or task.response_length
        decoder = self.decoder(model, length)
        return replace(decoder, stop=(*task.stop, *decoder.stop))

    def _build(
        self, kind: type[Decoder], length: int | None, contract: Contract | None = None
    ) -> Decoder:
        known = option_names(kind)
        unknown = [name for name in self.given if name not in known]
        if unknown:
            taken = ", the default of this model," if self.name is None else ""
            named = one_line(", ".join(unknown))[:200]
            raise InputError(
                f"the decoder {kind.name}{taken} has no option {named}; it has {', '.join(known)}"
            )
        # Without a model what it was trained with is not known; the options are checked as they
        # are.
        values = self.given if contract is None else kind.completed(self.given, contract)
        return kind(**values if length is None else values | {"max_new_tokens": length})


def _defaults() -> list[type[Decoder]]:
    """Those that a model may be decoded with where none is named."""
    # Those that say themselves for which models; `Decoder`'s own answer is always no.
    return [kind for kind in DECODERS.values() if "is_default_for" in vars(kind)]


def read_settings(options: argparse.Namespace) -> DecoderSettings:
    """The decoder settings of a command line. Raises InputError."""
    values = read_mapping(options.config) if options.config is not None else {}
    name, given = split(values, options.config, options.decoder)
    return DecoderSettings(options.decoder or name, given | given_options(options))


def split(
    values: dict[str, Any], where: str, decoder: str | None = None
) -> tuple[str | None, dict[str, Any]]:
    """The decoder's name, None where none is named, and the options in a mapping of both. decoder:
    the one that is named elsewhere.

    Raises InputError, naming where, for a key that no decoder has.
    """
    known = ["decoder", *_known_options()]
    refuse_another_kind(values, known, where, "options of a decoder")
    name = values.get("decoder")
    if "decoder" in values:
        try:
            known += option_names(find_decoder(name))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    if decoder is not None:
        known += option_names(find_decoder(decoder))
    unknown = [f"{key}"[:60] for key in values if key not in known]
    if unknown:
        expected = ", ".join(dict.fromkeys(known))
        raise InputError(
            f"{where}: unknown key {one_line(', '.join(unknown))[:200]}; "
            f"expected some of {expected}"
        )
    return name, {key: value for key, value in values.items() if key != "decoder"}


def _known_options() -> list[str]:
    """The options of all decoders, each once."""
    return list(dict.fromkeys(name for d in DECODERS.values() for name in option_names(d)))
