"""WINO's check (arXiv 2507.18578) inside D2F's pipeline, with the exact cache: a block is cached
once its tokens can no longer be taken back, and its shadow never is.

A shadow (`decode.decoders.shadow`) sees what its block sees: the blocks before it and its own.
Taking tokens back lowers the decoded share of a block; what it once set off (an appended block, a
fully active successor) stays. End ids are looked for anew after each forward, since one may be
taken back: while there is one no block is appended, and decoding stops early only for one that is
final. Blocks after an end that is not yet final are kept, so early exit changes no visible token.
"""

from __future__ import annotations

import abc
from collections import Counter

import numpy as np

from d2f.contract import Contract
from decode.decoders.d2f import D2F, FORMS, D2FSession, PipelineBlock
from decode.decoders.shadow import Revocations, add_shadow, shadow_slots, weakest
from decode.step import Floats, Ints, Predictions, Step

Verified = tuple[PipelineBlock, Ints]  # a block, those of its positions that a shadow predicts
Checked = list[tuple[PipelineBlock, Ints, Floats]]  # and what it gives the tokens there


class RevokingSession(D2FSession):
    """Decode a request. Each response position has scratch slots for its shadow.

    verified: the positions int64 ``[V]`` that the last step's shadows predict, by block.
    """

    def __init__(self, decoder: D2F, prompt: list[int], contract: Contract):
        super().__init__(decoder, prompt, contract)
        self.revocations = Revocations(self)
        self.verified: list[Verified] = []

    @property
    def slots(self) -> int:
        return len(self.x) + shadow_slots(len(self.x) - self.prompt_length, self.contract)

    @property
    def settled_end(self) -> int:
        end = self.prompt_length
        for block in self.pipeline:
            if block.active or len(self._doubtful(block)):  # any of its tokens may go
                break
            end = block.end
        return end

    @abc.abstractmethod
    def _doubtful(self, block: PipelineBlock) -> Ints:
        """Find the positions of a block whose tokens may be taken back after the next forward."""

    @abc.abstractmethod
    def _judge(self, checked: Checked, drafted: dict[int, int]) -> None:
        """Take back what the shadows do not bear out. checked: of each block, the positions that
        were verified and the probabilities of their tokens. drafted: how many tokens this forward
        decided, by the start of their block."""

    def needed_end(self) -> int:
        return self.pipeline[-1].end  # a decided block is fed to be verified

    def step(self) -> Step | None:
        step = super().step()
        if step is None:
            return None
        # Read after the own rows, block after block: `_checked` takes the predictions in this
        # order.
        self.verified = [(block, self._doubtful(block)) for block in self.pipeline]
        ends = self.ends()
        for block, positions in self.verified:
            # A shadow's slots follow from its block's place, so those of two blocks never meet.
            slot = len(self.x) + shadow_slots(block.start - self.prompt_length, self.contract)
            step = add_shadow(
                step, self.x, ends, block.start, block.end, positions, slot, self.contract
            )
        return step

    def accept(self, predictions: Predictions) -> None:
        self.revealed = []
        # Reveal before judging: the shadows looked at the tokens that were fed, so what is revealed
        # now can be checked by the next forward at the earliest.
        drafted = {}
        for block in self.pipeline:
            if block.active:
                masked = block.masked
                self._reveal_in(block, predictions)
                drafted[block.start] = masked - block.masked
        self._judge(self._checked(predictions), drafted)
        # Only now: a block that was complete may have lost a token.
        self._close()
        # Look for it again: the end id that stopped the appending may just have been taken back.
        response = self.x[self.prompt_length :]
        self.revealed_eos = bool(np.isin(response, self.contract.end_ids).any())
        self.revocations.count()

    def revoke_in(self, block: PipelineBlock, positions: Ints) -> None:
        """Take decided positions of a block back."""
        self.revocations.revoke(positions)
        block.masked += len(positions)

    def _checked(self, predictions: Predictions) -> Checked:
        """List the probabilities that the step's shadows gave, block after block. They follow the
        predictions of `wanted`, in the order in which `step` added the shadows."""
        checked, first = [], len(self.wanted)
        probability = predictions.queried_probability
        if probability is None:  # nothing is in doubt
            probability = np.zeros(0, np.float32)
        for block, positions in self.verified:
            checked.append((block, positions, probability[first : first + len(positions)]))
            first += len(positions)
        return checked

    def _done(self) -> bool:
        # Among settled tokens only: an end id that may be taken back ends nothing.
        if self.decoder.early_exit and self.saw_eos:
            return True
        return not any(block.active or len(self._doubtful(block)) for block in self.pipeline)


class AlwaysSession(RevokingSession):
    """Each forward verifies the decided tokens of the active blocks.

    A block may take back fewer tokens than its last deciding forward decided, so that after n of
    these it holds at least n: the response takes at most max_new_tokens forwards. That is WINO's
    bound; its condition that two tokens be decided beside is left out, so that a block that waits
    for its predecessor is verified too. A finished block whose predecessors are finished is final.
    One block of 4, tau_revoke 0.9; spare is how many it may take back::

        forward    decides    spare    the shadow gives    takes back    then decided
        1          3          0                                          3
        2          1          2        .2  .1  .95         2             2
        3          1          0                                          3
        4          1          0                                          4
    """

    def __init__(self, decoder: D2F, prompt: list[int], contract: Contract):
        self.spare: Counter[int] = Counter()  # tokens that may be taken back, by a block's start
        super().__init__(decoder, prompt, contract)

    def _doubtful(self, block: PipelineBlock) -> Ints:
        # Nothing could be taken back, so no shadow is fed for it.
        if not (block.active and self.spare[block.start]):
            return np.zeros(0, dtype=np.int64)
        return block.start + np.flatnonzero(~self.masked[block.start : block.end])

    def _judge(self, checked: Checked, drafted: dict[int, int]) -> None:
        for block, positions, probability in checked:
            spare = self.spare[block.start]
            chosen = weakest(probability, self.decoder.tau_revoke, spare)
            self.revoke_in(block, positions[chosen])
            decided = drafted.get(block.start, 0)
            # Spare is one less than it decided: each such forward fills the block by a token.
            self.spare[block.start] = decided - 1 if decided else spare - len(chosen)


class CommitSession(RevokingSession):
    """The forward that would cache a block verifies all of it, also what its last forward decided.

    Where a token falls below tau_revoke it is masked, the block is active again and not cached,
    nor is any after it. A position is taken back at most once: what is decided there a second time
    stays, so the response takes at most 3 * max_new_tokens + 1 forwards. The last block is
    verified too, by a forward that the plain pipeline does not have. One block of 4, at positions 2
    to 5, tau_revoke 0.9::

        forward    decides     the shadow gives    then
        1          2 3 4 5                         to cache
        2                      .95 .2 .95 .95      position 3 is masked, the block active again
        3          3                               to cache
        4                      .95    .95 .95      cached; position 3 is not asked about again
    """

    def __init__(self, decoder: D2F, prompt: list[int], contract: Contract):
        super().__init__(decoder, prompt, contract)
        self.sure = np.arange(len(self.x)) < len(prompt)  # never taken back (again)

    def _doubtful(self, block: PipelineBlock) -> Ints:
        if block.state != "to cache":
            return np.zeros(0, dtype=np.int64)
        return block.start + np.flatnonzero(~self.sure[block.start : block.end])

    def _fed(self) -> None:
        """Cache nothing yet: what is fed is cached only once its predictions are there."""

    def _judge(self, checked: Checked, drafted: dict[int, int]) -> None:
        refused = False
        for block, positions, probability in checked:
            if block.state != "to cache":
                continue
            if not refused:
                chosen = weakest(probability, self.decoder.tau_revoke, len(positions))
                self.revoke_in(block, positions[chosen])
                self.sure[positions[chosen]] = True  # what is decided there next stays
                refused = len(chosen) > 0
            # A block after a refused one saw its tokens: verified again once that is done.
            block.state = "fully active" if refused else "cached"
            if not refused:
                self.cached = block.end


FORMS.update(always=AlwaysSession, commit=CommitSession)
