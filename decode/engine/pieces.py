"""A step in pieces: which of its rows may be fed in an earlier forward than the others, and how
much of whose step the next forward feeds.

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

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from decode.step import Ints, Predictions, Step

# Of prompts in one forward, where none is cut: many long ones together would need the memory of
# tens of thousands of rows at once, and gain nothing by it.
WHOLE_ROWS = 4096
NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


def allowed_cuts(step: Step, *, unwritten: int = -1) -> Ints:
    """Numbers of rows, ascending, that may be fed in a forward before the rest, to compute what
    they would in one; the last is all rows. The rows that are read before a cut are also the first
    that the step reads, so that predictions and draws keep their order.

    unwritten: the row that is taken to write a slot that none of them does; by default it holds
    what it held before. A number of rows forbids every cut after a row that sees such a slot.
    """
    rows = np.arange(len(step.tokens))
    writer = np.full(max(int(step.slots.max()) + 1, int(step.spans.max())), unwritten)
    writer[step.slots] = rows  # the last one that writes it
    # Up to which row each needs the others fed: no cut may lie between the two.
    needed = np.maximum(writer[step.slots], _largest(writer, step.spans).max(axis=1))
    np.maximum.at(needed, step.read, np.maximum.accumulate(step.read))
    return 1 + np.flatnonzero(np.maximum.accumulate(needed) <= rows)


def _largest(values: Ints, ranges: Ints) -> Ints:
    """The largest of ``values[start:end]`` of each range ``[..., 2]``, -1 where it is empty."""
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
    """How far a step has been fed. step: the step, or what gives it when it is first asked for (a
    session's width may be chosen until then). first: whether it is its request's first, mostly
    prompt.

    copied: leading rows whose keys and values came from another request (`decode.engine.prefixes`);
    of them only those that are read are fed. fed: rows before it were in an earlier forward. stop:
    where the piece in the forward that runs ends. waited: forwards since it was first asked for.
    """

    def __init__(self, step: Step | Callable[[], Step], *, first: bool = False):
        self._given, self.first = step, first
        self.copied = self.fed = self.waited = 0
        self._stop: int | None = None
        self._found: list[Predictions] = []

    @cached_property
    def step(self) -> Step:
        return self._given if isinstance(self._given, Step) else self._given()

    @property
    def stop(self) -> int:
        return len(self.step.tokens) if self._stop is None else self._stop

    @property
    def is_made(self) -> bool:
        return "step" in self.__dict__

    @cached_property
    def cuts(self) -> Ints:
        return allowed_cuts(self.step)

    @cached_property
    def closed(self) -> Ints:
        """The cuts before which no row sees what the step did not write."""
        return allowed_cuts(self.step, unwritten=len(self.step.tokens))

    @property
    def begin(self) -> int:
        """The first row that is to be fed, but for copied ones that are read."""
        return max(self.copied, self.fed)

    @property
    def again(self) -> Ints:
        """Copied rows that the next piece feeds all the same, to read them."""
        if not self.copied:  # as nearly always, and this is asked for each request in each forward
            return NO_ROWS
        read = self.step.read
        return np.unique(read[(read >= self.fed) & (read < self.copied)])

    @property
    def spared(self) -> int:
        """Rows that need not be fed, as they were copied."""
        if not self.copied:
            return 0
        return self.copied - len(np.unique(self.step.read[self.step.read < self.copied]))

    @property
    def left(self) -> int:
        """Rows that are still to be fed."""
        return len(self.step.tokens) - self.begin + len(self.again)

    def cut(self, room: int) -> int:
        """Where a piece of at most `room` rows may end, as far on as it may; 0: nowhere."""
        last = room + self.begin - len(self.again)
        fits = self.cuts[(self.cuts > self.begin) & (self.cuts <= last)]
        return int(fits[-1]) if len(fits) else 0

    def smallest(self) -> int:
        """Where the smallest piece ends."""
        return int(self.cuts[np.searchsorted(self.cuts, self.begin, "right")])

    def piece(self, stop: int) -> Step:
        """The step that feeds the rows up to `stop` that were not fed yet."""
        self._stop = stop
        if not self.begin and stop == len(self.step.tokens):
            return self.step
        return self._of(np.concatenate((self.again, np.arange(self.begin, stop))))

    def anew(self) -> Step:
        """The same, with all that was fed or copied before it fed once more."""
        return self._of(np.arange(self.stop))

    def take(self, predictions: Predictions) -> Predictions | None:
        """Take those of the last piece; all of the step's once it was fed, None before."""
        self._found.append(predictions)
        self.fed = self.stop
        return _joined(self._found) if self.fed == len(self.step.tokens) else None

    def _of(self, rows: Ints) -> Step:
        """Rows of the step, with its reads from `fed` up to `stop`. cached: with them what this
        step itself has in the cache already."""
        step = self.step
        first, end = (int((step.read < row).sum()) for row in (self.fed, self.stop))
        queried = step.queried_tokens
        return replace(
            step,
            tokens=step.tokens[rows],
            positions=step.positions[rows],
            slots=step.slots[rows],
            spans=step.spans[rows],
            read=np.searchsorted(rows, step.read[first:end]),
            cached=step.cached + self.begin,
            queried_tokens=None if queried is None else queried[first:end],
        )


def _joined(parts: list[Predictions]) -> Predictions:
    """The predictions of a step's pieces one after the other."""
    if len(parts) == 1:
        return parts[0]
    columns = [
        None if column[0] is None else np.concatenate(column)
        for column in zip(*(vars(part).values() for part in parts), strict=True)
    ]
    return Predictions(*columns)  # type: ignore[arg-type]


def share(feeds: Sequence[Feed], rows: int | None) -> list[int]:
    """Up to which of its rows each is fed in the next forward; 0: not at all.

    First steps, and steps of more than `rows` rows, have together at most `rows` rows in it, who
    waits longest first; all others go along whole, on top. A piece that cannot be so small (a
    bidirectional prompt) is the only one of its forward, and the others' steps go along as ever:
    were it to run by itself, they would wait for it and for the forward after it. None: as many as
    `WHOLE_ROWS` hold, at least one, and every step whole.
    """
    stops = [len(feed.step.tokens) for feed in feeds]
    most = WHOLE_ROWS if rows is None else rows
    bounded = [i for i, feed in enumerate(feeds) if feed.first or feed.fed or feed.left > most]
    room = most
    for i in sorted(bounded, key=lambda i: -feeds[i].waited):
        feed = feeds[i]
        feed.waited += 1
        if feed.left > room:
            stops[i] = 0 if rows is None else feed.cut(room)
            if not stops[i] and room == most:
                stops[i] = len(feed.step.tokens) if rows is None else feed.smallest()
        if stops[i]:
            room -= stops[i] - feed.begin + len(feed.again)
    return stops
