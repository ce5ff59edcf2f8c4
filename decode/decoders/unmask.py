"""LLaDA's low-confidence static decoding (arXiv 2502.09992): the slow truth.

Block by block, every forward reveals a fixed number of the most confident masked tokens of the
current block; nothing is revised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.base import Card, block_size_option, not_negative, option
from decode.decoders.blockwise import CACHE, MODELS, ROWS, Blockwise, BlockwiseSession
from decode.step import Floats, Ints, Predictions, Step


@dataclass(frozen=True)
class Static(Blockwise):
    """Options of static decoding. steps: forwards over all blocks, a multiple of their number; None
    reveals one token a step."""

    name: ClassVar[str] = "static"
    summary: ClassVar[str] = "LLaDA's low-confidence decoding"
    card: ClassVar[Card] = Card(
        decides="as many of the surest tokens of the block as its schedule says (default one)",
        rows=ROWS,
        cache=CACHE,
        models=MODELS,
        source="LLaDA, [2502.09992](https://arxiv.org/abs/2502.09992)",
    )

    steps: int | None = option(
        None,
        "forwards a response, a multiple of its number of blocks",
        shown="one token a forward",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps % self.block_count:
            raise InputError(
                f"steps must be a multiple of the {self.block_count} blocks "
                f"({self.length} tokens in blocks of {self.size}), got {self.steps}"
            )

    def begin(self, prompt: list[int], contract: Contract) -> StaticSession:
        return StaticSession(self, prompt, contract)

    @property
    def block_steps(self) -> int:
        """Forwards a block, of which a short one may need fewer."""
        return min(self.steps // self.block_count if self.steps else self.size, self.size)

    def due(self, masked: int, left: int) -> int:
        """How many tokens the next step reveals in a block of `masked` positions of which `left`
        still are: as even as can be, the larger first (`reveal_count`, by what is left)."""
        each, rest = divmod(masked, min(self.block_steps, masked))
        return each + (masked - left < rest * (each + 1))


class StaticSession(BlockwiseSession):
    """One request."""

    decoder: Static

    def choose(self, predictions: Predictions) -> Ints:
        count = self.decoder.due(self.end - self.start, len(self.wanted))
        return np.argsort(-predictions.confidence, kind="stable")[:count]


def reveal_count(masked: int, steps: int, done: int) -> int:
    """How many tokens the step after `done` others reveals: as even as can be, the larger first, 0
    once all are."""
    each, rest = divmod(masked, steps)
    return each + (done < rest)


# Fast-dLLM's confidence threshold (arXiv 2505.22618, section 3.3 and algorithm 1): every step
# reveals all tokens of the current block that the model is sure of, and always the surest.


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


# Fast-dLLM's factor rule (arXiv 2505.22618, section 3.3): as many tokens together as their
# confidence allows, by the bound of the paper's theorem on parallel greedy decoding.
#
# Of the masked tokens of the current block, sorted by confidence, the n-th passes where
# c_(n) >= 1 - factor / (n + 1); the first always does. The longest passing prefix is revealed. The
# official code differs in one case: where only the last of all ranks fails, it is revealed too.


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


# Entropy-bounded unmasking, the EB sampler (arXiv 2505.24857): as many tokens together as a bound
# on what they still tell about each other allows.
#
# The masked tokens of the current block are sorted by an error proxy, the smallest error first. The
# longest prefix U with sum_U H - max_U H <= gamma is revealed: the left side bounds the mutual
# information of U's tokens, which decoding them independently ignores. It never falls as U grows.

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
