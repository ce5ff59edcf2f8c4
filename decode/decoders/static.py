"""LLaDA's low-confidence static decoding (arXiv 2502.09992): the slow truth.

Block by block, every forward reveals a fixed number of the most confident masked tokens of the
current block; nothing is revised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.base import Card
from decode.decoders.blockwise import CACHE, MODELS, ROWS, Blockwise, BlockwiseSession
from decode.decoders.options import option
from decode.engine.step import Ints, Predictions


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
