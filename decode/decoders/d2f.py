"""D2F's pipelined decoding (arXiv 2508.09192, section 3.3; order of events as in its code).

Blocks are appended while earlier ones are still being decoded. A block is semi-active (reveals only
confident tokens) until its predecessor is decoded to tau_act, then fully active (reveals at least
one token a forward). A block without masks whose predecessors are done is fed once more, inside
a forward that also advances later blocks, and from then on is cached, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.base import Card, Decoder, MaskedSession
from decode.decoders.checks import greedy_only, ratio
from decode.decoders.options import (
    DEFAULT_BLOCK_SIZE,
    block_size_option,
    early_exit_option,
    max_new_tokens_option,
    option,
)
from decode.decoders.visibility import mask_kind
from decode.engine.result import BlockState, BlockView
from decode.engine.step import Ints, Predictions, Step, feed

Revoke = Literal["always", "commit"]


@dataclass(frozen=True)
class D2F(Decoder):
    """Options of the pipeline.

    block_size: None takes the one that the model was trained with, else 32. tau_add: share of the
    last block that must be decoded before another is appended. tau_act: share of a block that
    must be decoded before the next becomes fully active. tau_conf: confidence above which a token
    is revealed. max_new_tokens: kept exactly, the last block may be short. early_exit: stop when
    the first end id and all before it are decoded; False finishes all open blocks, as the
    official code does.

    lossless: states of the pipeline that a forward checks, the fed one and drafts of the next
    (`decode.decoders.d2f_lossless`): the same tokens in no more forwards; None drafts nothing.
    revoke: take decided tokens back that WINO's shadow (arXiv 2507.18578) gives less than
    tau_revoke: ``always``, in every forward, in the blocks that are still active; ``commit``, once,
    in the forward that would cache a block. It helps a tau_conf below tau_revoke.
    """

    name: ClassVar[str] = "d2f"
    summary: ClassVar[str] = "the pipeline (default for LLaDA- and Dream-like models)"
    card: ClassVar[Card] = Card(
        decides="in each open block all above `tau_conf`; in fully active ones at least one",
        rows="open blocks, and those just finished",
        cache="exact",
        models="D2F students, LLaDA and Dream with a D2F adapter",
        source="D2F, [2508.09192](https://arxiv.org/abs/2508.09192)",
    )

    block_size: int | None = block_size_option(None, f"the model's own, else {DEFAULT_BLOCK_SIZE}")
    tau_add: float = option(
        0.1,
        "share of the last block that must be decoded before another is appended, in [0, 1]",
        search=(0.1, 0.5),
        check=ratio,
    )
    tau_act: float = option(
        0.95,
        "share of a block that must be decoded before the next becomes fully active, in [0, 1]",
        search=(0.95, 1.0),
        check=ratio,
    )
    tau_conf: float = option(
        0.9,
        "confidence above which a token is revealed, in [0, 1]",
        search=(0.8, 0.9, 0.95, 0.97, 0.99),
        check=ratio,
    )
    max_new_tokens: int | None = max_new_tokens_option()
    early_exit: bool = early_exit_option("finish the open blocks")
    lossless: int | None = option(
        None,
        "states that a forward checks, at least 1, drafted from the predictions at hand: the same "
        "tokens in no more forwards, each with more rows",
    )
    revoke: Revoke | None = option(
        None,
        "take decided tokens back that WINO's check does not bear out: always, in the active "
        "blocks, or once, when a block would be cached",
        shown="never",
    )
    tau_revoke: float = option(
        0.9, "with revoke: probability below which a token is taken back, in [0, 1]", check=ratio
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lossless is not None:
            greedy_only("lossless", self.temperature)
            if self.revoke is not None:
                raise InputError(
                    "lossless drafts the pipeline that takes nothing back: expected lossless or "
                    f"revoke, got lossless {self.lossless!r} and revoke {self.revoke!r}"
                )

    @classmethod
    def is_default_for(cls, contract: Contract) -> bool:
        return (
            contract.mask_id is not None
            and contract.objective != "wino_plus"
            and mask_kind(contract) in ("bidirectional", "block-causal")
        )

    @classmethod
    def completed(cls, given: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
        own = given.get("block_size")
        if own is None:
            own = contract.block_size or DEFAULT_BLOCK_SIZE
        return {**given, "block_size": own}

    def doubt(self, contract: Contract) -> str | None:
        if contract.objective == "d2f":
            return None
        return (
            f"was not trained by D2F (its objective: {contract.objective or 'unknown'}): the "
            "pipeline's block-causal mask is foreign to it; expect lower accuracy"
        )

    def begin(self, prompt: list[int], contract: Contract) -> D2FSession:
        if self.lossless is not None:
            from decode.decoders.d2f_lossless import LosslessSession

            return LosslessSession(self, prompt, contract)
        if self.revoke is not None and self.tau_revoke > 0:
            from decode.decoders.d2f_revoke import AlwaysSession, CommitSession

            kind = AlwaysSession if self.revoke == "always" else CommitSession
            return kind(self, prompt, contract)
        return D2FSession(self, prompt, contract)


class Block:
    """Positions ``[start, end)`` of the sequence, how many of them are masked, their state."""

    def __init__(self, start: int, end: int):
        self.start, self.end = start, end
        self.masked = end - start
        self.state: BlockState = "semi-active"
        self.full = False  # sticky: the predecessor has reached tau_act

    @property
    def active(self) -> bool:
        return self.state in ("semi-active", "fully active")

    @property
    def decoded(self) -> float:
        """Share of the positions that are decoded. Divided last, as the official code does: only
        then does k of n reach a threshold of k / n."""
        size = self.end - self.start
        return (size - self.masked) / size


class D2FSession(MaskedSession):
    """One request in the pipeline. counts: ``active_blocks``, summed over the forwards."""

    def __init__(self, decoder: D2F, prompt: list[int], contract: Contract):
        super().__init__(prompt, decoder.length, contract)
        self.decoder = decoder
        self.size = decoder.block_size or contract.block_size or DEFAULT_BLOCK_SIZE
        start = Block(0, len(prompt))
        start.state, start.masked = "to cache", 0
        self.pipeline = [start]
        self.cached = 0
        self.ended = False  # an end id was revealed: no block is appended any more
        self.limit = len(self.x)  # with early_exit, nothing after the first end id matters
        self.wanted = np.zeros(0, dtype=np.int64)
        self.counts["active_blocks"] = 0

    def step(self) -> Step | None:
        if not self.advance():
            return None
        self.counts["active_blocks"] += sum(block.active for block in self.pipeline)
        step = feed(
            self.x,
            self.cached,
            self.ends(),
            self.wanted,
            cached=self.cached,
            logit_shift=self.contract.logit_shift,
        )
        self._fed()
        return step

    def advance(self) -> bool:
        """Append and activate blocks, say what is wanted; False where the request is done."""
        self._append()
        self._activate()
        if self._done():
            return False
        self.wanted = np.flatnonzero(self.masked[: self.pipeline[-1].end])
        return True

    def ends(self) -> Ints:
        """Where what each opened position sees ends."""
        ends = np.empty(self.pipeline[-1].end, dtype=np.int64)
        for block in self.pipeline:
            ends[block.start : block.end] = block.end
        return ends

    def accept(self, predictions: Predictions) -> None:
        self.revealed = []
        for block in self.pipeline:
            if block.active:
                self._reveal_in(block, predictions)
        self._close()
        if self.decoder.early_exit and self.limit < len(self.x):
            self.pipeline = [b for b in self.pipeline if b.start < self.limit]

    def _done(self) -> bool:
        if not any(block.active for block in self.pipeline):
            return True
        return self.decoder.early_exit and not self.masked[: self.limit].any()

    def _fed(self) -> None:
        """Finished blocks are in the cache with this step."""
        for block in self.pipeline:
            if block.state == "to cache":
                block.state = "cached"
                self.cached = block.end

    def _close(self) -> None:
        """Finish the blocks without masks that no active block precedes."""
        waiting = False
        for block in self.pipeline:
            if block.active and not waiting and not block.masked:
                block.state = "to cache"
            waiting = waiting or block.active

    def _append(self) -> None:
        last = self.pipeline[-1]
        room = last.end < len(self.x)
        if room and not self.ended and last.decoded >= self.decoder.tau_add:
            self.pipeline.append(Block(last.end, min(last.end + self.size, len(self.x))))

    def _activate(self) -> None:
        for before, block in zip(self.pipeline, self.pipeline[1:], strict=False):
            if before.decoded >= self.decoder.tau_act:
                block.full = True
                if block.state == "semi-active":
                    block.state = "fully active"

    def _reveal_in(self, block: Block, predictions: Predictions) -> None:
        low, high = np.searchsorted(self.wanted, (block.start, block.end))
        confidence = predictions.confidence[low:high]
        chosen = np.flatnonzero(confidence > self.decoder.tau_conf)
        if not len(chosen) and block.full and len(confidence):
            chosen = np.array([confidence.argmax()])
        for i in low + chosen:
            position, token = int(self.wanted[i]), int(predictions.token[i])
            self.reveal(position, token, float(predictions.confidence[i]))
            block.masked -= 1
            if token in self.contract.end_ids:
                self.ended = True
                self.limit = min(self.limit, position + 1)

    def blocks(self) -> list[BlockView]:
        shift = self.prompt_length
        return [
            BlockView(b.start - shift, b.end - shift, b.state, self.view(b.start, b.end))
            for b in self.pipeline[1:]
        ]
