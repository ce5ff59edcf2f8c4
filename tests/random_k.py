"""A decoder of one's own, in one file outside the package: `--decoder random_k:RandomK`.

Every forward reveals k masked tokens of the block, drawn at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d2f.contract import Contract
from decode.decoders.base import option
from decode.decoders.blockwise import Blockwise, BlockwiseSession
from decode.step import Ints, Predictions


@dataclass(frozen=True)
class RandomK(Blockwise):
    """Options. k: tokens a forward. shuffle: of the draws."""

    name: ClassVar[str] = "random_k"
    labels: ClassVar[dict[str, str]] = {"fully active": "drawing"}

    k: int = option(2, "tokens a forward, drawn at random, at least 1", search=(2, 4))
    shuffle: bool = option(True, "draw at random, or take the first k")

    def begin(self, prompt: list[int], contract: Contract) -> RandomKSession:
        return RandomKSession(self, prompt, contract)


class RandomKSession(BlockwiseSession):
    """One request, with random numbers of its own."""

    decoder: RandomK

    def begin_block(self) -> None:
        self.random = np.random.default_rng((self.decoder.seed, self.block))

    def choose(self, predictions: Predictions) -> Ints:
        count = len(predictions.token)
        order = self.random.permutation(count) if self.decoder.shuffle else np.arange(count)
        return order[: self.decoder.k]
