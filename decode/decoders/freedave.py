"""FreeDave (arXiv 2510.00294, algorithm 1): static decoding that drafts itself, without loss.

A forward gives a prediction for every masked position of the block, and static decoding uses one
of them, or a few. The others are drafts: while the state x is fed, the states that follow it if the
drafts are right are fed beside it as branches. What static decoding reveals in x is then known, and
if it is the first draft, what it reveals in the first branch is known too, and so on: every forward
does one step of static decoding and one more for each branch that holds. Its logits draft the next
ones, so that no forward is spent on drafting.

With c_1 .. c_d the paper's candidates, x is c_1, which always holds, and the branches are c_2 ..
c_d; the candidate that completes a block is settled by the one before it and never fed.

d = 3, prompt ``7 8``, one block of 4 at positions 2 to 5, in forward 1 all masked::

                     position 2  3  4  5
    forward 1  x              m  m  m  m    reveals the surest, c at 4; of the others, b at 3 is
                                            surer than d at 5, so these are drafted in that order
    forward 2  x              m  m  c  m    reveals b at 3: as drafted, so branch 1 is next
               branch 1       m  b  c  m    reveals d at 5: as drafted, so branch 2 is next
               branch 2       m  b  c  d    reveals a at 2: the block is complete
    had x revealed anything else in forward 2, the branches would count for nothing

Where static decoding reveals n tokens a step, a branch is n drafts more than the one before it, and
holds if those are the n that are revealed.

FreeDave++ (`tau`) drafts threshold decoding in the same way, each branch one token more than the
one before. How many tokens the rule reveals is not known beforehand, so a branch is taken where its
drafts are among those revealed, the longest such branch first; what else the rule would have
revealed there is decided anew, by the branch's own predictions. So the tokens are not those of
threshold decoding, unless tau is above 1: then they are static decoding's, one a step::

    forward 2  x              m  m  c  m    reveals b and a: branch 1 is next, for b is among them
               branch 1       m  b  c  m    reveals d: branch 2 is next; a waits
               branch 2       m  b  c  d    reveals what it finds at 2
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.base import option
from decode.decoders.branches import Branch, split, with_branches
from decode.decoders.session import mask_kind
from decode.decoders.unmask import Static, StaticSession, sure
from decode.step import Floats, Ints, Predictions, Step

Drafting = Literal["tree", "batch"]


@dataclass(frozen=True)
class FreeDave(Static):
    """Options of FreeDave: the tokens of `Static` with the same block_size, steps, cache and
    early_exit, in no more forwards, up to the rounding of forwards of other shapes.

    drafts: the paper's d; the engine's `max_rows` bounds it, too, unless tau is given.
    drafting: ``tree`` feeds once, on a block-causal model, a shifted family's row before the block
        and complete blocks on their way into the cache. On a bidirectional model every row sees the
        drafts, and tree and batch coincide.
    eager: drafts may go on in the next ceil(d / block_size) blocks, without loss: what is cached
        there is exact, and each branch is a whole state.
    """

    name: ClassVar[str] = "freedave"
    summary: ClassVar[str] = "static decoding that drafts itself, without loss"

    drafts: int = option(4, "states that a forward checks at most, at least 1 (static decoding)")
    drafting: Drafting = option(
        "tree", "tree feeds once what is the same in all states, batch feeds all of each"
    )
    eager: bool = option(False, "let drafts go on in the next blocks; for block-causal models")
    tau: float | None = option(
        None,
        "FreeDave++: confidence from which a token is revealed, at least 0, and always the surest "
        "one; not lossless",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.greedy_only("freedave")
        if self.tau is not None and self.steps is not None:
            raise InputError(
                "steps are static decoding's, tau is FreeDave++'s: expected one of them, got "
                f"steps {self.steps} and tau {self.tau}"
            )
        if self.eager and self.cache != "none":
            raise InputError(
                "eager needs cache none, which on the block-causal models that it is for leaves "
                f"out all that is final already, got {self.cache!r}"
            )

    def check(self, contract: Contract) -> None:
        super().check(contract)
        if self.eager and mask_kind(contract) == "bidirectional":
            raise InputError(
                f"eager drafts need a block-causal model; the family {contract.family} is "
                "bidirectional here, where a block's rows see the later blocks: take eager=False"
            )

    @property
    def ahead(self) -> int:
        """Count the blocks after the current one that drafts may lie in."""
        a_block = self.block_steps if self.tau is None else self.size  # drafts that fill one
        return -(-self.drafts // a_block) if self.eager else 0

    def begin(self, prompt: list[int], contract: Contract) -> FreeDaveSession:
        return FreeDaveSession(self, prompt, contract)


class FreeDaveSession(StaticSession):
    """Decode a request. drafts: for each branch the (position, token) pairs that it adds to the
    branch before it, in the order in which they would be revealed.

    counts: ``drafted`` branches, and how many of them were ``accepted``.
    """

    decoder: FreeDave

    def __init__(self, decoder: FreeDave, prompt: list[int], contract: Contract):
        super().__init__(decoder, prompt, contract)
        self.drafts: list[list[tuple[int, int]]] = []
        # The first slot behind the sequence is the spare one of all blockwise sessions.
        self.scratch = len(self.x) + 1
        self.counts = {"drafted": 0, "accepted": 0}

    @property
    def slots(self) -> int:
        branches = min(self.decoder.drafts - 1, self.decoder.length - 1)
        return self.scratch + branches * self._branch_rows()

    def reach(self) -> int:
        return min(self.end + self.decoder.ahead * self.decoder.size, len(self.x))

    def choose(self, predictions: Predictions) -> Ints:
        """Reveal as the decoding that is drafted for, ties to the lowest position."""
        # In the first block that has a mask: with eager drafts `wanted` reaches into later ones.
        inside = self._in_block_of(0, self._blocks())
        confidence = predictions.confidence[:inside]
        if self.decoder.tau is not None:
            return sure(confidence, self.decoder.tau)
        count = self._due(int(self.wanted[0]), inside)
        return np.argsort(-confidence, kind="stable")[:count]

    def feed_step(self) -> Step:
        if self.decoder.tau is None:  # the tokens of FreeDave++ depend on how much is drafted
            del self.drafts[self.width - 1 :]
        own, branches = super().feed_step(), []
        # Each branch is the state before it and its drafts more; x, wanted, differs describe it.
        x, wanted, differs = self.x, self.wanted, len(self.x)
        for pairs in self.drafts:
            positions, tokens = zip(*pairs, strict=True)
            x, wanted = x.copy(), wanted[~np.isin(wanted, positions)]
            x[list(positions)] = tokens
            differs = min(differs, *positions) if self.decoder.drafting == "tree" else 0
            read, stop = wanted - self.contract.logit_shift, int(own.positions[-1]) + 1
            branches.append(Branch(x, self.ends, stop, differs, read))
        return with_branches(own, branches, self.scratch, spare=self.scratch - 1)

    def accept(self, predictions: Predictions) -> None:
        fewer = accumulate(map(len, self.drafts), initial=0)
        states = split(predictions, [len(self.wanted) - drafted for drafted in fewer])
        self.revealed = []
        at = 0  # the state that is known to be reached: x, then branches
        while True:
            found = states[at]
            chosen = {
                int(self.wanted[i]): (int(found.token[i]), float(found.confidence[i]))
                for i in np.sort(self.choose(found))
            }
            further = self._furthest(at, chosen)
            drafted = sorted(position for pairs in self.drafts[at:further] for position, _ in pairs)
            for position in drafted or chosen:
                self.reveal(position, *chosen[position])
            left = self.masked[self.wanted]
            self.wanted = self.wanted[left]
            if further == at or self._exits():
                break
            at = further
        self.counts["drafted"] += len(self.drafts)
        self.counts["accepted"] += at
        self.drafts = self._draft(found.token[left], found.confidence[left])

    def _furthest(self, at: int, chosen: dict[int, tuple[int, float]]) -> int:
        """Find the last state whose drafts beyond state `at` are all among the chosen tokens, `at`
        where there is none."""
        for pairs in self.drafts[at:]:
            if any(p not in chosen or chosen[p][0] != token for p, token in pairs):
                break
            at += 1
        return at

    def _draft(self, tokens: Ints, confidence: Floats) -> list[list[tuple[int, int]]]:
        """Make the next drafts, from predictions of what is wanted yet: block after block, the most
        confident first; never the one that leaves nothing to predict."""
        end = len(self.x) if self.decoder.eager else self.end
        most = int(self.masked[self.start : end].sum()) - 1  # tokens in all drafts
        blocks = self._blocks()
        # By block, then by confidence; stable, as `choose` breaks ties.
        order = np.lexsort((-confidence, blocks))
        drafts: list[list[tuple[int, int]]] = []
        first = 0
        while len(drafts) < self.decoder.drafts - 1 and first < len(order):
            count = 1
            if self.decoder.tau is None:
                left = self._in_block_of(first, blocks) - first
                count = self._due(int(self.wanted[order[first]]), left)
            if first + count > most:
                break
            own = order[first : first + count]
            pairs = zip(self.wanted[own].tolist(), tokens[own].tolist(), strict=True)
            drafts.append(list(pairs))
            first += count
        return drafts

    def _blocks(self) -> Ints:
        """Number the block of each wanted position, ascending."""
        return (self.wanted - self.prompt_length) // self.decoder.size

    def _in_block_of(self, first: int, blocks: Ints) -> int:
        """Find the index behind the wanted positions of the block that holds the one at `first`."""
        return int(np.searchsorted(blocks, blocks[first], "right"))

    def _due(self, position: int, left: int) -> int:
        """Count what static decoding reveals next in a position's block with `left` masks."""
        size = self.decoder.size
        start = position - (position - self.prompt_length) % size
        return self.decoder.due(min(size, len(self.x) - start), left)

    def _branch_rows(self) -> int:
        """Count the most rows that a branch may feed into slots of its own, over all blocks."""
        decoder, most = self.decoder, 0
        for start in range(self.prompt_length, len(self.x), decoder.size):
            end = min(start + (1 + decoder.ahead) * decoder.size, len(self.x))
            stop = end if decoder.cache == "dual" else int(self.ends[end - 1])
            # Rows were last fed a forward ago; if that completed more blocks, it left nothing to
            # draft from.
            before = max(start - decoder.ahead * decoder.size, self.prompt_length)
            first = int(np.searchsorted(self.ends, before, "right"))
            most = max(most, stop - (first if decoder.cache == "none" else max(first, start)))
        return most
