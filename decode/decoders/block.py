"""Block diffusion decoding with an exact cache, as of BD3-LM (arXiv 2503.09573), SDAR and TraDo.

One block after the other is denoised; a block sees itself and all before it. A finished block is
fed once more, with its final tokens, and then no longer. The official codes spend a forward of its
own on that, as on the prompt; here either is part of the next block's first forward: the same
tokens, one forward less a block.

A prompt of 3 and a response of 5, blocks of 4 that begin at position 0 (SDAR), so that the prompt
is part of the first block that is decoded::

    forward    positions fed      cached before    reads the masks of
    1          0 1 2 3            0                3
    2          0 1 2 3 4 5 6 7    0                4 5 6 7    (the first block once more, final now)
    3 ...      4 5 6 7            4                those that are left
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from d2f.spans import block_ends
from decode.decoders.base import (
    BLOCKWISE_MASKS,
    DEFAULT_BLOCK_SIZE,
    Decoder,
    block_size_option,
    early_exit_option,
    max_new_tokens_option,
    option,
    ratio,
)
from decode.decoders.blockwise import BlockwiseSession, CachePolicy
from decode.decoders.session import SDAR_BLOCK_SIZE, MaskKind, mask_kind
from decode.step import BlockView, Ints, Predictions

Reveal = Literal["static", "dynamic", "sequential"]
Align = Literal["absolute", "prompt"]


@dataclass(frozen=True)
class Block(Decoder):
    """Options of block diffusion. Of the denoising_steps step j may reveal the n_j tokens that make
    them even, the larger first. align is ``absolute`` for SDAR and TraDo, where the prompt's tail
    is part of the first block that is decoded, ``prompt`` for D2F students; None refuses a model
    that was trained without blocks."""

    name: ClassVar[str] = "block"
    summary: ClassVar[str] = "block diffusion, an exact cache (default for SDAR; D2F students)"
    labels: ClassVar[Mapping[str, str]] = {"fully active": "current"}
    masks: ClassVar[tuple[MaskKind, ...]] = BLOCKWISE_MASKS
    cache: ClassVar[CachePolicy] = "none"
    uncertainty: ClassVar[bool] = False

    block_size: int | None = block_size_option(
        None, f"the model's own, else {DEFAULT_BLOCK_SIZE}, on absolute blocks {SDAR_BLOCK_SIZE}"
    )
    denoising_steps: int | None = option(
        None, "forwards a block is given, from 1 to its size", shown="one token a forward"
    )
    reveal: Reveal = option(
        "dynamic",
        "static the n most confident tokens, n what makes the steps even; dynamic all above tau if "
        "these are n or more; sequential the n leftmost",
    )
    tau: float = ratio(
        0.85, "confidence above which dynamic reveals", search=(0.7, 0.85, 0.95, 0.99)
    )
    max_new_tokens: int | None = max_new_tokens_option()
    align: Align | None = option(
        None,
        "blocks begin at position 0 or at the prompt's end",
        shown="as the model was trained",
    )
    early_exit: bool = early_exit_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size is not None:
            self._check_steps(self.block_size)

    def check(self, contract: Contract) -> None:
        super().check(contract)
        if mask_kind(contract) == "bidirectional" and self.align is None:
            raise InputError(
                "the decoder block needs a block-causal model, this one of the family "
                f"{contract.family} is bidirectional: take static for it, or say align for a model "
                "that was trained on blocks without saying so"
            )
        self._check_steps(self.size(contract))

    def _check_steps(self, size: int) -> None:
        if self.denoising_steps is not None and self.denoising_steps > size:
            raise InputError(
                f"denoising_steps must be at most the block size {size}, got {self.denoising_steps}"
            )

    def is_absolute(self, contract: Contract) -> bool:
        """Say whether blocks begin at position 0."""
        if self.align is not None:
            return self.align == "absolute"
        return mask_kind(contract) == "absolute block-causal"

    def size(self, contract: Contract) -> int:
        """Positions a block."""
        default = SDAR_BLOCK_SIZE if self.is_absolute(contract) else DEFAULT_BLOCK_SIZE
        return self.block_size or contract.block_size or default

    def begin(self, prompt: list[int], contract: Contract) -> BlockSession:
        return BlockSession(self, prompt, contract)


class BlockSession(BlockwiseSession):
    """Decode a request, its blocks those of the decoder. done: steps of the current block."""

    decoder: Block

    def __init__(self, decoder: Block, prompt: list[int], contract: Contract):
        super().__init__(decoder, prompt, contract)
        self.size = decoder.size(contract)
        first = 0 if decoder.is_absolute(contract) else len(prompt)
        size = min(self.size, len(self.x))  # a larger one is one block, too
        self.ends = block_ends(len(self.x), first, size)

    def end_of(self, start: int) -> int:
        return int(self.ends[start])  # the prompt's tail may be part of the first block

    def begin_block(self) -> None:
        self.done = 0

    def choose(self, predictions: Predictions) -> Ints:
        confidence, decoder = predictions.confidence, self.decoder
        # By the block's full size, also where the last block is short.
        count = reveal_count(self.size, decoder.denoising_steps or self.size, self.done)
        self.done += 1
        if decoder.reveal == "sequential":
            return np.arange(len(confidence))[:count]
        # dynamic: where fewer than the step's number are above tau, as static does.
        above = np.flatnonzero(confidence > decoder.tau)
        if decoder.reveal == "dynamic" and len(above) >= count:
            return above
        return np.argsort(-confidence, kind="stable")[:count]

    def blocks(self) -> list[BlockView]:
        final = self.final - self.prompt_length
        return [
            replace(block, state="cached")
            if block.state == "decoded" and block.end <= final
            else block
            for block in super().blocks()
        ]


def reveal_count(masked: int, steps: int, done: int) -> int:
    """Count what the step after `done` others reveals: as even as can be, the larger first, 0 once
    all are."""
    each, rest = divmod(masked, steps)
    return each + (done < rest)
