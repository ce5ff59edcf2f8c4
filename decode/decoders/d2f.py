"""D2F's pipeline (arXiv 2508.09192, section 3.3; order of events as in its code).

Blocks are appended while earlier ones are still being decoded. A block is semi-active (reveals only
confident tokens) until its predecessor is decoded to tau_act, then fully active (reveals at least
one token a forward). A block without masks whose predecessors are done is fed once more, inside
a forward that also advances later blocks, and from then on is cached, exactly.

Prompt ``7 8``, blocks of 2, tau_add 0.5, tau_act 1, tau_conf 0.9, m the mask id; in brackets what
the forward reveals::

    forward   prompt     block [2, 4)            block [4, 6)
    1         7 8        [a] m   fully active
    2         cached     a [b]   fully active    [c] m   semi-active: block 1 was half decoded
    3         cached     a b     to cache        c [d]   fully active: block 1 is decoded

In forward 1 the only token above 0.9 is a. In forward 2 none in block 1 is, so its surest, b, is
revealed; c is above. In forward 3 block 1 is fed with its final tokens, and d is the surest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.base import (
    DEFAULT_BLOCK_SIZE,
    Decoder,
    block_size_option,
    early_exit_option,
    max_new_tokens_option,
    option,
    ratio,
)
from decode.decoders.session import MaskedSession, feed
from decode.step import BlockState, BlockView, Floats, Ints, Predictions, Step

Pick = Literal["confidence", "entropy", "margin"]
Revoke = Literal["always", "commit"]
FORMS: dict[str, type[D2FSession]] = {}
"""Sessions of the lossless and the revoking pipeline, each registered by its own file."""


@dataclass(frozen=True)
class D2F(Decoder):
    """Options of the pipeline. The official code has early_exit off and calls the forced_pick
    entropy neg_entropy. lossless is also bounded by the engine's `max_rows`; revoke helps a
    tau_conf below tau_revoke."""

    name: ClassVar[str] = "d2f"
    summary: ClassVar[str] = "the pipeline (default for a model that D2F trained)"

    block_size: int | None = block_size_option(None, f"the model's own, else {DEFAULT_BLOCK_SIZE}")
    tau_add: float = ratio(
        0.1,
        "share of the last block that must be decoded before another is appended",
        search=(0.1, 0.5),
    )
    tau_act: float = ratio(
        0.95,
        "share of a block that must be decoded before the next becomes fully active",
        search=(0.95, 1.0),
    )
    tau_conf: float = ratio(
        0.9,
        "confidence above which a token is revealed",
        search=(0.8, 0.9, 0.95, 0.97, 0.99),
    )
    max_new_tokens: int | None = max_new_tokens_option()
    early_exit: bool = early_exit_option("finish the open blocks")
    lossless: int | None = option(
        None,
        "states that a forward checks at most, at least 1, drafted from the predictions at hand: "
        "the same tokens in no more forwards, each with more rows",
    )
    revoke: Revoke | None = option(
        None,
        "take back what WINO's check does not bear out: always, in the active blocks, or once, "
        "when a block would be cached",
        shown="never",
    )
    tau_revoke: float = ratio(0.9, "with revoke: probability below which a token is taken back")
    forced_pick: Pick = option(
        "confidence",
        "by which a fully active block picks a token where none is above tau_conf; margin is "
        "between its two likeliest",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lossless is not None:
            self.greedy_only("lossless")
            if self.revoke is not None:
                raise InputError(
                    "lossless drafts the pipeline that takes nothing back: expected lossless or "
                    f"revoke, got lossless {self.lossless!r} and revoke {self.revoke!r}"
                )

    @classmethod
    def with_model_defaults(cls, given: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
        if given.get("block_size") is not None:
            return dict(given)
        return {**given, "block_size": contract.block_size or DEFAULT_BLOCK_SIZE}

    def warning_for(self, contract: Contract) -> str | None:
        if contract.objective == "d2f":
            return None
        return (
            f"was not trained by D2F (its objective: {contract.objective or 'unknown'}): the "
            "pipeline's block-causal mask is foreign to it; expect lower accuracy"
        )

    def size(self, contract: Contract) -> int:
        """Tokens a block."""
        return self.block_size or contract.block_size or DEFAULT_BLOCK_SIZE

    def begin(self, prompt: list[int], contract: Contract) -> D2FSession:
        form = None
        if self.lossless is not None:
            form = "lossless"
        elif self.tau_revoke > 0:  # 0 takes nothing back: the plain pipeline, without shadows
            form = self.revoke
        kind = D2FSession if form is None else FORMS[form]
        return kind(self, prompt, contract)


class PipelineBlock:
    """A block of the pipeline: positions ``[start, end)`` of the sequence, of which `masked` are
    still masked. Unless tokens are taken back, its state goes from semi-active over fully active
    and to cache to cached."""

    def __init__(self, start: int, end: int):
        self.start, self.end = start, end
        self.masked = end - start
        self.state: BlockState = "semi-active"
        self.predecessor_done = False  # sticky: it has reached tau_act

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
    """Decode a request in the pipeline.

    pipeline: the blocks that are open or done, of which the prompt is the first.
    cached: positions before it are fed no longer.
    counts: ``active_blocks``, summed over the forwards.
    """

    def __init__(self, decoder: D2F, prompt: list[int], contract: Contract):
        super().__init__(prompt, decoder.length, contract)
        self.decoder = decoder
        self.block_size = decoder.size(contract)
        start = PipelineBlock(0, len(prompt))  # the prompt is a block without masks
        start.state, start.masked = "to cache", 0
        self.pipeline = [start]
        self.cached = 0
        self.revealed_eos = False  # no block is appended any more
        self.visible_end = len(self.x)  # with early_exit, nothing after the first end id matters
        self.counts["active_blocks"] = 0

    def step(self) -> Step | None:
        return self.feed_step() if self.advance() else None

    def feed_step(self) -> Step:
        """Feed what is open, and what was just finished."""
        self.counts["active_blocks"] += sum(block.active for block in self.pipeline)
        # Everything from the first block that is not cached on: finished blocks, clean, then open
        # ones.
        step = feed(
            self.x,
            self.cached,
            self.ends()[: self.needed_end()],
            self.wanted,
            cached=self.cached,
            logit_shift=self.contract.logit_shift,
            uncertainty=self.decoder.forced_pick != "confidence",
        )
        # With this step a finished block's slots hold keys and values of final tokens that saw only
        # final tokens: it is cached without a forward of its own.
        self._fed()
        return step

    def advance(self) -> bool:
        """Append and activate blocks, find what is wanted; False where it is done."""
        # Append at most one block a forward, before activation: it may become fully active in the
        # same forward.
        self._append()
        self._activate()
        if self._done():
            return False
        # int64 [N], the masked positions of the blocks that are fed, ascending.
        self.wanted = np.flatnonzero(self.masked[: self.needed_end()])
        return True

    def needed_end(self) -> int:
        """Find where the last block ends whose rows this forward needs: one that may reveal a
        token, or is cached with it. Blocks after it are seen by none of the rows before them, and
        are fed anew in any case, as long as one before them is open."""
        # No confidence lies above 1: only full blocks reveal.
        blind = self.decoder.tau_conf >= 1
        needed = [
            block.end
            for block in self.pipeline
            if block.state == "to cache" or (block.masked and (block.predecessor_done or not blind))
        ]
        return needed[-1]

    def ends(self) -> Ints:
        """Give the ends of what each opened position sees, int64 ``[end of the last block]``: under
        the block-causal mask the end of its own block."""
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
        # Blocks that begin after the first end id cannot change what is visible: no longer fed.
        if self.decoder.early_exit and self.visible_end < len(self.x):
            self.pipeline = [b for b in self.pipeline if b.start < self.visible_end]

    def _done(self) -> bool:
        if not any(block.active for block in self.pipeline):
            return True
        return self.decoder.early_exit and not self.masked[: self.visible_end].any()

    def _fed(self) -> None:
        """Note that the step which was just made caches the finished blocks."""
        for block in self.pipeline:
            if block.state == "to cache":
                block.state = "cached"
                self.cached = block.end

    def _close(self) -> None:
        """Finish the blocks without masks that no active block precedes."""
        # From left to right: cached keys and values must not come from what may still change.
        waiting = False
        for block in self.pipeline:
            if block.active and not waiting and not block.masked:
                block.state = "to cache"
            waiting = waiting or block.active

    def _append(self) -> None:
        last = self.pipeline[-1]  # the prompt, at first: decoded as a whole
        room = last.end < len(self.x)
        # Reached by equality, as tau_act is, where the paper says "exceeds": so the official code
        # has it.
        if room and not self.revealed_eos and last.decoded >= self.decoder.tau_add:
            end = min(last.end + self.block_size, len(self.x))
            self.pipeline.append(PipelineBlock(last.end, end))

    def _activate(self) -> None:
        for before, block in zip(self.pipeline, self.pipeline[1:], strict=False):
            if before.decoded >= self.decoder.tau_act:  # and stays so, whatever becomes of `before`
                block.predecessor_done = True
                if block.state == "semi-active":
                    block.state = "fully active"

    def _reveal_in(self, block: PipelineBlock, predictions: Predictions) -> None:
        low, high = np.searchsorted(self.wanted, (block.start, block.end))
        confidence = predictions.confidence[low:high]  # of the block's masks
        # Strictly above, unlike the two shares. The confidence is that of the chosen token.
        chosen = np.flatnonzero(confidence > self.decoder.tau_conf)
        if not len(chosen) and block.predecessor_done and len(confidence):
            # Only a fully active block must reveal one: its left context is nearly decided. The
            # first open block always is, so every forward makes progress.
            chosen = np.array([self.sureness(predictions)[low:high].argmax()])
        for i in low + chosen:  # indices into wanted
            position, token = int(self.wanted[i]), int(predictions.token[i])
            self.reveal(position, token, float(predictions.confidence[i]))
            block.masked -= 1
            if token in self.contract.end_ids:  # what is after it is padding or noise
                self.revealed_eos = True
                self.visible_end = min(self.visible_end, position + 1)

    def sureness(self, predictions: Predictions) -> Floats:
        """Say how sure each prediction is, ``[N]``, by the option forced_pick."""
        if self.decoder.forced_pick == "confidence":
            return predictions.confidence
        assert predictions.entropy is not None and predictions.margin is not None
        entropy = self.decoder.forced_pick == "entropy"
        return -predictions.entropy if entropy else predictions.margin

    def blocks(self) -> list[BlockView]:
        return [self.view(b.start, b.end, b.state) for b in self.pipeline[1:]]
