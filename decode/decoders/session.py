"""A session is one request being decoded: a small state machine, of which `step()` says what to
compute and `accept(predictions)` takes the answer. It never touches the model, so it can be tested
with made-up predictions."""

from __future__ import annotations

import abc
from typing import Literal

import numpy as np

from d2f.contract import Contract
from d2f.spans import block_ends, prefix
from decode.step import BlockState, BlockView, Ints, Predictions, Revealed, Step, TokenLikelihood

MOST = 2**20  # the largest count (of tokens, steps, states, ...) that an option may have
MaskKind = Literal["bidirectional", "block-causal", "absolute block-causal", "causal"]
SDAR_BLOCK_SIZE = 4


def mask_kind(contract: Contract) -> MaskKind:
    """Name the mask that a model of this contract decodes under. Block-causal blocks begin at the
    prompt's end, absolute ones at position 0."""
    # A D2F student's mask is that of its training, whatever its family's.
    if contract.objective == "d2f" and contract.block_size is not None:
        return "block-causal"
    # SDAR, TraDo: the prompt is cut into blocks too.
    if contract.prompt_rule == "block_causal":
        return "absolute block-causal"
    return "causal" if contract.prompt_rule == "causal" else "bidirectional"


def visible_ends(length: int, prompt_length: int, contract: Contract) -> Ints:
    """Give the ends ``[length]`` of what each position sees: position p sees ``[0, ends[p])``."""
    kind = mask_kind(contract)
    if kind == "causal":
        return np.arange(1, length + 1)
    if kind == "bidirectional":
        return np.full(length, length, dtype=np.int64)
    if kind == "block-causal":
        assert contract.block_size is not None
        return block_ends(length, prompt_length, contract.block_size)
    return block_ends(length, 0, contract.block_size or SDAR_BLOCK_SIZE)


class Session(abc.ABC):
    """Decode a request, over the sequence x of prompt and response.

    x: int64 ``[P + max_new_tokens]``, one slot a position.
    share: of the engine's `max_rows`, the rows of the next step that are nearly free; it sets it.
        Only a lossless session reads it, whose tokens do not depend on it.
    revealed: what the last `accept` decided.
    counts: what the decoder counts of itself, by name.
    likelihoods: of the prompt's tokens, where asked for (`decode.engine.likelihood`).
    """

    def __init__(self, prompt: list[int], max_new_tokens: int, contract: Contract):
        self.prompt_length = len(prompt)
        self.x: Ints = np.zeros(len(prompt) + max_new_tokens, dtype=np.int64)
        self.x[: len(prompt)] = prompt
        self.contract = contract
        self.share: float = MOST
        self.revealed: list[Revealed] = []
        self.counts: dict[str, int] = {}
        self.likelihoods: list[TokenLikelihood] = []

    @property
    def width(self) -> int:
        """Tell how many rows a step may speculate, at least one."""
        return max(1, int(self.share))

    @property
    def slots(self) -> int:
        """Count the slots that the request needs: one for each position, then scratch slots."""
        return len(self.x)

    @abc.abstractmethod
    def step(self) -> Step | None:
        """Say what to compute next, None when the request is done."""

    @abc.abstractmethod
    def accept(self, predictions: Predictions) -> None:
        """Take the predictions of the rows that the last step read."""

    @abc.abstractmethod
    def blocks(self) -> list[BlockView]:
        """Show the response's blocks as they stand."""

    @property
    @abc.abstractmethod
    def tokens(self) -> list[int]:
        """Decoded response ids in order; undecoded positions are left out."""

    @property
    @abc.abstractmethod
    def settled(self) -> list[int]:
        """Response ids before the first that may still change: what may be shown as text."""

    @property
    def saw_eos(self) -> bool:
        """Say whether an end id is settled."""
        return any(token in self.contract.end_ids for token in self.settled)

    def reveal(self, position: int, token: int, confidence: float) -> None:
        """Decide one position of the sequence."""
        self.x[position] = token
        self.revealed.append(Revealed(position - self.prompt_length, token, confidence))


class MaskedSession(Session):
    """A session of a diffusion decoder: undecoded positions of x hold the mask id.

    wanted: int64 ``[N]``, the masked positions whose predictions the last step reads, ascending.
    """

    def __init__(self, prompt: list[int], max_new_tokens: int, contract: Contract):
        assert contract.mask_id is not None
        super().__init__(prompt, max_new_tokens, contract)
        self.masked = np.arange(len(self.x)) >= len(prompt)
        self.x[self.masked] = contract.mask_id
        self.wanted: Ints = np.zeros(0, dtype=np.int64)

    @property
    def tokens(self) -> list[int]:
        part = slice(self.prompt_length, None)
        return self.x[part][~self.masked[part]].tolist()

    @property
    def settled_end(self) -> int:
        """The first position of the sequence that may still change."""
        return int(self.masked.argmax()) if self.masked.any() else len(self.x)

    @property
    def settled(self) -> list[int]:
        return self.x[self.prompt_length : self.settled_end].tolist()

    def reveal(self, position: int, token: int, confidence: float) -> None:
        super().reveal(position, token, confidence)
        self.masked[position] = False

    def reveal_all(self, chosen: Ints, predictions: Predictions) -> None:
        """Decide what was predicted for some of `wanted`, given as indices, from left to right."""
        for i in np.sort(chosen):
            confidence = float(predictions.confidence[i])
            self.reveal(int(self.wanted[i]), int(predictions.token[i]), confidence)

    def view(self, start: int, end: int, state: BlockState) -> BlockView:
        """Show the block of sequence positions ``[start, end)``."""
        tokens, masked = self.x[start:end].tolist(), self.masked[start:end].tolist()
        shown = tuple(None if m else token for token, m in zip(tokens, masked, strict=True))
        return BlockView(start - self.prompt_length, end - self.prompt_length, state, shown)


def feed(
    x: Ints,
    first: int,
    ends: Ints,
    wanted: Ints,
    *,
    cached: int,
    logit_shift: int,
    uncertainty: bool = False,
) -> Step:
    """Make the step that feeds positions ``[first, len(ends))`` of the sequence x, slot = position.

    ends: ``[len]``, each position sees ``[0, ends[p])``. wanted: positions to predict; a shifted
    family reads row p - 1 for position p, and where that row is already cached it is fed again
    (its keys and values do not change). With blocks ``[2, 4)`` and ``[4, 6)``, the first cached::

        feed(x, first=4, ends=[2 2 4 4 6 6], wanted=[4 5], ...)

        logit_shift    positions fed    spans                   read
        0              4 5              [0, 6) [0, 6)           0 1
        1              3 4 5            [0, 4) [0, 6) [0, 6)    0 1    (rows of positions 3 and 4)
    """
    # Row p - 1 predicts position p in a shifted family.
    rows = wanted - logit_shift  # by position
    if len(rows) and rows[0] < first:
        # Row p - 1 of the first wanted position lies before what must be fed: one cached row more.
        first = int(rows[0])
    fed = np.arange(first, len(ends))
    return Step(
        tokens=x[first : len(ends)],
        positions=fed,
        slots=fed,
        spans=prefix(ends[first:]),
        read=rows - first,
        cached=cached,
        uncertainty=uncertainty,
    )
