"""WeDLM's streaming decoding (arXiv 2512.22737, section 4): parallel decoding under a causal mask.

A window of masks follows what is decoded. Each forward feeds the window reordered, filled slots
before masked ones, each kind in ascending order, causally in that order and with the positions of
the text: a filled slot sees what is filled before it, a masked one all that is filled and the masks
before it. Masks of low entropy are filled, earlier ones more readily. Filled slots that follow the
decoded text without a gap are fed as any causal model feeds them, so their keys and values are
final: they are committed. Filled tokens are never revised.

Prompt ``7 8`` at positions 0 1, a window of 4, m the mask id; a row at slot s sees ``[0, s]``::

    forward          slot 0  1  2  3  4  5  6
    1    token            7  8  m  m  m  m          fills positions 2 and 4 (say with a and c)
         position         0  1  2  3  4  5
    2    token                  a  c  m  m          a's row is final, no gap is before it; c's is
         position               2  4  3  5          not, it does not see position 3, which is filled
    3    token                     b  c  m  m       with b. c is fed anew, at the slot of its
         position                  3  4  5  6       position; the window moved on by a's slot

The published algorithm feeds the prompt in a forward of its own and discards its logits, and ends
with one that only commits the last tokens. Both are left out here, the tokens are the same: the
prompt is fed with the first window, and nothing is fed once the response is known. So `forwards`
counts every call of the model, the prompt's included, and is two less than the calls there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from d2f.contract import Contract
from d2f.span_makers import prefix
from decode.decoders.base import MaskedSession
from decode.engine.result import BlockView
from decode.engine.step import Floats, Ints, Predictions, Step

Refill = Literal["paper", "repository", "block"]


@dataclass(frozen=True)
class WindowRules:
    """The options of `decode.decoders.wedlm.WeDLM` as its sessions read them, once the length is
    known. length: new tokens, at most; overhang: positions beyond it that may be decoded. window:
    slots, None where the engine chooses."""

    length: int
    overhang: int
    window: int | None
    entropy_threshold: float | None
    distance_penalty: float
    refill: Refill
    bidirectional: bool


class WeDLMSession(MaskedSession):
    """One request. The rows of a step, in their physical order, take the slots that follow the
    committed ones: a committed row's slot is its position, every row sees the slots up to its own.

    limit: where the response ends; with refill ``repository`` x goes on beyond it. committed: rows
    before it are fed no longer. end: of the window, from the first step on. wanted: int64 ``[N]``,
    the masks of the window, ascending. counts: ``window_rows`` after the prompt's, in all forwards.
    """

    def __init__(self, prompt: list[int], contract: Contract, rules: WindowRules):
        super().__init__(prompt, rules.length + rules.overhang, contract)
        self.rules = rules
        self.limit = len(prompt) + rules.length
        self.committed = 0
        self.wanted: Ints = np.zeros(0, dtype=np.int64)
        self.counts["window_rows"] = 0

    @property
    def leading(self) -> int:
        """The first masked position."""
        return int(np.argmax(self.masked)) if self.masked.any() else len(self.x)

    @property
    def settled(self) -> list[int]:
        return self.x[self.prompt_length : min(self.leading, self.limit)].tolist()

    @property
    def tokens(self) -> list[int]:
        part = slice(self.prompt_length, self.limit)
        return self.x[part][~self.masked[part]].tolist()

    @property
    def done(self) -> bool:
        """Whether the response is known up to its first end id or its limit."""
        settled = self.settled
        ended = any(token in self.contract.end_ids for token in settled)
        return ended or len(settled) == self.rules.length

    def step(self) -> Step | None:
        if self.done:
            return None
        leading, begin = self.leading, self.begin_of_window
        step = self.feed_window(leading)
        # Its rows saw no mask: final with this forward. Block by block, only a whole window is.
        part = self.rules.refill == "block" and leading < begin + self.window
        self.committed = begin if part else leading
        return step

    @property
    def begin_of_window(self) -> int:
        return max(self.committed, self.prompt_length)

    @property
    def window(self) -> int:
        """Its slots."""
        assert self.rules.window is not None
        return self.rules.window

    def end_of_window(self, leading: int) -> int:
        """Where what is fed ends, the first mask being at `leading`."""
        begin = self.begin_of_window
        end = begin + self.window
        if self.rules.refill == "repository" or leading >= end:
            # The official code appends before it commits: up to 2 W rows, and more masks compete.
            end += leading - begin  # a mask for each slot that this forward commits
        return min(end, len(self.x))

    def feed_window(self, first: int) -> Step:
        """The step that reads the filled rows from position `first` up to the first mask, then
        the masks of the window. It feeds what is not committed, at first with it the prompt."""
        leading, begin = self.leading, self.begin_of_window
        self.end = self.end_of_window(leading)
        fed = np.arange(self.committed, self.end)
        filled, self.wanted = fed[~self.masked[fed]], fed[self.masked[fed]]
        # Observed tokens come first, so that under a causal mask every mask sees all of them, also
        # those to its right in the text.
        order = np.concatenate((filled, self.wanted))
        ends = fed + 1
        if self.rules.bidirectional:
            # A window that is filled is committed causally, beside the next one's masks.
            ends[fed >= (leading if leading >= begin + self.window else begin)] = self.end
        self.counts["window_rows"] += int((fed >= self.prompt_length).sum())
        return Step(
            tokens=self.x[order],
            # RoPE has the positions of the text; a row is visible by its slot. The two agree for
            # all that is committed, and a filled slot behind a gap is fed anew until the gap is
            # closed.
            positions=order,
            slots=fed,
            spans=prefix(ends),
            read=np.concatenate(  # by slot: the filled rows before the gap, then the masks
                (np.arange(first, leading) - self.committed, np.arange(len(filled), len(fed)))
            ),
            cached=self.committed,
            uncertainty=len(self.wanted) > 0,  # which masks to fill is all that it is for
        )

    def accept(self, predictions: Predictions) -> None:
        self.revealed = []
        assert predictions.entropy is not None
        for i in self.choose(self.wanted, predictions.entropy):
            confidence = float(predictions.confidence[i])
            self.reveal(int(self.wanted[i]), int(predictions.token[i]), confidence)

    def choose(self, masks: Ints, entropy: Floats) -> Ints:
        """Which of the masks at these positions, ascending, to fill, as indices. All in fp32, as in
        the official code."""
        # Only what has no gap before it is committed, so earlier masks are filled more readily.
        distance = (masks - masks[0]).astype(np.float32)
        penalised = entropy + distance * self.rules.distance_penalty
        threshold = self.rules.entropy_threshold
        # Strictly below, as the official code has it.
        chosen = np.flatnonzero(penalised < (-np.inf if threshold is None else threshold))
        # None below the threshold: the lowest, so that every forward fills a mask.
        return chosen if len(chosen) else penalised.argmin(keepdims=True)

    def reveal(self, position: int, token: int, confidence: float) -> None:
        super().reveal(position, token, confidence)
        if position >= self.limit:
            self.revealed.pop()  # of no response

    def blocks(self) -> list[BlockView]:
        views, first = [], self.prompt_length
        start, end = max(self.committed, first), min(self.end, self.limit)
        if start > first:
            views.append(BlockView(0, start - first, "cached", self.view(first, start)))
        if end > start:
            tokens = self.view(start, end)
            views.append(BlockView(start - first, end - first, "fully active", tokens))
        return views
