"""The decoders by name; each is one file here."""

from decode.decoders.autoregressive import Autoregressive
from decode.decoders.base import Decoder, Session
from decode.decoders.block import Block
from decode.decoders.d2f import D2F
from decode.decoders.entropy import EntropyBounded
from decode.decoders.factor import Factor
from decode.decoders.freedave import FreeDave
from decode.decoders.static import Static
from decode.decoders.threshold import Threshold
from decode.decoders.wedlm import WeDLM
from decode.decoders.wino import Wino

_ALL = (
    D2F,
    Static,
    Threshold,
    Factor,
    EntropyBounded,
    Wino,
    FreeDave,
    Block,
    WeDLM,
    Autoregressive,
)
DECODERS: dict[str, type[Decoder]] = {decoder.name: decoder for decoder in _ALL}

__all__ = ["DECODERS", "Decoder", "Session", *(decoder.__name__ for decoder in _ALL)]
