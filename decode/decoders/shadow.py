"""Add WINO's shadow (arXiv 2507.18578, section 4) to a step: rows that predict decided positions as
if they were still masked, beside the step's own rows, which do not see them; and take decided
tokens back (`Revocations`).

Where row p predicts position p, the shadow of a block is one mask for each of its positions, at
the same positions: row p sees what position p sees, but not position p itself, and of the shadow
what position p sees of the block.

Where row p - 1 predicts position p, a mask would be read in the wrong place. There the shadow of
one position is a pair: a copy of token p - 1 at position p - 1, which is read, and a mask at
position p. Both see what row p - 1 sees but for positions p - 1 and p, which the pair stands for.
A row p - 1 that does not see position p (under a block-causal mask, p the first of its block)
needs no mask; its copy alone is fed.

Block-causal, prompt ``7 8``, a block of 2 of which both positions hold 9, scratch slots from 4 on::

    LLaDA: the shadow of the block        Dream: a pair for each position
    position    token    slot    sees         position    token    slot    sees
    2           m        4       0 1 3 4 5    1           8        4       0 4          read for 2
    3           m        5       0 1 2 4 5    2           9        6       0 1 6 7      read for 3
                                              3           m        7       0 1 6 7
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from d2f.contract import Contract
from d2f.spans import shadow_spans, widened
from decode.decoders.session import MaskedSession
from decode.step import Floats, Ints, Step


def shadow_slots(positions: int, contract: Contract) -> int:
    """Count the scratch slots that the shadow of so many positions takes."""
    return positions * (1 + contract.logit_shift)


def add_shadow(
    step: Step, x: Ints, ends: Ints, start: int, end: int, verified: Ints, slot: int,
    contract: Contract, *, leakage: bool = False,
) -> Step:  # fmt: skip
    """Add the shadow of the block ``[start, end)`` of the sequence x after a step's own rows.

    ends: position p sees ``[0, ends[p])``. verified: int64 ``[V]``, the positions of the block to
    predict again; their rows are read last, each querying its token. Nothing is added for none.
    slot: the first of the shadow's scratch slots, `shadow_slots` many. leakage: a shadow sees the
    token of its position too.
    """
    if not len(verified):
        return step
    assert contract.mask_id is not None
    if contract.logit_shift:
        tokens, positions, slots, spans, read = _pairs(
            x, ends, verified, slot, contract.mask_id, leakage
        )
    else:
        positions = np.arange(start, end)
        tokens = np.full(end - start, contract.mask_id)
        slots = slot + positions - start
        seen = ends[start:end]
        # A row sees as much of the shadow as its position sees of the block: less than all of it
        # where the block is made of several blocks of the model.
        own_end = slot + np.minimum(seen, end) - start
        spans = shadow_spans(positions, positions + 1 - leakage, seen, slot, own_end)
        read = verified - start
    fed = len(step.tokens)
    queried = step.queried_tokens
    if queried is None:
        # The own rows ask for no token's probability; id 0 fills their places and is not looked at.
        queried = np.zeros(len(step.read), dtype=np.int64)
    return replace(
        step,
        tokens=np.concatenate([step.tokens, tokens]),
        positions=np.concatenate([step.positions, positions]),
        slots=np.concatenate([step.slots, slots]),
        spans=np.concatenate([widened(step.spans, 3), spans]),
        read=np.concatenate([step.read, fed + read]),
        queried_tokens=np.concatenate([queried, x[verified]]),
    )


def weakest(probability: Floats, tau: float, most: int) -> Ints:
    """Find the probabilities below tau, compared in fp64 as in WINO's code, as indices in order; of
    more than `most` the smallest."""
    low = np.flatnonzero(probability.astype(np.float64) < tau)
    order = np.argsort(probability[low], kind="stable")
    return np.sort(low[order[: max(most, 0)]])


def _pairs(
    x: Ints, ends: Ints, verified: Ints, slot: int, mask_id: int, leakage: bool
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Make tokens, positions, slots and spans of the pairs, and say which of these rows are read.

    Each pair has two slots, `copies` and the one after it, also where its mask is not fed.
    """
    before, copies = verified - 1, slot + 2 * np.arange(len(verified))
    sees = ends[before] > verified  # [V], whether row p - 1 sees position p, so that a mask is fed
    behind = verified + 1 - leakage
    seen = np.maximum(ends[before], behind)  # an empty range, where row p - 1 ends before p
    # The pair takes the place of positions p - 1 and p: it sees all but these two, and itself.
    spans = shadow_spans(before, behind, seen, copies, copies + 1 + sees)
    fed = np.stack([np.ones_like(sees), sees], axis=1)  # [V, 2]: copy, mask
    tokens = np.stack([x[before], np.full(len(verified), mask_id)], axis=1)[fed]
    positions = np.stack([before, verified], axis=1)[fed]
    slots = np.stack([copies, copies + 1], axis=1)[fed]
    read = np.cumsum(fed).reshape(fed.shape)[:, 0] - 1
    return tokens, positions, slots, np.repeat(spans, fed.sum(1), axis=0), read


class Revocations:
    """Takes decided positions of a session back, and counts.

    drafted: tokens decided, again or for the first time. revoked: decisions taken back.
    revoked_changed: how many of these hold another token now than the one taken back; the others
    hold the same one, or none yet.
    """

    def __init__(self, session: MaskedSession):
        self.session = session
        self.taken: list[tuple[int, int]] = []  # position, the token taken back
        session.counts |= {"drafted": 0, "revoked": 0, "revoked_changed": 0}

    def revoke(self, positions: Ints) -> None:
        """Mask decided positions of the sequence again."""
        session, mask_id = self.session, self.session.contract.mask_id
        assert mask_id is not None
        self.taken += [(int(p), int(session.x[p])) for p in positions]
        session.x[positions] = mask_id
        # Keys and values stay in the slots: the next forward feeds the mask and overwrites them.
        session.masked[positions] = True

    def count(self) -> None:
        """Bring the counts up to date, once after each step's decisions."""
        x, masked, counts = self.session.x, self.session.masked, self.session.counts
        counts["drafted"] += len(self.session.revealed)
        counts["revoked"] = len(self.taken)
        counts["revoked_changed"] = sum(
            bool(not masked[p] and x[p] != token) for p, token in self.taken
        )
