"""Fast-dLLM's confidence threshold (arXiv 2505.22618, section 3.3 and algorithm 1): every step
reveals all tokens of the current block that the model is sure of, and always the surest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d2f.contract import Contract
from decode.decoders.base import not_negative
from decode.decoders.blockwise import Blockwise, BlockwiseSession
from decode.engine.step import Floats, Ints, Predictions


@dataclass(frozen=True)
class Threshold(Blockwise):
    """Options of threshold decoding. tau: confidence from which a token is revealed, at least 0;
    above 1 only the surest token is, which is static decoding. block_size: the paper's 32; None
    takes one block for the whole response."""

    name: ClassVar[str] = "threshold"
    block_size: int | None = 32
    tau: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative("tau", self.tau)

    def begin(self, prompt: list[int], contract: Contract) -> ThresholdSession:
        return ThresholdSession(self, prompt, contract)


class ThresholdSession(BlockwiseSession):
    """One request."""

    decoder: Threshold

    def choose(self, predictions: Predictions) -> Ints:
        return sure(predictions.confidence, self.decoder.tau)


def sure(confidence: Floats, tau: float) -> Ints:
    """Indices into confidence ``[N]`` of the largest, the first of equals, and of all that are at
    least tau."""
    chosen = confidence.astype(np.float64) >= tau
    chosen[confidence.argmax()] = True
    return np.flatnonzero(chosen)
