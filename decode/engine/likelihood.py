"""Read left-to-right likelihoods: the probability of each token, given all before it.

They are read in the forwards of an engine, together with what it decodes (`Result.likelihoods`)::

    kind = Likelihood.of(model.contract, given=len(context))
    found = decode.generate(model, [context + continuation], [kind])[0].likelihoods
    sum(one.logprob for one in found), all(one.greedy for one in found)

A causal model predicts position p from row p - 1. A model that is trained on blocks predicts p as
in decoding: it sees the blocks before p's in their final tokens, and of its own block the tokens
before p and the mask id from p on, to the block's end. The last block is whole, also where the
sequence ends within it: a token's probability does not depend on what comes after it, or on how
much does. Blocks of 2, the sequence 7 8 9, m the mask id; a block is fed in a copy for each of its
tokens, and for the blocks after it as it is::

               copy         copy         itself    copy
    token      m  m         7  m         7  8      m  m
    position   0  1         0  1         0  1      2  3
    slot       3  4         5  6         0  1      7  8
    predicts   7               8                   9
    sees       [3, 5)       [5, 7)       [0, 2)    [0, 2) [7, 9)

With `given` tokens a block-causal model of D2F has those as its prompt, one block that sees itself,
and its blocks begin after them; SDAR's begin at 0 anyhow. A shifted model reads row p - 1 for p, so
that the first position of a block is predicted from the blocks before alone. Nothing predicts the
first token of a causal or a shifted model: it has no likelihood, the others' is given it.

A bidirectional model has none from left to right that decoding would use: it is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from d2f.spans import stack
from decode.decoders.base import Decoder
from decode.decoders.session import Session, mask_kind, visible_ends
from decode.step import BlockView, Ints, Predictions, Step, TokenLikelihood

ROWS = 256  # most rows of a forward, where no block has more


@dataclass(frozen=True, kw_only=True)
class Likelihood(Decoder):
    """Reads the likelihoods of a prompt; the response is empty.

    given: tokens at the beginning that are not predicted themselves. block_size: of the model's
    blocks, 1 of a causal one: as many positions as that, less one, are fed after the last token.
    """

    name: ClassVar[str] = "likelihood"

    max_new_tokens: int | None = 0
    given: int = 0
    block_size: int = 1

    @staticmethod
    def of(contract: Contract, given: int = 0) -> Likelihood:
        """Make it for a model of that contract. Raises InputError for a bidirectional one."""
        return Likelihood(given=given, block_size=_block_size(contract))

    @property
    def length(self) -> int:
        return 0

    @property
    def extra_positions(self) -> int:
        return self.block_size - 1

    def check(self, contract: Contract) -> None:
        size = _block_size(contract)
        if size != self.block_size:
            raise InputError(f"block_size must be the model's {size}, got {self.block_size}")

    def begin(self, prompt: list[int], contract: Contract) -> LikelihoodSession:
        if not 0 <= self.given <= len(prompt):
            raise InputError(
                f"given must lie in [0, {len(prompt)}], the sequence's length, got {self.given}"
            )
        return LikelihoodSession(self, prompt, contract)


def _block_size(contract: Contract) -> int:
    kind = mask_kind(contract)
    if kind == "bidirectional":
        raise InputError(
            "left-to-right likelihoods need a causal or block-causal model, this one of the family "
            f"{contract.family} is bidirectional: whatever it predicts it sees what follows"
        )
    # The first block of a sequence of which nothing is given ends where the second begins.
    return 1 if kind == "causal" else int(visible_ends(2**20, 0, contract)[0])


class Part(NamedTuple):
    """Rows that are fed in one forward: positions ``[start, end)``. masked: the first that holds
    the mask id, in a copy of its block; None for the sequence's own tokens in their own slots.
    reads: (row of the part, position that it predicts)."""

    start: int
    end: int
    masked: int | None
    reads: list[tuple[int, int]]

    @property
    def rows(self) -> int:
        return self.end - self.start


def parts_of(length: int, given: int, ends: Ints, size: int, shift: int) -> Iterator[Part]:
    """Feed each block once for each of its positions that is predicted, then once in its final
    tokens, which the next one sees. A causal model has blocks of 1, of which the row before
    predicts the only position. ends: ``[length]``, of each position's block."""
    start = 0
    while start < length:
        end = int(ends[start])  # the last one's may be cut off here
        for p in range(max(start, given), end):
            if p > start or not shift:
                yield Part(start, start + size, p, [(p - start - shift, p)])
        if end < length:
            first = shift and end >= given  # the next block's, read in this one's last row
            yield Part(start, end, None, [(end - 1 - start, end)] if first else [])
        start = end


class LikelihoodSession(Session):
    """Score a sequence. Parts that fit go into one forward, a copy of a block in slots behind
    those of the sequence. likelihoods: those known so far, by position."""

    def __init__(self, decoder: Likelihood, ids: list[int], contract: Contract):
        super().__init__(ids, 0, contract)
        size = decoder.block_size
        self.ends = visible_ends(len(ids), decoder.given, contract)
        causal = mask_kind(contract) == "causal"
        shift = 1 if causal else contract.logit_shift
        parts = parts_of(len(ids), decoder.given, self.ends, size, shift)
        copies = min(ROWS, size * (len(ids) - decoder.given))  # rows of them in a forward
        self.scratch = 0 if causal else max(size, copies)
        # Nothing is predicted of a single token; it still has one forward, as every request.
        self.parts = deque(parts) or deque([Part(0, int(self.ends[0]), None, [])])
        self.predicted: Ints = np.zeros(0, dtype=np.int64)
        self.cached = 0

    @property
    def slots(self) -> int:
        return len(self.x) + self.scratch

    def step(self) -> Step | None:
        if not self.parts:
            return None
        cached, rows, copied = self.cached, 0, len(self.x)
        columns, predicted = [], []
        while self.parts and (not rows or rows + self.parts[0].rows <= ROWS):
            part = self.parts.popleft()
            positions = np.arange(part.start, part.end)
            if part.masked is None:
                tokens, slots = self.x[positions], positions
                spans = stack((0, self.ends[positions]), (0, 0))
                self.cached = part.end
            else:
                assert self.contract.mask_id is not None
                slots = positions - part.start + copied
                tokens = np.full(part.rows, self.contract.mask_id)
                tokens[: part.masked - part.start] = self.x[part.start : part.masked]
                # All blocks before its own, and the whole copy.
                own = np.full(part.rows, copied)
                spans = stack((0, np.full(part.rows, part.start)), (own, own + part.rows))
                copied += part.rows
            read = np.array([row + rows for row, _ in part.reads], dtype=np.int64)
            columns.append((tokens, positions, slots, spans, read))
            predicted += [position for _, position in part.reads]
            rows += part.rows
        self.predicted = np.array(predicted, dtype=np.int64)
        tokens, positions, slots, spans, read = map(np.concatenate, zip(*columns, strict=True))
        queried = self.x[self.predicted]
        return Step(tokens, positions, slots, spans, read, cached, queried_tokens=queried)

    def accept(self, predictions: Predictions) -> None:
        logprobs = predictions.queried_log_probability
        assert logprobs is not None
        for i, position in enumerate(self.predicted.tolist()):
            token, top = int(self.x[position]), int(predictions.token[i])
            best = logprob = float(logprobs[i])
            if top != token:  # never below its own, by rounding: the list of the likeliest has both
                best = max(logprob, float(np.log(predictions.confidence[i])))
            self.likelihoods.append(TokenLikelihood(position, token, logprob, top, best))

    def blocks(self) -> list[BlockView]:
        return []

    @property
    def tokens(self) -> list[int]:
        return []

    settled = tokens
