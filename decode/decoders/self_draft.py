"""Self-drafting: an autoregressive model drafts its next tokens and verifies them, without loss.

A forward feeds two kinds of rows. Clean rows hold the last token and the drafts behind it; no
adapter touches them, so each predicts the next token as the original model does. Draft rows hold no
token: with the adapter (`distill.objectives.self_draft`) the k-th behind a clean row guesses the
(k + 1)-th token after it. Drafts are taken as long as each is what the clean row before it
predicts, and the row of the last one taken predicts one token more. So what is taken is what the
model alone would give, whatever the drafts are. A last token a, drafts b and c, and draft rows V:

    row        0  1  2 | 3   4  5 | 6  7
    fed        a  b  c | V   V  V | V  V      one behind a, two behind b, two behind c
    position   4  5  6 | 5   6  7 | 7  8
    predicts   5  6  7 | 6   7  8 | 8  9
    row 5 sees the text up to b, row 4 and itself

If row 0 predicts b and row 1 predicts x instead of c, then b and x are taken, and rows 4 and 5 have
the next drafts, which follow x. What rows 6 and 7 drafted behind c is of no use.

Which draft rows are worth feeding depends on where drafts end. A draft's confidence is taken as the
chance that it holds; so each clean row has a chance to be the last one taken, and its draft rows a
chance to be of use. The likeliest `rows` are fed (placement ``expected``). Two fixed placements are
there to compare with: ``linear`` has draft rows behind the last draft alone, ``quadratic`` as many
behind every clean row.

Where the text's last tokens have stood before, what followed them then is drafted too (a lookup,
as in prompt lookup decoding, which needs no adapter), with a chance that grows with the number of
tokens that are alike. Of the two the drafts that promise more are verified. So a model without a
self-drafting adapter decodes its repetitions in few forwards, and everything else one by one.

A drawn token follows from the model's distribution, the seed and the number of the token. A draft
is drawn with the number of the token that it stands for, so the two are often the same. What is
taken is exactly what decoding one by one would draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from d2f.contract import DRAFT, Contract
from d2f.spans import stack
from decode.decoders.autoregressive import Autoregressive, AutoregressiveSession
from decode.decoders.base import Decoder, max_new_tokens_option, option
from decode.step import BlockView, Ints, Predictions, Step

Placement = Literal["expected", "linear", "quadratic"]
PAYS = 0.5
"""Tokens that a row must promise to be fed, over a session's share of the rows that are nearly
free: of SmolLM2 on a CPU, 4 in all, one more takes a tenth of a forward."""
PAYS_TOGETHER = 1.2
"""The same of all draft rows of a step: the adapter's products cost about as much for one."""
MOST_DRAFTS = 64  # of a contract that does not say how many were trained
HOLDS = 0.5
"""Chance that a draft holds, before its own confidence is known."""
LOOKED_UP = (0.0, 0.26, 0.57, 0.62, 0.69, 0.74, 0.75, 0.92)
"""Chance that a token follows again what it followed before, by the number of tokens that are
alike: of SmolLM2's own answers, 170,000 tokens. The last is of all that is longer."""
ROW_AND_ROW = 0.5
"""Share of a draft that a draft row is worth: it takes another row to verify it."""


@dataclass(frozen=True)
class SelfDraft(Decoder):
    """Decode as the model without its adapter would, several tokens a forward."""

    name: ClassVar[str] = "self_draft"
    summary: ClassVar[str] = "drafts by adapter or repeated text (default for its adapters)"
    labels: ClassVar[Mapping[str, str]] = {"cached": "verified", "fully active": "drafted"}

    rows: int = option(
        9,
        "most rows of a forward, at least 1; beyond a request's share of the engine's `max_rows` "
        "only those that pay",
        search=(4, 6, 9, 12, 16),
    )
    drafts: int | None = option(
        None, "draft rows behind a clean row, at most", shown="as trained", search=(2, 3, 4)
    )
    placement: Placement = option(
        "expected", "which clean rows have draft rows: those that are likely to be the last taken"
    )
    lookup: int = option(
        2,
        "draft what followed the last N tokens where they stood before, at least 1; more than "
        f"{len(LOOKED_UP) - 1}: never",
    )
    max_new_tokens: int | None = max_new_tokens_option()

    check = Autoregressive.check

    def begin(self, prompt: list[int], contract: Contract) -> SelfDraftSession:
        return SelfDraftSession(self, prompt, contract)


class SelfDraftSession(AutoregressiveSession):
    """Decode a request. Positions before `known` are verified, all but the last of them cached.

    drafted: what is drafted for the positions from `known` on, by the last forward, with its
        confidence in chances, or looked up.
    groups: draft rows behind each clean row of the step; their slots follow the sequence's.
    counts: accepted, drafts that held; rejected, those that did not, with the drafts behind them;
        draft_rows, how many were fed.
    """

    def __init__(self, decoder: SelfDraft, prompt: list[int], contract: Contract):
        super().__init__(decoder, prompt, contract)
        self.decoder = decoder
        trained = 0 if contract.draft_id is None else contract.block_size or MOST_DRAFTS
        self.depth = min(decoder.drafts or MOST_DRAFTS, trained)
        self.drafted: Ints = np.zeros(0, dtype=np.int64)
        self.chances = np.zeros(0)
        self.groups: list[int] = []
        self.counts |= {"accepted": 0, "rejected": 0, "draft_rows": 0}

    @property
    def slots(self) -> int:
        # A forward of so many rows has one clean row at least.
        return len(self.x) + self.most_rows - 1

    @property
    def most_rows(self) -> int:
        if self.decoder.placement == "expected":
            return self.decoder.rows
        return min(self.decoder.rows, (self.depth + 1) ** 2)

    def step(self) -> Step | None:
        if self.done:
            return None
        left = len(self.x) - self.known  # tokens that may still be decoded
        fixed = self.decoder.placement != "expected"
        rows = min(self.most_rows, self.width) if fixed else self.decoder.rows
        self.groups = groups = self.place(rows, left)
        drafts = len(groups) - 1
        self.counts["draft_rows"] += sum(groups)
        self.x[self.known : self.known + drafts] = self.drafted[:drafts]
        self.drafted = self.drafted[:drafts]
        fed = np.arange(self.cached, self.known + drafts)
        # Of each draft row: the position of the clean row before its group, and its number in it.
        after = np.repeat(self.known - 1 + np.arange(len(groups)), groups)
        first = np.repeat(np.cumsum([0, *groups[:-1]]), groups)  # of its group, among draft rows
        own = np.arange(len(after))
        scratch = len(self.x)
        clean = self.known - 1 - self.cached + np.arange(len(groups))
        positions = np.concatenate((fed, after + 1 + own - first))
        read = np.concatenate((clean, len(fed) + own))
        cached, self.cached = self.cached, self.known  # rows of verified tokens are final
        return Step(
            tokens=np.concatenate((self.x[fed], np.full(len(own), DRAFT))),
            positions=positions,
            slots=np.concatenate((fed, scratch + own)),
            spans=stack(
                (0, np.concatenate((fed, after)) + 1),
                (
                    scratch + np.concatenate((np.zeros_like(fed), first)),
                    scratch + np.concatenate((np.zeros_like(fed), own + 1)),
                ),
            ),
            read=read,
            cached=cached,
            draws=positions[read] + 1 - self.prompt_length,
        )

    def place(self, rows: int, left: int) -> list[int]:
        """Choose the draft rows behind each clean row of the next forward: a list of their numbers,
        one for the last known token and one for each draft that is fed.

        rows: of the forward, beside those that are not cached yet. left: tokens that may still be
        decoded; nothing is drafted behind them.
        """
        drafts = min(len(self.drafted), left - 1)
        if self.decoder.placement != "expected":
            return self.fixed(rows, drafts, left)
        # Chance that so many drafts hold, and that exactly so many do.
        reached = np.cumprod(np.concatenate(([1.0], self.chances[:drafts])))
        last = reached * np.concatenate((1 - self.chances[:drafts], [1.0]))
        worth = [(-reached[i], 0, i) for i in range(1, drafts + 1)]
        worth += [
            (-last[i] * ROW_AND_ROW * HOLDS**k, k, i)
            for i in range(drafts + 1)
            for k in range(1, min(self.depth, left - 1 - i) + 1)
        ]
        scarce = self.share < rows  # else all are nearly free
        worth = sorted(one for one in worth if not scarce or -one[0] >= PAYS / self.share)
        chosen = worth[: rows - 1]
        together = -sum(minus for minus, k, _ in chosen if k)
        if scarce and together < PAYS_TOGETHER / self.share:
            chosen = [one for one in worth if not one[1]][: rows - 1]
        groups = [0] * (1 + sum(k == 0 for _, k, _ in chosen))
        for _, k, i in chosen:
            if k and i < len(groups):
                groups[i] += 1
        return groups

    def fixed(self, rows: int, drafts: int, left: int) -> list[int]:
        """Choose them where the placement says it: the widest that has no more rows."""
        for depth in range(self.depth, 0, -1):
            fed = min(drafts, depth)
            groups = [min(depth, left - 1 - i) for i in range(fed + 1)]
            if self.decoder.placement == "linear":
                groups[:-1] = [0] * fed
            if 1 + fed + sum(groups) <= rows:
                return groups
        return [0]

    def accept(self, predictions: Predictions) -> None:
        self.revealed = []
        count = len(self.groups)
        token, confidence = predictions.token, predictions.confidence
        for i in range(count):
            self.reveal(self.known, int(token[i]), float(confidence[i]))
            self.known += 1
            if self.done:
                break
            if i < count - 1 and self.drafted[i] != token[i]:
                self.counts["rejected"] += count - 1 - i
                break
            self.counts["accepted"] += int(i < count - 1)
        begin = count + sum(self.groups[:i])
        part = slice(begin, begin + self.groups[i])
        self.drafted, self.chances = token[part], confidence[part].astype(float)
        self.look_up(self.decoder.lookup)
        # The row of the last known token has not been fed.
        self.cached = self.known - 1

    def look_up(self, least: int) -> None:
        """Draft what followed the longest end of the text, of `least` tokens or more, where it
        stood last, if that promises more than the drafts that are there."""
        x, most = self.x[: self.known], len(LOOKED_UP) - 1
        ends, alike = np.flatnonzero(x[:-1] == x[-1]), 1  # where it stood, and how much is alike
        while alike < most and len(ends):
            longer = ends[ends >= alike]
            longer = longer[x[longer - alike] == x[-1 - alike]]
            if not len(longer):
                break
            ends, alike = longer, alike + 1
        if alike < least or not len(ends):
            return
        count = self.decoder.rows - 1
        chances = np.array([LOOKED_UP[min(alike + i, most)] for i in range(count)])
        if np.cumprod(chances).sum() > np.cumprod(self.chances).sum():
            # What stood last right before the end may go on there as it began: a loop.
            self.drafted, self.chances = np.resize(x[ends[-1] + 1 :], count), chances

    def blocks(self) -> list[BlockView]:
        views, drafts = super().blocks(), tuple(self.drafted.tolist())
        if drafts:
            end = views[0].end
            views.append(BlockView(end, end + len(drafts), "fully active", drafts))
        return views
