"""Decoding one block of the response after another, the frame of all decoders that do: which rows a
step feeds, what stays cached, when the response is done. A decoder adds the rule that says which
tokens a step reveals.

Where a row's keys and values cannot change any more (it sees no masked position: under a
block-causal or causal mask), it is fed no longer. That is exact and always done. Beyond it there
are Fast-dLLM's approximate caches (arXiv 2505.22618), which are the same slots fed less often:

    none     every step feeds every row that may still change
    prefix   that on the first step of a block; then only from the block's start on
    dual     that on the first step of a block; then only the block

They change nothing under a block-causal mask where each block is made of whole blocks of the model.

Prompt at positions 0 1, blocks ``[2, 4)`` and ``[4, 6)``, two steps each, on a bidirectional model
and on one of the same blocks; the positions that are fed::

    step             bidirectional                       block-causal
                     none      prefix    dual            none
    1  of block 1    0 .. 5    0 .. 5    0 .. 5          0 1 2 3
    2                0 .. 5    2 3 4 5   2 3             2 3          the prompt is final
    1  of block 2    0 .. 5    0 .. 5    0 .. 5          2 3 4 5      block 1, with its last token
    2                0 .. 5    4 5       4 5             4 5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from d2f.contract import Contract
from d2f.spans import prefix
from decode.decoders.base import (
    BLOCKWISE_MASKS,
    Decoder,
    block_size_option,
    early_exit_option,
    max_new_tokens_option,
    option,
)
from decode.decoders.session import MaskedSession, MaskKind, visible_ends
from decode.step import BlockState, BlockView, Ints, Predictions, Step

CachePolicy = Literal["none", "prefix", "dual"]


@dataclass(frozen=True)
class Blockwise(Decoder):
    """Options of all blockwise decoders. The official codes have early_exit off."""

    block_size: int | None = block_size_option(None, "one block for the whole response")
    max_new_tokens: int | None = max_new_tokens_option()
    cache: CachePolicy = option(
        "none",
        "none feeds every row that may still change (exact); prefix feeds from the current block's "
        "start on, dual only the block, after one whole forward at its start (approximate on a "
        "bidirectional model, exact on a block-causal one whose own block size divides block_size, "
        "and the prompt's length, too, where it counts blocks from the prompt's start, as SDAR)",
    )
    early_exit: bool = early_exit_option()

    labels: ClassVar[Mapping[str, str]] = {"fully active": "current"}
    masks: ClassVar[tuple[MaskKind, ...]] = BLOCKWISE_MASKS
    uncertainty: ClassVar[bool] = False  # `choose` looks at entropy or margin

    def choose(self, predictions: Predictions) -> Ints:
        """Choose what to reveal of what a step wanted, as indices, at least one: the rule of a
        decoder that remembers nothing. Others override the session's."""
        raise NotImplementedError

    def begin(self, prompt: list[int], contract: Contract) -> BlockwiseSession:
        return BlockwiseSession(self, prompt, contract)

    @property
    def size(self) -> int:
        """Tokens a block."""
        return min(self.block_size or self.length, self.length)

    @property
    def block_count(self) -> int:
        return -(-self.length // self.size)


class BlockwiseSession(MaskedSession):
    """Decode a request block after block.

    decoder: a `Blockwise`, or other options of the same names.
    block: number of the current one, at positions ``[start, end)``.
    ends: int64 ``[len(x)]``, position p sees ``[0, ends[p])``.
    final: rows before it were fed with what they see all settled, and are fed no longer.

    A scratch slot follows the sequence's own: a shifted family's row before the block is fed to be
    read, and its keys and values, which would not be those that the cache policy keeps, go there.
    """

    def __init__(self, decoder: Any, prompt: list[int], contract: Contract):
        super().__init__(prompt, decoder.length, contract)
        self.decoder = decoder
        self.ends = visible_ends(len(self.x), len(prompt), contract)
        self.block = -1
        self.start = self.end = len(prompt)
        self.final = 0
        self.refreshed = -1  # the block that all rows were last fed in

    @property
    def slots(self) -> int:
        return len(self.x) + 1

    def choose(self, predictions: Predictions) -> Ints:
        """Choose what to reveal, as indices into `wanted`; at least one."""
        chosen: Ints = self.decoder.choose(predictions)
        return chosen

    def end_of(self, start: int) -> int:
        """Find where the block that begins at `start` ends."""
        return min(start + int(self.decoder.size), len(self.x))

    def begin_block(self) -> None:
        """Prepare for a block that begins."""

    def reach(self) -> int:
        """End the positions that a step predicts: with the block, unless it looks ahead."""
        return self.end

    def step(self) -> Step | None:
        # At first the block is empty; a block that looked-ahead drafts have filled is passed over.
        while not self.masked[self.start : self.end].any():
            if self.end == len(self.x) or self._exits():
                return None
            self.block += 1
            self.start, self.end = self.end, self.end_of(self.end)
            self.begin_block()
        if self._exits():
            return None
        self.wanted = self.start + np.flatnonzero(self.masked[self.start : self.reach()])
        return self.feed_step()

    def feed_step(self) -> Step:
        """Feed what the predictions of `wanted` need under the cache policy.

        Dream's second step in block 2, ``[4, 6)``, of a sequence of 6 with cache dual, where
        position 4 is masked yet::

            positions 3 4 5, slots 6 4 5, of which the row of position 3 is read
        """
        first, stop = self.final, int(self.ends[self.start : self.reach()].max())
        cached = self.final
        # The first step of a block feeds all that may have changed; only later ones feed less.
        if self.decoder.cache != "none" and self.refreshed == self.block:
            # Positions before the block keep those of the first step, when they saw the block all
            # masked.
            first = max(first, self.start)
            if self.decoder.cache == "dual":
                # Positions behind it keep the keys and values of the block's first step.
                stop = self.end
        self.refreshed = self.block
        # Row p - 1 predicts position p in shifted families; it may lie before the block.
        rows = self.wanted - self.contract.logit_shift
        fed = np.arange(min(first, int(rows[0])), stop)
        if first == self.final:  # all was fed: what saw settled positions alone is final now
            self.final = int(np.searchsorted(self.ends[:stop], self.settled_end, "right"))
        return Step(
            tokens=self.x[fed],
            positions=fed,
            slots=np.where(fed < first, len(self.x), fed),  # a row fed again to be read: to scratch
            spans=prefix(self.ends[fed]),
            read=rows - fed[0],
            cached=cached,
            uncertainty=self.decoder.uncertainty,
        )

    def accept(self, predictions: Predictions) -> None:
        self.revealed = []
        self.reveal_all(self.choose(predictions), predictions)

    def blocks(self) -> list[BlockView]:
        views, start = [], self.prompt_length
        while start < len(self.x):
            end = self.end_of(start)
            state: BlockState = "waiting" if start >= self.end else "fully active"
            if not self.masked[start:end].any():
                state = "decoded"
            views.append(self.view(start, end, state))
            start = end
        return views

    def _exits(self) -> bool:
        """Say whether nothing that is still masked matters."""
        return bool(self.decoder.early_exit) and self.saw_eos
