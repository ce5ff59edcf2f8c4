"""Fast-dLLM's factor rule (arXiv 2505.22618, section 3.3): as many tokens together as their
confidence allows, by the bound of the paper's theorem on parallel greedy decoding.

Of the masked tokens of the current block, sorted by confidence, the n-th passes where
c_(n) >= 1 - factor / (n + 1); the first always does. The longest passing prefix is revealed. The
official code differs in one case: where only the last of all ranks fails, it is revealed too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d2f.contract import Contract
from decode.decoders.base import Card
from decode.decoders.blockwise import CACHE, MODELS, ROWS, Blockwise, BlockwiseSession
from decode.decoders.checks import not_negative
from decode.decoders.options import block_size_option, option
from decode.engine.step import Floats, Ints, Predictions


@dataclass(frozen=True)
class Factor(Blockwise):
    """Options of factor decoding. factor: at least 0; the larger, the more tokens a step; 0 is
    static decoding, but for tokens of confidence exactly 1. block_size: the paper's 32; None takes
    one block for the whole response."""

    name: ClassVar[str] = "factor"
    summary: ClassVar[str] = "Fast-dLLM's factor rule"
    card: ClassVar[Card] = Card(
        decides="the n surest while the n-th has at least 1 - `factor` / (n + 1)",
        rows=ROWS,
        cache=CACHE,
        models=MODELS,
        source="Fast-dLLM, [2505.22618](https://arxiv.org/abs/2505.22618)",
    )

    block_size: int | None = block_size_option(32)
    factor: float = option(
        1.0,
        "the n-th surest token is revealed where its confidence is at least 1 - F / (n + 1), at "
        "least 0",
        search=(0.1, 0.3, 1.0, 2.0),
        unit="F",
        check=not_negative,
    )

    def begin(self, prompt: list[int], contract: Contract) -> FactorSession:
        return FactorSession(self, prompt, contract)


class FactorSession(BlockwiseSession):
    """One request."""

    decoder: Factor

    def choose(self, predictions: Predictions) -> Ints:
        return sure_together(predictions.confidence, self.decoder.factor)


def sure_together(confidence: Floats, factor: float) -> Ints:
    """Indices into confidence ``[N]``, surest first and the first of equals first, of the longest
    prefix whose ranks pass."""
    order = np.argsort(-confidence, kind="stable")
    rank = np.arange(1, len(order) + 1)
    passes = confidence[order].astype(np.float64) >= 1 - factor / (rank + 1)
    passes[0] = True
    return order[np.logical_and.accumulate(passes)]
