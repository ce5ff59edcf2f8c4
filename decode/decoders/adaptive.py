"""Lossless sessions whose speculation the engine may widen and narrow before each forward.

What such a session decodes does not depend on how many rows it speculates with, only in how many
forwards: so its width is a matter of time alone, which `decode.engine.row_budget` knows about.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence

from decode.decoders.base import Session
from decode.step import Step

AUTO = "auto"


class Adaptive(Session):
    """A session of a lossless decoder.

    widths: how wide it may speculate, ascending, the first without speculation; empty where the
    width is fixed. width: the one of the next step. learns_with: sessions with the same, on the
    same model, are expected to gain the same from a width. rows_alone: what a step of the first
    width feeds behind the first step, where that is known without trying. A step is made in two
    parts, so that the width may be chosen between them. To be named last among a session's bases.
    """

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.widths: tuple[int, ...] = ()
        self.width = 1
        self.learns_with: Hashable = None
        self.rows_alone: int | None = None

    def widen_by(self, widths: Sequence[int], learns_with: Hashable) -> None:
        """Let the width be chosen among these."""
        self.widths, self.width, self.learns_with = tuple(widths), widths[0], learns_with

    @abc.abstractmethod
    def proceed(self) -> bool:
        """Go on to the next step; False where the request is done. Called once a step."""

    @abc.abstractmethod
    def feed_step(self) -> Step:
        """The step itself, as wide as `width` says."""
