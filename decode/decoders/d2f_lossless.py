"""D2F's pipeline that drafts itself, without loss: FreeDave's rule (arXiv 2510.00294) with D2F's
whole deterministic step in the place of static decoding's.

While a state of the pipeline is fed, the states that would follow it by the predictions at hand
(which are of the state before: stale) are fed beside it as branches. What the pipeline does in the
fed state is then known; where that is the first branch's state, what it does there is known too,
and so on. A forward takes one step of the pipeline and one more for each branch that holds.

What is cached is fixed while branches are checked: branches see the keys and values of finished
blocks in the request's own slots, write to scratch slots only, and a block that a branch finished
is fed with its final tokens into its own slots before it counts as cached.

As in the example of `decode.decoders.d2f`, with one branch a forward. After forward 1 the
stale guess of position 3 is b::

    forward           block [2, 4)    block [4, 6)
    2    x            a m             m m             reveals b, as drafted, and nothing else
         branch       a b             m m             so this is the next state: reveals c
    3    x            a b             c m             reveals d: three forwards for four steps

Had x revealed c too, the branch would not have been the next state; only its rows would be lost.
"""

from __future__ import annotations

from copy import copy

import numpy as np

from d2f.contract import Contract
from decode.decoders.branches import Branch, split, with_branches
from decode.decoders.d2f import D2F, FORMS, D2FSession
from decode.step import Predictions, Step


class LosslessSession(D2FSession):
    """Decode a request. branches: the states drafted after the one that is fed, each from the last.

    guesses: (token, confidence, sureness) by position, the last predictions. counts: ``drafted``
    branches, and how many of them were ``accepted``.
    """

    def __init__(self, decoder: D2F, prompt: list[int], contract: Contract):
        super().__init__(decoder, prompt, contract)
        # The most branches of a forward: each state decides a token more than the one before.
        self.most = min((decoder.lossless or 1) - 1, decoder.length)
        self.branches: list[D2FSession] = []
        self.guesses: dict[int, tuple[int, float, float]] = {}
        self.counts |= {"drafted": 0, "accepted": 0}

    @property
    def slots(self) -> int:
        # The sequence, a spare slot for rows fed only to be read, a response for each branch.
        return len(self.x) + 1 + self.most * self.decoder.length

    def needed_end(self) -> int:
        # A branch may see any row of the state that it is drafted from.
        return self.pipeline[-1].end if self.most else super().needed_end()

    def feed_step(self) -> Step:
        own = super().feed_step()
        # After the own step: what it caches counts as cached in the branches, which see it there.
        self.branches = self._drafts()
        end, parts = self.pipeline[-1].end, []
        for state in self.branches:
            stop = state.pipeline[-1].end
            # Positions that only a later state has opened are in no own row: compared up to `end`.
            # The first branch reveals a token there, since a fully active block always does.
            differs = int((state.x[:end] != self.x[:end]).argmax())
            read = state.wanted - self.contract.logit_shift
            parts.append(Branch(state.x, state.ends(), stop, differs, read))
        return with_branches(own, parts, scratch=len(self.x) + 1, spare=len(self.x))

    def accept(self, predictions: Predictions) -> None:
        counts = [len(state.wanted) for state in (self, *self.branches)]
        first, *others = split(predictions, counts)
        self._take(first)
        revealed = self.revealed
        for state, found in zip(self.branches, others, strict=True):
            if not np.array_equal(state.x, self.x):  # the pipeline went another way
                break
            # Append and activate blocks, as `step` would have before feeding this state.
            self.advance()
            self._take(found)
            revealed = revealed + self.revealed
            self.counts["accepted"] += 1
        self.revealed = revealed
        self.counts["drafted"] += len(self.branches)

    def _take(self, found: Predictions) -> None:
        """Take one step of the pipeline; what it predicted drafts the next ones."""
        columns = found.token, found.confidence, self.sureness(found)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        self.guesses = dict(zip(self.wanted.tolist(), rows, strict=True))
        super().accept(found)

    def _drafts(self) -> list[D2FSession]:
        """Draft the states after this one from the stale predictions, as far as these tell."""
        most = min(self.most, self.width - 1)
        states: list[D2FSession] = []
        state: D2FSession = self
        while len(states) < most and self._tells(state):
            state = _fork(state)
            unknown = (0, -1.0, -np.inf)  # a block that was not open: it reveals nothing yet
            guesses = [self.guesses.get(position, unknown) for position in state.wanted.tolist()]
            tokens, *scores = zip(*guesses, strict=True)
            confidence, sureness = np.array(scores, dtype=np.float32)
            # `sureness` reads only one of entropy and margin, so both may hold it.
            stale = Predictions(np.array(tokens), confidence, entropy=-sureness, margin=sureness)
            # The plain pipeline's step: a fork of this session must not draft in its turn.
            D2FSession.accept(state, stale)
            if not state.advance():  # the request would be done: nothing to feed
                break
            states.append(state)
        return states

    def _tells(self, state: D2FSession) -> bool:
        """Say whether there are predictions for all blocks that must reveal a token."""
        # A fully active block reveals its surest token: without a prediction, which one is unknown.
        must = [b.start for b in state.pipeline if b.state == "fully active" and b.masked]
        first = state.wanted[np.searchsorted(state.wanted, must)]  # masked, of each such block
        return all(position in self.guesses for position in first.tolist())


def _fork(state: D2FSession) -> D2FSession:
    """Copy a session, so that steps of the copy leave the original as it is."""
    # Copy what a step changes in place; the counts stay shared, as no fork is ever fed.
    twin = copy(state)
    twin.x, twin.masked = state.x.copy(), state.masked.copy()
    twin.pipeline = [copy(block) for block in state.pipeline]
    return twin


FORMS["lossless"] = LosslessSession
