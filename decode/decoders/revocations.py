"""Decisions that a session took back, and what became of them."""

from __future__ import annotations

from decode.decoders.base import MaskedSession
from decode.engine.step import Ints


class Revocations:
    """Takes decided positions of a session back and keeps its counts.

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
        session = self.session
        assert session.contract.mask_id is not None
        self.taken += [(int(p), int(session.x[p])) for p in positions]
        session.x[positions] = session.contract.mask_id
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
