"""Decoders that reveal tokens of the current block for good; each is a rule that chooses which.

- `Static`, LLaDA's low-confidence decoding (arXiv 2502.09992): a fixed number of the surest.
- `Threshold`, Fast-dLLM's confidence threshold (arXiv 2505.22618, section 3.3 and algorithm 1): all
  that the model is sure of, and always the surest.
- `Factor`, Fast-dLLM's factor rule: as many together as their confidence allows, by the bound of
  the paper's theorem on parallel greedy decoding. Of the masked tokens sorted by confidence the
  n-th passes where c_(n) >= 1 - factor / (n + 1); the first always does. The longest passing prefix
  is revealed. The official code differs in one case: where only the last of all ranks fails, it is
  revealed too.
- `EntropyBounded`, the EB sampler (arXiv 2505.24857): the masked tokens are sorted by an error
  proxy, the smallest error first, and the longest prefix U with sum_U H - max_U H <= gamma is
  revealed. The left side bounds the mutual information of U's tokens, which decoding them
  independently ignores. It never falls as U grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.base import block_size_option, option
from decode.decoders.blockwise import Blockwise, BlockwiseSession
from decode.step import Floats, Ints, Predictions

Proxy = Literal["entropy", "confidence", "margin"]


@dataclass(frozen=True)
class Static(Blockwise):
    """Options of static decoding."""

    name: ClassVar[str] = "static"
    summary: ClassVar[str] = "LLaDA's low-confidence decoding (default for LLaDA and Dream)"

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
        """Forwards a block; a short one may need fewer."""
        return min(self.steps // self.block_count if self.steps else self.size, self.size)

    def due(self, masked: int, left: int) -> int:
        """Count what the next step reveals in a block of `masked` positions of which `left` still
        are: as even as can be, the larger first."""
        each, rest = divmod(masked, min(self.block_steps, masked))
        return each + (masked - left < rest * (each + 1))


class StaticSession(BlockwiseSession):
    """Decode a request."""

    decoder: Static

    def choose(self, predictions: Predictions) -> Ints:
        count = self.decoder.due(self.end - self.start, len(self.wanted))
        return np.argsort(-predictions.confidence, kind="stable")[:count]


@dataclass(frozen=True)
class Threshold(Blockwise):
    """Options of threshold decoding. With tau above 1 it is static decoding."""

    name: ClassVar[str] = "threshold"
    summary: ClassVar[str] = "Fast-dLLM's confidence threshold (default for a WINO+ model)"

    block_size: int | None = block_size_option(32, "32, on a WINO+ model its own")
    tau: float = option(
        0.9,
        "confidence from which a token is revealed, at least 0; above 1 only the surest one is",
        search=(0.6, 0.7, 0.8, 0.9, 0.95, 0.99),
    )

    @classmethod
    def with_model_defaults(cls, given: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
        own = contract.block_size if contract.objective == "wino_plus" else None
        return {"block_size": own, **given} if own is not None else dict(given)

    def choose(self, predictions: Predictions) -> Ints:
        return sure(predictions.confidence, self.tau)


def sure(confidence: Floats, tau: float) -> Ints:
    """Choose of confidence ``[N]`` the largest, the first of equals, and all that are at least tau;
    as indices."""
    chosen = confidence.astype(np.float64) >= tau
    chosen[confidence.argmax()] = True  # else a step could reveal nothing
    return np.flatnonzero(chosen)


@dataclass(frozen=True)
class Factor(Blockwise):
    """Options of factor decoding. With factor 0 it is static decoding, but for tokens of confidence
    exactly 1."""

    name: ClassVar[str] = "factor"
    summary: ClassVar[str] = "Fast-dLLM's factor rule"

    block_size: int | None = block_size_option(32)
    factor: float = option(
        1.0,
        "the n-th surest token is revealed where its confidence is at least 1 - F / (n + 1), at "
        "least 0",
        search=(0.1, 0.3, 1.0, 2.0),
        unit="F",
    )

    def choose(self, predictions: Predictions) -> Ints:
        return sure_together(predictions.confidence, self.factor)


def sure_together(confidence: Floats, factor: float) -> Ints:
    """Choose of confidence ``[N]`` the longest prefix whose ranks pass; as indices, surest first,
    of equals the first."""
    order = np.argsort(-confidence, kind="stable")
    rank = np.arange(1, len(order) + 1)
    passes = confidence[order].astype(np.float64) >= 1 - factor / (rank + 1)
    passes[0] = True
    return order[np.logical_and.accumulate(passes)]


@dataclass(frozen=True)
class EntropyBounded(Blockwise):
    """Options of entropy-bounded decoding. With gamma 0 it reveals one token a step, and others
    only where their entropy is 0."""

    name: ClassVar[str] = "entropy"
    summary: ClassVar[str] = "the EB sampler"

    block_size: int | None = block_size_option(32)
    gamma: float = option(
        0.1,
        "bound in nats on what tokens revealed together tell about each other, at least 0",
        search=(0.01, 0.03, 0.1, 0.3, 1.0),
        unit="NATS",
    )
    proxy: Proxy = option("entropy", "what tokens are sorted by before the bound is taken")

    uncertainty: ClassVar[bool] = True  # of the raw logits, whatever the temperature

    def choose(self, predictions: Predictions) -> Ints:
        entropy, margin = predictions.entropy, predictions.margin
        assert entropy is not None and margin is not None
        errors = {"entropy": entropy, "confidence": -predictions.confidence, "margin": -margin}
        return bounded(entropy, errors[self.proxy], self.gamma)


def bounded(entropy: Floats, error: Floats, gamma: float) -> Ints:
    """Choose of entropy ``[N]`` (nats) the longest prefix within the bound gamma, at least one; as
    indices, smallest error first and the first of equals first."""
    order = np.argsort(error, kind="stable")
    nats = np.maximum(entropy[order].astype(np.float64), 0)  # fp32 may give a little less than 0
    ignored = np.cumsum(nats) - np.maximum.accumulate(nats)
    return order[: np.count_nonzero(ignored <= gamma)]
