"""The file of a run that collects rollouts: its settings, then a line a rollout, in the order of
the problems."""

from __future__ import annotations

from decode.reporting.ledger import Ledger
from distill.rollouts.trajectories import NO_ROLLOUTS, Rollout, parse_rollout


class RolloutLedger(Ledger[str, Rollout]):
    """The rollouts by the names of their problems."""

    HEADER = "rollouts"
    FILE = NO_ROLLOUTS
    ENTRY = "a rollout of this run"

    def key(self, entry: Rollout) -> str:
        return entry.unique_id

    def line(self, entry: Rollout) -> str:
        return entry.model_dump_json() + "\n"

    def parsed(self, line: bytes, where: str) -> Rollout:
        return parse_rollout(line, where)
