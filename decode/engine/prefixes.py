"""Prompts that begin alike: the keys and values of rows that another request has fed are copied,
slot to slot, instead of fed.

A request's first step feeds its prompt. Where its first rows have the tokens, positions, slots and
spans of another's first rows, and neither see nor share a slot with what comes after them
(`decode.engine.pieces`), they compute the same. What may be copied follows from the mask, which the
engine does not know; prompts ``7 8 9 4`` and ``7 8 9 5``, blocks of 2::

    causal                   7 8 9    any rows that begin alike
    absolute block-causal    7 8      whole blocks
    block-causal (D2F)                the prompt is one block: all of it, if the prompts are equal
    bidirectional                     nothing: every row sees the response
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from d2f.cache import SlotCache
from d2f.spans import widened
from decode.engine.pieces import Feed
from decode.step import Ints, Step


class Source:
    """The first step of a request, once it was fed.

    final: rows before it are in its slots as that step left them.
    ended: its request is done, its slots are kept only for others to copy.
    """

    def __init__(self, feed: Feed):
        self.feed = feed
        self.final = len(feed.step.tokens)
        self.ended = False
        self._row = np.full(int(feed.step.slots.max()) + 1, -1)  # by slot
        self._row[feed.step.slots] = np.arange(self.final)

    def note(self, later: Step) -> None:
        """Find which rows a later step of the request changes. A row that is fed again only to be
        read (Dream's before a block) stays as it is."""
        fed = np.flatnonzero(later.slots < len(self._row))
        rows = self._row[later.slots[fed]]
        fed, rows = fed[rows >= 0], rows[rows >= 0]
        changed = rows[~_alike(self.feed.step, rows, later, fed)]
        self.final = min(self.final, int(changed.min(initial=self.final)))

    def common(self, feed: Feed) -> int:
        """Count the leading rows of a first step that may be copied from this one."""
        # Never all: only a bidirectional step of an equal request could be copied whole, and that
        # only at one moment of its decoding.
        most = min(self.final, len(feed.step.tokens) - 1)
        if not most or self.feed.step.tokens[0] != feed.step.tokens[0]:
            return 0
        rows = np.arange(most)
        other = np.flatnonzero(~_alike(self.feed.step, rows, feed.step, rows))
        most = int(other[0]) if len(other) else most
        cuts = np.intersect1d(self.feed.closed, feed.closed, assume_unique=True)
        return int(cuts[cuts <= most].max(initial=0))

    @property
    def useful(self) -> bool:
        """Say whether another request could copy a row."""
        return bool((self.feed.closed <= self.final).any())


class Prefixes:
    """LRU of prompts whose rows are still in the cache, keyed by first slot.

    reused_rows: how many rows were copied and not fed.
    """

    def __init__(self, cache: SlotCache):
        self.cache = cache
        self.reused_rows = 0
        self._sources: dict[int, Source] = {}

    def add(self, base: int, feed: Feed) -> None:
        """Remember a first step that was fed, of which what was read is finite."""
        self._sources[base] = Source(feed)

    def note(self, base: int, step: Step) -> None:
        """Note that a step of the request at `base` is fed next."""
        if base in self._sources:
            self._sources[base].note(step)

    def drop(self, base: int) -> None:
        """Forget a request: what is in its slots may be anything."""
        self._sources.pop(base, None)

    def keep(self, base: int) -> bool:
        """Say whether the slots of a request that is done are kept, until `evict` returns them."""
        source = self._sources.pop(base, None)
        if source is None or not source.useful:
            return False
        source.ended = True
        self._sources[base] = source
        return True

    def evict(self) -> int | None:
        """Give up the oldest finished request; returns its first slot, None if there is none."""
        base = next((base for base, source in self._sources.items() if source.ended), None)
        if base is not None:
            self.drop(base)
        return base

    def wanted(self, feed: Feed) -> tuple[int, int]:
        """Find the request that has most rows of a first step, to be evicted last. Returns its
        first slot and how many leading rows it has, (0, 0) if there is none."""
        found = {base: source.common(feed) for base, source in self._sources.items()}
        base = max(found, key=found.__getitem__, default=0)
        if not found.get(base):
            return 0, 0
        self._sources[base] = self._sources.pop(base)
        return base, found[base]

    def fill(self, base: int, feed: Feed) -> None:
        """Copy what another request has of a first step into the slots from `base` on."""
        source, rows = self.wanted(feed)
        if rows <= feed.copied:
            return
        slots = torch.from_numpy(np.unique(feed.step.slots[:rows]))
        self.cache.copy(slots + source, slots + base)
        self.reused_rows -= feed.spared
        feed.copied = rows
        self.reused_rows += feed.spared


def _alike(a: Step, rows: Ints, b: Step, others: Ints) -> NDArray[np.bool_]:
    """Compare a's rows to those of b: token, position, slot and spans."""
    width = max(a.spans.shape[1], b.spans.shape[1])
    spans = widened(a.spans[rows], width) == widened(b.spans[others], width)
    return (
        (a.tokens[rows] == b.tokens[others])
        & (a.positions[rows] == b.positions[others])
        & (a.slots[rows] == b.slots[others])
        & spans.all(axis=(1, 2))
    )
