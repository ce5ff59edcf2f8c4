"""Decoding: many requests in one engine, one file a decoder.

`generate` decodes prompts, `stream` yields events as blocks advance. Importing this package loads
nothing heavy; torch comes with the first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; at run time `__getattr__` finds them
    from d2f.errors import QueueFullError
    from decode.api import generate, stream
    from decode.decoders import Decoder
    from decode.decoders.autoregressive import Autoregressive
    from decode.decoders.block import Block
    from decode.decoders.d2f import D2F
    from decode.decoders.freedave import FreeDave
    from decode.decoders.self_draft import SelfDraft
    from decode.decoders.unmask import EntropyBounded, Factor, Static, Threshold
    from decode.decoders.wedlm import WeDLM
    from decode.decoders.wino import Wino
    from decode.engine.async_engine import AsyncEngine
    from decode.step import Event, Result

__all__ = [
    "D2F",
    "AsyncEngine",
    "Autoregressive",
    "Block",
    "Decoder",
    "EntropyBounded",
    "Event",
    "Factor",
    "FreeDave",
    "QueueFullError",
    "Result",
    "SelfDraft",
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
    "AsyncEngine": "decode.engine.async_engine",
    "QueueFullError": "d2f.errors",
    "Event": "decode.step",
    "Result": "decode.step",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    from d2f.errors import did_you_mean

    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if not name.startswith("_"):  # no decoder: let importlib look for a module of that name
        from decode.decoders import DECODERS, Decoder

        kinds: tuple[type, ...] = (Decoder, *DECODERS.values())
        for kind in kinds:
            if kind.__name__ == name:
                return kind
    raise AttributeError(f"module 'decode' has no attribute {name!r}{did_you_mean(name, __all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
