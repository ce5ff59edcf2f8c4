"""Fast-dLLM's confidence threshold (arXiv 2505.22618, section 3.3 and algorithm 1): every step
reveals all tokens of the current block that the model is sure of, and always the surest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from d2f.contract import Contract
from decode.decoders.base import Card
from decode.decoders.blockwise import CACHE, MODELS, ROWS, Blockwise, BlockwiseSession
from decode.decoders.checks import not_negative
from decode.decoders.options import block_size_option, option
from decode.engine.step import Floats, Ints, Predictions


@dataclass(frozen=True)
class Threshold(Blockwise):
    """Options of threshold decoding. tau: confidence from which a token is revealed, at least 0;
    above 1 only the surest token is, which is static decoding. block_size: the paper's 32; None
    takes one block for the whole response."""

    name: ClassVar[str] = "threshold"
    summary: ClassVar[str] = "Fast-dLLM's confidence threshold (default for a WINO+ model)"
    card: ClassVar[Card] = Card(
        decides="the surest and all of confidence at least `tau`",
        rows=ROWS,
        cache=CACHE,
        models=MODELS,
        source="Fast-dLLM, [2505.22618](https://arxiv.org/abs/2505.22618)",
    )

    block_size: int | None = block_size_option(32, "32, on a WINO+ model its own")
    tau: float = option(
        0.9,
        "confidence from which a token is revealed, at least 0; above 1 only the surest one is",
        search=(0.6, 0.7, 0.8, 0.9, 0.95, 0.99),
        check=not_negative,
    )

    @classmethod
    def is_default_for(cls, contract: Contract) -> bool:
        return contract.mask_id is not None and contract.objective == "wino_plus"

    @classmethod
    def completed(cls, given: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
        own = contract.block_size if contract.objective == "wino_plus" else None
        return {"block_size": own, **given} if own is not None else dict(given)

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
    chosen[confidence.argmax()] = True  # else a step could reveal nothing
    return np.flatnonzero(chosen)
