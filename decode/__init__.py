"""Decoding: many requests in one engine, one file a decoder.

`generate` decodes prompts, `stream` yields events as blocks advance. Importing this package loads
nothing heavy; torch comes with the first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from d2f import siblings
except ImportError as error:  # of a d2f.py of the user's
    import d2f

    _place = next(iter(getattr(d2f, "__path__", None) or [d2f.__file__]))
    raise ImportError(f"{_place} hides the package d2f of d2f-toolkit: rename it") from error

siblings.require("d2f")

if TYPE_CHECKING:
    from decode.api import generate, stream
    from decode.decoders import (
        D2F,
        Autoregressive,
        Block,
        Decoder,
        EntropyBounded,
        Factor,
        FreeDave,
        Static,
        Threshold,
        WeDLM,
        Wino,
    )
    from decode.engine.result import Event, Result

__all__ = [
    "D2F",
    "Autoregressive",
    "Block",
    "Decoder",
    "EntropyBounded",
    "Event",
    "Factor",
    "FreeDave",
    "Result",
    "Static",
    "Threshold",
    "WeDLM",
    "Wino",
    "generate",
    "stream",
]

_HOMES = {
    "generate": "decode.api",
    "stream": "decode.api",
    "Decoder": "decode.decoders",
    "D2F": "decode.decoders",
    "FreeDave": "decode.decoders",
    "Static": "decode.decoders",
    "Threshold": "decode.decoders",
    "Factor": "decode.decoders",
    "EntropyBounded": "decode.decoders",
    "Autoregressive": "decode.decoders",
    "Block": "decode.decoders",
    "WeDLM": "decode.decoders",
    "Wino": "decode.decoders",
    "Event": "decode.engine.result",
    "Result": "decode.engine.result",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'decode' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
