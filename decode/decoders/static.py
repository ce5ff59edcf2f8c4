"""LLaDA's low-confidence static decoding (arXiv 2502.09992): the slow truth.

Block by block, every forward feeds the whole sequence and reveals a fixed number of the most
confident masked tokens of the current block; nothing is cached, nothing is revised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.base import Decoder, MaskedSession, whole
from decode.result import BlockState, BlockView
from decode.step import Ints, Predictions, Step, feed


@dataclass(frozen=True)
class Static(Decoder):
    """Options of static decoding.

    block_size: None takes one block for the whole response (pure diffusion). steps: forwards over
    all blocks, a multiple of their number; None reveals one token a step. max_new_tokens: kept
    exactly, the last block may be short.
    """

    name: ClassVar[str] = "static"
    block_size: int | None = None
    steps: int | None = None
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size is not None:
            whole("block_size", self.block_size)
        if self.steps is not None:
            whole("steps", self.steps)
            if self.steps % self.block_count:
                raise InputError(
                    f"steps must be a multiple of the {self.block_count} blocks "
                    f"({self.max_new_tokens} tokens in blocks of {self.size}), got {self.steps}"
                )

    @property
    def size(self) -> int:
        return min(self.block_size or self.max_new_tokens, self.max_new_tokens)

    @property
    def block_count(self) -> int:
        return -(-self.max_new_tokens // self.size)

    def begin(self, prompt: list[int], contract: Contract) -> StaticSession:
        return StaticSession(self, prompt, contract)


class StaticSession(MaskedSession):
    """One request, block after block."""

    def __init__(self, decoder: Static, prompt: list[int], contract: Contract):
        super().__init__(prompt, decoder.max_new_tokens, contract)
        self.decoder = decoder
        self.ends = _visible_ends(len(self.x), len(prompt), contract)
        self.block = -1
        self.counts: list[int] = []  # tokens that the current block's remaining steps reveal
        self.wanted = np.zeros(0, dtype=np.int64)

    def step(self) -> Step | None:
        if not self.counts:
            self.block += 1
            if self.block == self.decoder.block_count:
                return None
            start, end = self._bounds(self.block)
            per_block = self.decoder.steps and self.decoder.steps // self.decoder.block_count
            self.counts = reveal_counts(end - start, per_block or end - start)
        start, end = self._bounds(self.block)
        self.wanted = start + np.flatnonzero(self.masked[start:end])
        return feed(
            self.x, 0, self.ends, self.wanted, cached=0, logit_shift=self.contract.logit_shift
        )

    def accept(self, predictions: Predictions) -> None:
        self.revealed = []
        order = np.argsort(-predictions.confidence, kind="stable")
        for i in np.sort(order[: self.counts.pop(0)]):
            confidence = float(predictions.confidence[i])
            self.reveal(int(self.wanted[i]), int(predictions.token[i]), confidence)

    def _bounds(self, block: int) -> tuple[int, int]:
        start = self.prompt_length + block * self.decoder.size
        return start, min(start + self.decoder.size, len(self.x))

    def blocks(self) -> list[BlockView]:
        views = []
        for block in range(self.decoder.block_count):
            start, end = self._bounds(block)
            state: BlockState = "waiting" if block > self.block else "fully active"
            if not self.masked[start:end].any():
                state = "decoded"
            tokens = self.view(start, end)
            views.append(
                BlockView(start - self.prompt_length, end - self.prompt_length, state, tokens)
            )
        return views


def reveal_counts(masked: int, steps: int) -> list[int]:
    """How many tokens each step reveals: as even as can be, the larger ones first, no zeros."""
    each, rest = divmod(masked, steps)
    return [n for n in (each + (j < rest) for j in range(steps)) if n]


def _visible_ends(length: int, prompt_length: int, contract: Contract) -> Ints:
    """How far each position sees: everything, or for a D2F student its own block's end."""
    if contract.objective != "d2f" or contract.block_size is None:
        return np.full(length, length, dtype=np.int64)
    from d2f.spans import block_ends

    return block_ends(length, prompt_length, contract.block_size).numpy().astype(np.int64)
