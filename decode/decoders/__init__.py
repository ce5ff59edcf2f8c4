"""The decoders by name; each is one file here."""

from decode.decoders.autoregressive import Autoregressive
from decode.decoders.base import Decoder, Session
from decode.decoders.d2f import D2F
from decode.decoders.static import Static
from decode.decoders.wino import Wino

DECODERS: dict[str, type[Decoder]] = {d.name: d for d in (D2F, Static, Wino, Autoregressive)}

__all__ = ["D2F", "DECODERS", "Autoregressive", "Decoder", "Session", "Static", "Wino"]
