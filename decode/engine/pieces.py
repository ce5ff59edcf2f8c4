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
    """Find the numbers of rows, ascending, that may be fed in a forward before the rest, to compute
    what they would in one; the last is all rows. The rows that are read before a cut are also the
    first that the step reads, so that predictions and draws keep their order.

    unwritten: the row that is taken to write a slot that none of them does; by default it holds
    what it held before. The number of rows forbids every cut after a row that sees such a slot.
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

    first: it is its request's first, mostly prompt.
    copied: leading rows whose keys and values came from another request (`decode.engine.prefixes`);
        of them only those that are read are fed.
    fed: rows before it were in an earlier forward. stop: where the running piece ends.
    waited: forwards that it was looked at for.
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
        """The first row to feed, but for copied ones that are read."""
        return max(self.copied, self.fed)

    @property
    def again(self) -> Ints:
        """Copied rows that the next piece feeds all the same, to read them."""
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
        """Find the last row where a piece of at most `room` rows may end; 0: there is none."""
        last = room + self.begin - len(self.again)
        fits = self.cuts[(self.cuts > self.begin) & (self.cuts <= last)]
        return int(fits[-1]) if len(fits) else 0

    def smallest(self) -> int:
        """Find where the smallest piece ends."""
        return int(self.cuts[np.searchsorted(self.cuts, self.begin, "right")])

    def piece(self, stop: int) -> Step:
        """Make the step that feeds the rows up to `stop` that were not fed yet."""
        self.stop = stop
        if not self.begin and stop == len(self.step.tokens):
            return self.step
        return self._of(np.concatenate((self.again, np.arange(self.begin, stop))))

    def anew(self) -> Step:
        """Make the running piece again, with all that was fed or copied before it fed once more."""
        return self._of(np.arange(self.stop))

    def take(self, predictions: Predictions) -> Predictions | None:
        """Take those of the last piece; returns all of the step's once it was fed, None before."""
        self._found.append(predictions)
        self.fed = self.stop
        return _joined(self._found) if self.fed == len(self.step.tokens) else None

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


def _joined(parts: list[Predictions]) -> Predictions:
    if len(parts) == 1:
        return parts[0]
    columns = [
        None if column[0] is None else np.concatenate(column)
        for column in zip(*(vars(part).values() for part in parts), strict=True)
    ]
    return Predictions(*columns)  # type: ignore[arg-type]


def share(feeds: Sequence[Feed], rows: int) -> list[int]:
    """Choose up to which of its rows each is fed in the next forward; 0: not at all.

    First steps, and steps of more than `rows` rows, have together at most `rows` rows in it, who
    waits longest first; all others go along whole, on top. A piece that cannot be so small (a
    bidirectional prompt) is the only one of its forward, and the others' steps go along as ever:
    were it to run by itself, they would wait for it and for the forward after it.
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
