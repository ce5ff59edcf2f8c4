"""Entropy-bounded unmasking, the EB sampler (arXiv 2505.24857): as many tokens together as a bound
on what they still tell about each other allows.

The masked tokens of the current block are sorted by an error proxy, the smallest error first. The
longest prefix U with sum_U H - max_U H <= gamma is revealed: the left side bounds the mutual
information of U's tokens, which decoding them independently ignores. It never falls as U grows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from d2f.contract import Contract
from decode.decoders.base import Card
from decode.decoders.blockwise import CACHE, MODELS, ROWS, Blockwise, BlockwiseSession
from decode.decoders.checks import not_negative
from decode.decoders.options import block_size_option, option
from decode.engine.step import Floats, Ints, Predictions, Step

Proxy = Literal["entropy", "confidence", "margin"]


@dataclass(frozen=True)
class EntropyBounded(Blockwise):
    """Options of entropy-bounded decoding. gamma: bound in nats, at least 0; the larger, the more
    tokens a step; 0 reveals one, and others only where their entropy is 0. proxy: what the tokens
    are sorted by: entropy, confidence (of the chosen token) or margin. block_size: 32, as Fast-dLLM
    takes; None takes one block for the whole response."""

    name: ClassVar[str] = "entropy"
    summary: ClassVar[str] = "the EB sampler"
    card: ClassVar[Card] = Card(
        decides="the surest while sum H - max H is at most `gamma` nats",
        rows=ROWS,
        cache=CACHE,
        models=MODELS,
        source="EB sampler, [2505.24857](https://arxiv.org/abs/2505.24857)",
    )

    block_size: int | None = block_size_option(32)
    gamma: float = option(
        0.1,
        "bound in nats on what tokens revealed together tell about each other, at least 0",
        search=(0.01, 0.03, 0.1, 0.3, 1.0),
        unit="NATS",
        check=not_negative,
    )
    proxy: Proxy = option("entropy", "what tokens are sorted by before the bound is taken")

    def begin(self, prompt: list[int], contract: Contract) -> EntropySession:
        return EntropySession(self, prompt, contract)


class EntropySession(BlockwiseSession):
    """One request. Entropies are those of the raw logits, whatever the temperature."""

    decoder: EntropyBounded

    def feed_step(self) -> Step:
        return replace(super().feed_step(), uncertainty=True)

    def choose(self, predictions: Predictions) -> Ints:
        entropy, margin = predictions.entropy, predictions.margin
        assert entropy is not None and margin is not None
        errors = {"entropy": entropy, "confidence": -predictions.confidence, "margin": -margin}
        return bounded(entropy, errors[self.decoder.proxy], self.decoder.gamma)


def bounded(entropy: Floats, error: Floats, gamma: float) -> Ints:
    """Indices into entropy ``[N]`` (nats), smallest error first and the first of equals first, of
    the longest prefix within the bound gamma; at least one."""
    order = np.argsort(error, kind="stable")
    nats = np.maximum(entropy[order].astype(np.float64), 0)  # fp32 may give a little less than 0
    ignored = np.cumsum(nats) - np.maximum.accumulate(nats)
    return order[: np.count_nonzero(ignored <= gamma)]
