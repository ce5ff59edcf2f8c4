"""WeDLM's streaming decoding (`decode.decoders.wedlm_session`) without loss: what its masks are
filled with are drafts, of which the same forwards confirm what greedy decoding would give.

With verify="ar" only what greedy autoregressive decoding of the same model would give is committed.
The row of a filled slot without a gap before it, read for nothing otherwise, predicts the next
position as in any causal model. So each forward checks the tokens that masks were filled with
before (drafts), from left to right: one that is the greedy next token stays, the first that is not
becomes that token and all after it are masked again, and where all stay the last row says one token
more. The response is the greedy one whatever the drafts are (up to the rounding of forwards with
other rows in them), at least one token a forward. Drafts hold where the model was trained on next
tokens too, as WeDLM's are. The prompt and window there, but forward 1 fills positions 3 and 4; the
row of position 1, the prompt's last, gives a::

    forward          slot 2  3  4  5  6
    2    token            a  b  c  m         the rows of a, b, c give the tokens of positions 3 4 5:
                                             x  .  .    b is wrong: x, and c is masked again
                                             b  x  .    b is right, c is wrong: x
                                             b  c  d    both are right, and d is known for nothing
    3    token               x  m  m  m      after the first of these; x is fed for its row, which
                                             gives position 4
"""

from __future__ import annotations

import numpy as np

from d2f.contract import Contract
from d2f.span_makers import prefix
from decode.decoders.adaptive import Adaptive
from decode.decoders.wedlm_session import WeDLMSession, WindowRules
from decode.engine.step import Predictions, Step

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # among which a window of "auto" is chosen


class VerifiedSession(WeDLMSession, Adaptive):
    """One request with verify="ar". Positions before `known` are verified, all but the last of them
    committed; filled ones from there on are drafts.

    counts: accepted, drafts that were the greedy next token; rejected, those that were not, with
    the drafts after them.
    """

    def __init__(self, prompt: list[int], contract: Contract, rules: WindowRules):
        super().__init__(prompt, contract, rules)
        self.known = len(prompt)
        self.counts |= {"accepted": 0, "rejected": 0}
        if rules.window is None:
            own = (rules.entropy_threshold, rules.distance_penalty, rules.refill)
            self.widen_by(WIDTHS, ("wedlm", *own))
            self.rows_alone = 1

    @property
    def done(self) -> bool:
        # Nothing is verified behind an end id, so only the last token can be one.
        length = self.known - self.prompt_length
        ended = length > 0 and int(self.x[self.known - 1]) in self.contract.end_ids
        return ended or length == self.rules.length

    @property
    def window(self) -> int:
        return self.width if self.widths else super().window

    def end_of_window(self, leading: int) -> int:
        if self.widths and self.width == 1:
            # No mask: as autoregressive decoding feeds it. Drafts that are left cost a row a token
            # too, and save forwards.
            return leading
        return super().end_of_window(leading)

    @property
    def settled(self) -> list[int]:
        return self.x[self.prompt_length : self.known].tolist()

    tokens = settled

    def step(self) -> Step | None:
        return self.feed_step() if self.proceed() else None

    def proceed(self) -> bool:
        return not self.done

    def feed_step(self) -> Step:
        if self.widths and self.width == 1 and self.masked[self.known]:  # no draft is left
            return self._feed_known()
        return self.feed_window(self.known - 1)

    def _feed_known(self) -> Step:
        """What `feed_window` gives without drafts and masks, as autoregressive decoding has it, in
        less time: at high load there is one for each token."""
        self.end = self.known
        fed = np.arange(self.committed, self.known)
        self.wanted = fed[:0]
        self.counts["window_rows"] += self.known - self.begin_of_window
        read = np.array([self.known - 1 - self.committed])
        return Step(self.x[fed], fed, fed, prefix(fed + 1), read, cached=self.committed)

    def accept(self, predictions: Predictions) -> None:
        self.revealed = []
        if not len(self.wanted) and self.masked[self.known]:  # the last known token alone was read
            token, confidence = int(predictions.token[0]), float(predictions.confidence[0])
            self.reveal(self.known, token, confidence)
            self.committed, self.known = self.known, self.known + 1
            return
        # Rows known - 1, known, ...: each predicts the next position, as in any causal model.
        filled = len(predictions.token) - len(self.wanted)
        ahead = slice(self.known, self.known + filled)
        found = predictions.token[:filled].tolist(), predictions.confidence[:filled].tolist()
        drafts = self.x[ahead].tolist(), self.masked[ahead].tolist()
        # Where the response ends before the rows do, the last drafts are behind it.
        for token, confidence, draft, masked in zip(*found, *drafts, strict=False):
            drafted, right = not masked, draft == token
            self.reveal(self.known, token, confidence)
            self.known += 1
            self.counts["accepted"] += int(drafted and right)
            if drafted and not right:  # the rows after it saw a wrong token
                self._undo_drafts()
                break
            if self.done:
                break
        else:
            # No draft was wrong and the response goes on: what the masks say rests on right tokens.
            self._draft(filled, predictions)
        # The row of the last known token has not been fed with it yet.
        self.committed = self.known - 1

    def _undo_drafts(self) -> None:
        drafts = ~self.masked[self.known :]
        self.counts["rejected"] += 1 + int(drafts.sum())
        assert self.contract.mask_id is not None
        self.x[self.known :] = self.contract.mask_id
        self.masked[self.known :] = True

    def _draft(self, filled: int, predictions: Predictions) -> None:
        """Fill masks, whose predictions follow those of the `filled` rows; the first mask is known
        by now."""
        masks, own = self.wanted[1:], slice(filled + 1, None)
        if len(masks):
            assert predictions.entropy is not None
            chosen = self.choose(masks, predictions.entropy[own])
            self.x[masks[chosen]] = predictions.token[own][chosen]
            self.masked[masks[chosen]] = False
