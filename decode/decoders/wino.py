"""WINO, "wide in, narrow out" (arXiv 2507.18578): draft many tokens, take back those that the rest
does not bear out.

One forward drafts (decides the masked tokens of the block above tau1) and verifies: a shadow of the
block (`decode.decoders.shadow`) predicts each decided position without seeing its token, and a
token that it gives less than tau2 is masked again. Tokens drafted by a forward are verified by
the next one, those of a block's last forward never.

One block of 4 at positions 2 to 5, tau1 0.6, tau2 0.9; in brackets what a forward drafts::

    forward    block              shadow of    gives       then
    1          m   [b] m   [d]    nothing yet              b, d
    2          [a] b   m   d      3 5          .95 .3      d is masked again: a, b
    3          a   b   [c] [e]    2 3          .95 .95     done; c and e are not verified
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.base import block_size_option, option, ratio
from decode.decoders.blockwise import Blockwise, BlockwiseSession
from decode.decoders.shadow import Revocations, add_shadow, shadow_slots, weakest
from decode.step import Ints, Predictions, Step


@dataclass(frozen=True)
class Wino(Blockwise):
    """Options of WINO.

    tau2: 0 feeds no shadow, and then tau1 may be any. Else text settles a block at a time: before a
        block is done, all of its tokens may change.
    caps: the official code's bounds, which the paper does not have: of m masked positions at most
        int(0.7 m), at least 5 and at most 20, are decided in a forward; fewer are taken back than
        the forward before decided, the least likely first; none where fewer than two are decided.
        False takes the paper's two thresholds alone (equation 4), but after n forwards of a block n
        of its positions stay decided: where more would be taken back, the least likely are. Either
        way a block takes at most as many forwards as it has positions.
    """

    name: ClassVar[str] = "wino"
    summary: ClassVar[str] = "drafts widely, takes back what the rest does not bear out"

    block_size: int | None = block_size_option(128)
    tau1: float = ratio(0.6, "confidence above which a token is drafted, below tau2")
    tau2: float = ratio(
        0.9, "probability below which a drafted token is taken back (0 takes none back)"
    )
    caps: bool = option(
        True,
        "the official code's bounds on tokens drafted and taken back in a forward, or the paper's "
        "two thresholds alone",
        shown="the bounds",
    )
    leakage: bool = option(
        False, "let the shadow see the tokens that it verifies, the paper's ablation"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.tau2 <= self.tau1:
            raise InputError(
                f"tau1 must be below tau2 (tau2 0 verifies nothing), "
                f"got tau1 {self.tau1!r} and tau2 {self.tau2!r}"
            )

    def begin(self, prompt: list[int], contract: Contract) -> WinoSession:
        return WinoSession(self, prompt, contract)


class WinoSession(BlockwiseSession):
    """Decode a request. The block's shadow has scratch slots of its own.

    verified: int64 ``[V]``, the positions that the last step's shadow predicts. forwards: of this
    block. last: how many tokens the block's last forward decided.
    """

    decoder: Wino

    def __init__(self, decoder: Wino, prompt: list[int], contract: Contract):
        super().__init__(decoder, prompt, contract)
        self.revocations = Revocations(self)
        self.verified = np.zeros(0, dtype=np.int64)

    @property
    def slots(self) -> int:
        verified = self.decoder.size if self.decoder.tau2 else 0
        return super().slots + shadow_slots(verified, self.contract)

    @property
    def settled_end(self) -> int:
        # Any token of a block in progress may be taken back, also one left of the first mask.
        undecided = super().settled_end
        if self.decoder.tau2 and self.masked[self.start : self.end].any():
            return min(undecided, self.start)
        return undecided

    def begin_block(self) -> None:
        # The official code begins with a `last` of 30: nothing is decided yet that it could bound.
        self.last, self.forwards = 0, 0

    def feed_step(self) -> Step:
        step = super().feed_step()
        decided = self.start + np.flatnonzero(~self.masked[self.start : self.end])
        self.verified = decided if self._may_revoke() else decided[:0]
        return add_shadow(
            step, self.x, self.ends, self.start, self.end, self.verified, super().slots,
            self.contract, leakage=self.decoder.leakage,
        )  # fmt: skip

    def choose(self, predictions: Predictions) -> Ints:
        confidence = predictions.confidence[: len(self.wanted)].astype(np.float64)  # as official
        # Stable: of equal confidences the leftmost comes first.
        order = np.argsort(-confidence, kind="stable")
        count = max(1, int((confidence > self.decoder.tau1).sum()))
        if self.decoder.caps:
            # Not in the paper: clamp(int(0.7 m), 5, 20).
            count = min(count, max(5, min(20, int(0.7 * len(order)))))
        return order[:count]

    def accept(self, predictions: Predictions) -> None:
        super().accept(predictions)
        drafted = len(self.revealed)
        self.forwards += 1
        if len(self.verified):
            assert predictions.queried_probability is not None
            probability = predictions.queried_probability[len(self.wanted) :]  # of the shadow
            chosen = weakest(probability, self.decoder.tau2, self._most(drafted))
            self.revocations.revoke(self.verified[chosen])
        self.last = drafted  # before any was taken back, as the official code counts it
        self.revocations.count()

    def _may_revoke(self) -> bool:
        """Say whether any decision could be taken back in the next forward."""
        if not self.decoder.tau2:
            return False
        # With the bounds, tokens are taken back only where two or more are decided beside them,
        # which needs two masks, and fewer than the last forward decided: else no shadow is fed.
        return not self.decoder.caps or (self.last > 1 and len(self.wanted) > 1)

    def _most(self, drafted: int) -> int:
        """Count the decisions that may be taken back where `drafted` were just made."""
        if self.decoder.caps:
            # Fewer than the forward before decided: after n forwards at least n positions hold.
            return self.last - 1 if drafted > 1 else 0
        # After n forwards n decisions stay: a block takes at most as many forwards as positions.
        return len(self.verified) + drafted - self.forwards
