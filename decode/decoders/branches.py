"""Feed several states of one request in one forward: its own rows in its own slots, and beside them
branches, which are rows of other states of the same sequence in scratch slots (FreeDave's
candidates, arXiv 2510.00294; their spans: `d2f.spans.branch_spans`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from d2f.spans import branch_spans, widened
from decode.step import Ints, Predictions, Step


@dataclass(frozen=True)
class Branch:
    """Another state of the sequence.

    x: its tokens, at least ``[stop]``. ends: ``[stop]`` or more, position p sees ``[0, ends[p])``.
    stop: where the rows that it feeds end. differs: the first position whose token is not that of
    the own rows. A row that sees only positions before it (``ends[p] <= differs``) computes the
    same in both states and is not fed again; 0 feeds all. It is below `stop`, so that a row
    is fed. read: the positions whose rows are read, ascending.
    """

    x: Ints
    ends: Ints
    stop: int
    differs: int
    read: Ints


def with_branches(own: Step, branches: Sequence[Branch], scratch: int, spare: int) -> Step:
    """Add branches to the step `own`; each branch's reads follow, in order.

    A branch row sees the own slots where they are not fed, or are fed and the same for it, its own
    branch for the rest, and behind what is fed the own slots again. scratch: the first of the
    slots that branches overwrite, one after the other, at most a slot a row. spare: a slot that
    nothing sees, for rows that are fed only to be read.

    A block-causal model, blocks ``[2, 4)`` and ``[4, 6)`` open (ends 2 2 4 4 6 6), scratch slots
    from 7 on. The branch has drafted 23 at position 3, so differs = 3::

        own       position 2       3       4       5
                  token    22      m       m       m
                  slot     2       3       4       5
                  sees     [0, 4)  [0, 4)  [0, 6)  [0, 6)

        branch    token    22      23      m       m
                  slot     7       8       9       10
                  sees     [0, 2)  [0, 2)  [0, 2)  [0, 2)      the prompt, in the own slots,
                           [7, 9)  [7, 9)  [7, 11) [7, 11)     and the branch's own rows

    Position 2 holds the same token, but sees position 3, which differs: it is fed again. Were
    position 4 the first that differs, the branch would feed positions 4 and 5 alone, to the slots 7
    and 8, seeing ``[0, 4)`` and ``[7, 9)``.
    """
    if not branches:
        return own
    # Rows before it are cached: in their own slots there is what every state sees.
    first = int(own.positions[own.slots == own.positions][0])
    columns = [[own.tokens], [own.positions], [own.slots], [widened(own.spans, 3)], [own.read]]
    fed_rows = len(own.tokens)
    for branch in branches:
        low = max(first, int(np.searchsorted(branch.ends, branch.differs, "right")))
        shared = branch.ends[branch.read] <= branch.differs  # the own rows answer for these
        alone = branch.read[~shared]
        # A shifted family may read a row before `low`: fed for its logits only, to the spare slot.
        fed = np.arange(min(low, int(alone[0])) if len(alone) else low, branch.stop)
        spans = branch_spans(branch.ends[fed], low, branch.stop, scratch)
        slots = np.where(fed < low, spare, scratch + fed - low)
        read = np.where(shared, branch.read - own.positions[0], fed_rows + branch.read - fed[0])
        parts = (branch.x[fed], fed, slots, spans, read)
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
        scratch += branch.stop - low
        fed_rows += len(fed)
    tokens, positions, slots, spans, read = (np.concatenate(column) for column in columns)
    return Step(tokens, positions, slots, spans, read, own.cached, uncertainty=own.uncertainty)


def split(predictions: Predictions, counts: Sequence[int]) -> list[Predictions]:
    """Take the predictions of a step with branches apart: those of the own rows, then of each
    branch. counts: how many rows each of them reads, in that order."""
    ends = np.cumsum(counts)
    return [predictions.rows(slice(end - n, end)) for n, end in zip(counts, ends, strict=True)]
