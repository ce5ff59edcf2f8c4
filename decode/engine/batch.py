"""Join many requests' steps into one flat batch, on the host and then on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from d2f.attention import Segment, SpanPlan
from d2f.spans import widened
from decode.engine.request import Request
from decode.step import Ints, Step


@dataclass(frozen=True)
class FlatRows:
    """The rows of all requests in one forward, as arrays on the host.

    tokens, positions, slots: ``[T]``. spans: ``[T, K, 2]``, in slots of the whole cache. read:
    ``[N]``, the rows whose logits are wanted. segments: which rows and slots belong to which
    request, so that attention can be computed request by request.
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    spans: Ints
    read: Ints
    segments: list[Segment]

    def on(self, device: torch.device) -> Rows:
        """Copy the batch to a device, all at once."""
        # Each copy to a GPU costs a launch, whatever its size.
        parts = (self.tokens, self.positions, self.slots, self.spans.ravel(), self.read)
        host = torch.from_numpy(np.concatenate(parts))
        tokens, positions, slots, ranges, read = host.to(device).split([len(p) for p in parts])
        spans = ranges.view(len(tokens), -1, 2).to(torch.int32)
        return Rows(tokens, positions, slots, SpanPlan(spans, self.segments), read)


@dataclass(frozen=True)
class Rows:
    """The same rows on the device.

    tokens, positions, slots: int64 ``[T]``. plan: what each row attends to. read: int64 ``[N]``.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    plan: SpanPlan
    read: Tensor


def join(fed: Sequence[tuple[Request, Step]]) -> FlatRows:
    """Join the steps of all requests, slots counted from each request's base. Two requests, the
    first in the slots from 0 on, the second in those from 6 on::

        request    base    slots of its step    spans of its step       read of its step
        a          0       2 3                  [0, 4) [0, 4)           1
        b          6       0 1 2                [0, 1) [0, 2) [0, 3)    2

        joined             2 3 6 7 8            [0, 4) [0, 4)           1 4
                                                [6, 7) [6, 8) [6, 9)

    No row sees a slot of another request, so each computes what it would compute alone.
    """
    # All in one: at high load most steps are a row, and each operation of numpy costs as much.
    steps = [step for _, step in fed]
    counts = np.array([len(step.tokens) for step in steps])
    bases = np.array([request.base for request, _ in fed])
    firsts = np.cumsum(counts) - counts  # where the rows of each begin
    base = np.repeat(bases, counts)
    # Ranges a row in the batch: where one request needs three, the others get empty ones.
    width = max(step.spans.shape[1] for step in steps)
    spans = np.concatenate([widened(step.spans, width) for step in steps])
    reads = [len(step.read) for step in steps]
    return FlatRows(
        np.concatenate([step.tokens for step in steps]),
        np.concatenate([step.positions for step in steps]),
        np.concatenate([step.slots for step in steps]) + base,
        spans + base[:, None, None],
        # Read rows are numbered within the request.
        np.concatenate([step.read for step in steps]) + np.repeat(firsts, reads),
        _segments(spans, firsts, bases),
    )


def _segments(spans: Ints, firsts: Ints, bases: Ints) -> list[Segment]:
    """Find the slots that the rows of each request see: from its first to the last seen."""
    starts, ends = spans[..., 0], spans[..., 1]  # [T, K]
    last = np.maximum.reduceat(ends.max(1), firsts)
    # Where every row sees all of them, attention over the segment needs no mask at all. Empty
    # ranges, which others of the batch may bring, hide nothing.
    least = np.where(ends > starts, ends, ends.max()).min(1)
    whole = (np.maximum.reduceat(starts.max(1), firsts) == 0) & (
        np.minimum.reduceat(least, firsts) == last
    )
    limits = [*firsts.tolist(), len(spans)]
    places = zip(pairwise(limits), bases.tolist(), last.tolist(), whole.tolist(), strict=True)
    return [Segment(slice(*rows), slice(b, b + n), w) for rows, b, n, w in places]
