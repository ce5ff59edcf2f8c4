"""The decoders: every module here is searched for them, so that a decoder is one file.

`DECODERS` are those of this package by name. `find_decoder` takes their names, and
``module:Class`` for a decoder of one's own.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

from d2f.config import find_attribute
from d2f.contract import Contract
from d2f.errors import InputError, not_one_of, repr_of
from decode.decoders.base import Decoder
from decode.decoders.session import Session, mask_kind

__all__ = [
    "DECODERS",
    "Decoder",
    "Session",
    "as_decoder",
    "default_decoder",
    "find_decoder",
    "qualified_name",
]


def _is_decoder(kind: object) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, Decoder)
        and not inspect.isabstract(kind)
        and "name" in vars(kind)
    )


_MODULES = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
_KINDS = {kind for module in _MODULES for kind in vars(module).values() if _is_decoder(kind)}
DECODERS: dict[str, type[Decoder]] = {k.name: k for k in sorted(_KINDS, key=lambda k: k.name)}


def find_decoder(name: object) -> type[Decoder]:
    """Find the decoder of that name, or the class at ``module:Class``, which may lie in the working
    folder. Raises InputError."""
    if isinstance(name, str) and name in DECODERS:
        return DECODERS[name]
    if not isinstance(name, str) or name.count(":") != 1:
        raise InputError(f"decoder: {not_one_of(name, DECODERS)}, or your own as module:Class")
    kind: type[Decoder] = find_attribute(name, "decoder")
    if not _is_decoder(kind):
        raise InputError(
            f"decoder {name}: expected a subclass of decode.Decoder that has a name and begins "
            f"requests, got {repr_of(kind)}"
        )
    return kind


def as_decoder(decoder: object, contract: Contract) -> Decoder:
    """Take a decoder as it is, and make one from its name, or the default one of None, with the
    defaults for a model of that contract. Raises InputError."""
    if isinstance(decoder, Decoder):
        return decoder
    if decoder is None or isinstance(decoder, str):
        kind = default_decoder(contract) if decoder is None else find_decoder(decoder)
        return kind(**kind.with_model_defaults({}, contract))
    raise InputError(
        f"decoder must be a Decoder, such as decode.D2F(), or one of the names "
        f"{', '.join(DECODERS)}; got {repr_of(decoder)}"
    )


def qualified_name(kind: type[Decoder]) -> str:
    """Name a decoder as `find_decoder` finds it."""
    known = DECODERS.get(kind.name) is kind
    return kind.name if known else f"{kind.__module__}:{kind.__qualname__}"


def default_decoder(contract: Contract) -> type[Decoder]:
    """Choose the decoder that suits a model where none is named."""
    kind = mask_kind(contract)
    if contract.draft_id is not None:
        name = "self_draft"
    elif contract.mask_id is None:
        name = "autoregressive"
    elif contract.objective == "wino_plus":
        name = "threshold"
    elif kind == "causal":
        name = "wedlm"
    elif kind == "absolute block-causal":
        name = "block"
    else:
        name = "d2f" if contract.objective == "d2f" else "static"
    return DECODERS[name]
