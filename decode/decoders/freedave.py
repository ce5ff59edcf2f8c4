"""FreeDave (arXiv 2510.00294, algorithm 1): static decoding that drafts itself, without loss.

A forward gives a prediction for every masked position of the block, and static decoding uses one of
them. The others are drafts: while the state x is fed, the states that follow it if the drafts are
right are fed beside it as branches. What static decoding reveals in x is then known, and if it is
the first draft, what it reveals in the first branch is known too, and so on: every forward reveals
one token and one more for each branch that holds. Its logits draft the next ones, so that no
forward is spent on drafting.

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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from decode.decoders.base import Card
from decode.decoders.blockwise import CACHE, MODELS, Blockwise, BlockwiseSession
from decode.decoders.branches import Branch, split, with_branches
from decode.decoders.checks import greedy_only
from decode.decoders.options import option
from decode.decoders.visibility import mask_kind
from decode.engine.step import Floats, Ints, Predictions, Step

Drafting = Literal["tree", "batch"]


@dataclass(frozen=True)
class FreeDave(Blockwise):
    """Options of FreeDave: the tokens of `Static` with the same block_size, cache and early_exit
    (one token a step), in no more forwards. Greedy only.

    drafts: states a forward, the paper's d; 1 is static decoding. drafting: ``batch`` feeds in each
    branch all rows that static decoding would feed; ``tree`` feeds only once what the mask keeps
    the same: on a block-causal model a shifted family's row before the block, and complete blocks
    on their way into the cache (where eager drafts completed them, or a block here spans several of
    the model's). On a bidirectional model every row sees the drafts, and the two coincide. eager:
    on a block-causal model, drafts may go on in the next ceil(d / block_size) blocks. It stays
    without loss: what is cached there is exact, and each branch is a whole state.

    "The same tokens" is up to the rounding of the model: the rows of a branch compute what the rows
    of the state would, in a forward of another shape.
    """

    name: ClassVar[str] = "freedave"
    summary: ClassVar[str] = "static decoding that drafts itself, without loss"
    card: ClassVar[Card] = Card(
        decides="what `static` would, several steps at once",
        rows="up to `drafts` times `static`'s",
        cache=CACHE,
        models=MODELS,
        source="FreeDave, [2510.00294](https://arxiv.org/abs/2510.00294)",
    )

    drafts: int = option(4, "states that a forward checks, at least 1; 1 is static decoding")
    drafting: Drafting = option(
        "tree", "tree feeds once what is the same in all states, batch feeds all of each"
    )
    eager: bool = option(False, "let drafts go on in the next blocks; for block-causal models")

    def __post_init__(self) -> None:
        super().__post_init__()
        greedy_only("freedave", self.temperature)
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
        """How many blocks after the current one drafts may lie in."""
        return -(-self.drafts // self.size) if self.eager else 0

    def begin(self, prompt: list[int], contract: Contract) -> FreeDaveSession:
        return FreeDaveSession(self, prompt, contract)


class FreeDaveSession(BlockwiseSession):
    """One request. drafts: (position, token) of each branch beyond the branch before it, in the
    order in which static decoding would reveal them.

    counts: ``drafted`` branches, and how many of them were ``accepted``.
    """

    decoder: FreeDave

    def __init__(self, decoder: FreeDave, prompt: list[int], contract: Contract):
        super().__init__(decoder, prompt, contract)
        self.drafts: list[tuple[int, int]] = []
        # One slot behind the sequence is the spare one that all blockwise sessions have.
        self.scratch = len(self.x) + 1
        self.counts = {"drafted": 0, "accepted": 0}

    @property
    def slots(self) -> int:
        branches = min(self.decoder.drafts - 1, self.decoder.length - 1)
        return self.scratch + branches * self._branch_rows()

    def reach(self) -> int:
        return min(self.end + self.decoder.ahead * self.decoder.size, len(self.x))

    def choose(self, predictions: Predictions) -> Ints:
        """The most confident of the first block that has a mask, ties to the lowest position."""
        # With eager drafts `wanted` reaches into later blocks, where static decoding reveals
        # nothing yet.
        size, first = self.decoder.size, int(self.wanted[0])
        end = first + size - (first - self.prompt_length) % size
        inside = int(np.searchsorted(self.wanted, end))
        return np.array([predictions.confidence[:inside].argmax()])

    def feed_rows(self) -> Step:
        own, branches = super().feed_rows(), []
        # Each branch is the state before it and one draft more; x, wanted, differs describe it.
        x, wanted, differs = self.x, self.wanted, len(self.x)
        for position, token in self.drafts:
            x, wanted = x.copy(), wanted[wanted != position]
            x[position] = token
            differs = min(differs, position) if self.decoder.drafting == "tree" else 0
            read, stop = wanted - self.contract.logit_shift, int(own.positions[-1]) + 1
            branches.append(Branch(x, self.ends, stop, differs, read))
        return with_branches(own, branches, self.scratch, spare=self.scratch - 1)

    def accept(self, predictions: Predictions) -> None:
        masks = len(self.wanted)
        states = split(predictions, [masks - fewer for fewer in range(len(self.drafts) + 1)])
        revealed = []
        # A state is only looked at where the one before it revealed what this one was drafted with.
        for found, draft in zip(states, [*self.drafts, None], strict=True):
            # Static decoding's own step, on the predictions of the state that is known to be the
            # next.
            super().accept(found)
            revealed += self.revealed
            position = self.prompt_length + revealed[-1].position
            left = self.wanted != position
            self.wanted = self.wanted[left]
            if draft != (position, revealed[-1].token) or self._ended():
                break
        self.revealed = revealed
        self.counts["drafted"] += len(self.drafts)
        self.counts["accepted"] += len(revealed) - 1  # x itself is no draft
        self.drafts = self._draft(found.token[left], found.confidence[left])

    def _draft(self, tokens: Ints, confidence: Floats) -> list[tuple[int, int]]:
        """The next drafts, from predictions of what is wanted yet: block after block, the most
        confident first; never the one that leaves nothing to predict."""
        end = len(self.x) if self.decoder.eager else self.end
        most = min(self.decoder.drafts, int(self.masked[self.start : end].sum())) - 1
        blocks = (self.wanted - self.prompt_length) // self.decoder.size
        # By block, then by confidence; stable, as `choose` breaks ties.
        order = np.lexsort((-confidence, blocks))[:most]
        return list(zip(self.wanted[order].tolist(), tokens[order].tolist(), strict=True))

    def _branch_rows(self) -> int:
        """The most rows that a branch may feed into slots of its own, over all blocks."""
        decoder, most = self.decoder, 0
        for start in range(self.prompt_length, len(self.x), decoder.size):
            end = min(start + (1 + decoder.ahead) * decoder.size, len(self.x))
            stop = end if decoder.cache == "dual" else int(self.ends[end - 1])
            # What was final when the rows were last fed, at most d tokens ago.
            before = max(start - decoder.ahead * decoder.size, self.prompt_length)
            first = int(np.searchsorted(self.ends, before, "right"))
            most = max(most, stop - (first if decoder.cache == "none" else max(first, start)))
        return most
