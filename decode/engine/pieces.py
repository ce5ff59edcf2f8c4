"""Feed a step in pieces: which rows may go into an earlier forward than the others.

In a forward all rows write their slots, then each sees what its spans name. Rows that are fed
earlier therefore compute the same if none of them sees a slot that a later row writes. A prompt of
4 (positions 0 to 3) with the open block ``[4, 6)``, whose mask at 4 is read, and the numbers of
rows after which the step may be cut, under three masks::

    position              0       1       2       3       4       5         cuts
    sees  causal          [0, 1)  [0, 2)  [0, 3)  [0, 4)  [0, 5)  [0, 6)    1 2 3 4 5 6
          block-causal    [0, 4)  [0, 4)  [0, 4)  [0, 4)  [0, 6)  [0, 6)    4 6
          bidirectional   [0, 6)  [0, 6)  [0, 6)  [0, 6)  [0, 6)  [0, 6)    6

The engine knows no mask: the cuts are read off the step's arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from decode.step import Ints, Predictions, Step


def allowed_cuts(step: Step, *, unwritten: int = -1) -> Ints:
    """Find after how many rows a step may be cut without changing what it computes: ascending, the
    last is all rows. The rows read before a cut are the first that the step reads, so that
    predictions and draws keep their order.

    unwritten: which row is taken to write a slot that no row of the step writes. By default none,
    the slot holds what it held; the number of rows forbids all cuts after a row that sees it.
    """
    rows = np.arange(len(step.tokens))
    writer = np.full(max(int(step.slots.max()) + 1, int(step.spans.max())), unwritten)
    writer[step.slots] = rows  # the last one that writes it
    # Up to which row each needs the others fed: no cut may lie between the two.
    needed = np.maximum(writer[step.slots], _largest(writer, step.spans).max(axis=1))
    np.maximum.at(needed, step.read, np.maximum.accumulate(step.read))
    return 1 + np.flatnonzero(np.maximum.accumulate(needed) <= rows)


def _largest(values: Ints, ranges: Ints) -> Ints:
    """Find the largest of ``values[start:end]`` for ranges ``[..., 2]``, -1 where one is empty."""
    starts, ends = ranges[..., 0], ranges[..., 1]
    found = np.full(starts.shape, -1)
    # largest[i] is that of values[i : i + width]; two of them cover any range of up to 2 * width.
    largest, width = values, 1
    while True:
        fits = (ends - starts >= width) & (ends - starts < 2 * width)
        found[fits] = np.maximum(largest[starts[fits]], largest[ends[fits] - width])
        if 2 * width > len(values):
            return found
        largest = np.maximum(largest[:-width], largest[width:])
        width *= 2


class Feed:
    """A request's step on its way into the cache.

    first: it is its request's first step, mostly prompt.
    copied: leading rows whose keys and values were copied from another request
        (`decode.engine.prefixes`); of these only the rows that are read are fed.
    fed: rows before it were in an earlier forward.
    stop: where the current piece ends.
    waited: forwards in which it had to compete for room.
    """

    def __init__(self, step: Step, *, first: bool = False):
        self.step, self.first = step, first
        self.copied = self.fed = self.waited = 0
        self.stop = len(step.tokens)
        self._found: list[Predictions] = []

    @cached_property
    def cuts(self) -> Ints:
        return allowed_cuts(self.step)

    @cached_property
    def closed(self) -> Ints:
        """The cuts before which no row sees what the step did not write."""
        return allowed_cuts(self.step, unwritten=len(self.step.tokens))

    @property
    def begin(self) -> int:
        """The first row to feed, apart from copied rows that are read."""
        return max(self.copied, self.fed)

    @property
    def again(self) -> Ints:
        """Copied rows that the next piece feeds because they are read."""
        read = self.step.read
        return np.unique(read[(read >= self.fed) & (read < self.copied)])

    @property
    def spared(self) -> int:
        """Count the rows that were copied and need not be fed."""
        return self.copied - len(np.unique(self.step.read[self.step.read < self.copied]))

    @property
    def left(self) -> int:
        """Count the rows that are still to be fed."""
        return len(self.step.tokens) - self.begin + len(self.again)

    def cut(self, room: int) -> int:
        """Find the end of the largest piece of at most `room` rows, 0 if there is none."""
        last = room + self.begin - len(self.again)
        fits = self.cuts[(self.cuts > self.begin) & (self.cuts <= last)]
        return int(fits[-1]) if len(fits) else 0

    def smallest(self) -> int:
        """Find the end of the smallest piece."""
        return int(self.cuts[np.searchsorted(self.cuts, self.begin, "right")])

    def piece(self, stop: int) -> Step:
        """Make the step that feeds the remaining rows up to `stop`."""
        self.stop = stop
        if not self.begin and stop == len(self.step.tokens):
            return self.step
        return self._of(np.concatenate((self.again, np.arange(self.begin, stop))))

    def anew(self) -> Step:
        """Make the current piece again, with all rows before it fed once more."""
        return self._of(np.arange(self.stop))

    def take(self, predictions: Predictions) -> Predictions | None:
        """Take those of the current piece; returns the whole step's with the last piece, else
        None."""
        self._found.append(predictions)
        self.fed = self.stop
        return Predictions.joined(self._found) if self.fed == len(self.step.tokens) else None

    def _of(self, rows: Ints) -> Step:
        """Make a step of some rows, with the reads from `fed` up to `stop`."""
        step = self.step
        first, end = (int((step.read < row).sum()) for row in (self.fed, self.stop))
        queried, draws = step.queried_tokens, step.draws
        return replace(
            step,
            tokens=step.tokens[rows],
            positions=step.positions[rows],
            slots=step.slots[rows],
            spans=step.spans[rows],
            read=np.searchsorted(rows, step.read[first:end]),
            cached=step.cached + self.begin,
            queried_tokens=None if queried is None else queried[first:end],
            draws=None if draws is None else draws[first:end],
        )


def share(feeds: Sequence[Feed], rows: int) -> list[int]:
    """Choose up to which row each is fed in the next forward; 0: not at all.

    First steps, and steps of more than `rows` rows, have at most `rows` rows together; the one that
    has waited longest comes first. All other steps are fed whole, on top. A piece that cannot be so
    small (a bidirectional prompt) is the only one of its forward, but the other steps go along.
    """
    stops = [len(feed.step.tokens) for feed in feeds]
    bounded = [i for i, feed in enumerate(feeds) if feed.first or feed.fed or feed.left > rows]
    room = rows
    for i in sorted(bounded, key=lambda i: -feeds[i].waited):
        feed = feeds[i]
        feed.waited += 1
        if feed.left > room:
            stops[i] = feed.cut(room)
            if not stops[i] and room == rows:
                stops[i] = feed.smallest()
        if stops[i]:
            room -= stops[i] - feed.begin + len(feed.again)
    return stops
