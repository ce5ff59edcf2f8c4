"""Step: what a decoder asks the model to compute. Predictions: what it gets back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from d2f.span_makers import Ints as Ints
from d2f.span_makers import prefix

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """Five integer arrays of one request; slots, spans and read count from its own 0.

    tokens, positions, slots: ``[T]``, what is fed, where it stands, which slot it overwrites.
    spans: ``[T, K, 2]``, the slots that each row sees. read: ``[N]``, the rows whose predictions
    are wanted; a row may be read more than once. cached: how many leading slots were final before
    this step. queried_tokens: ``[N]``, a token for each row that is read, whose probability is
    wanted beside that of the chosen one. uncertainty: whether entropy and margin are wanted.

    D2F with a cached prompt ``7 8`` and two open blocks of 2, of which position 2 is decided (9)
    and the others hold the mask id m::

        position     0 1 | 2       3       | 4       5
        x            7 8 | 9       m       | m       m

        tokens             9       m         m       m
        positions          2       3         4       5
        slots              2       3         4       5
        spans              [0, 4)  [0, 4)    [0, 6)  [0, 6)
        read                       1         2       3      (Dream's rows: 0, 1, 2)
        cached       2
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    spans: Ints
    read: Ints
    cached: int
    queried_tokens: Ints | None = None
    uncertainty: bool = False


@dataclass(frozen=True)
class Predictions:
    """Of each row that was read, from its logits in fp32.

    token: int64 ``[N]``, the chosen one, never the mask id. The others are fp32 ``[N]``, under the
    full softmax. confidence: probability of that token. queried_probability: that of the token that
    the step queried; queried_log_probability: its natural logarithm, also where the probability
    rounds to 0. entropy: in nats. margin: difference of the two largest probabilities, the
    mask id's left out. None where the step did not ask.
    """

    token: Ints
    confidence: Floats
    queried_probability: Floats | None = None
    queried_log_probability: Floats | None = None
    entropy: Floats | None = None
    margin: Floats | None = None

    def rows(self, part: slice) -> Predictions:
        """Those of some of the rows."""
        found = {name: column[part] for name, column in vars(self).items() if column is not None}
        return Predictions(**found)


def feed(
    x: Ints,
    first: int,
    ends: Ints,
    wanted: Ints,
    *,
    cached: int,
    logit_shift: int,
    uncertainty: bool = False,
) -> Step:
    """The step that feeds positions ``[first, len(ends))`` of the sequence x, slot = position.

    ends: ``[len]``, each position sees ``[0, ends[p])``. wanted: positions to predict; a shifted
    family reads row p - 1 for position p, and where that row is already cached it is fed again
    (its keys and values do not change). With blocks ``[2, 4)`` and ``[4, 6)``, the first cached::

        feed(x, first=4, ends=[2 2 4 4 6 6], wanted=[4 5], ...)

        logit_shift    positions fed    spans                   read
        0              4 5              [0, 6) [0, 6)           0 1
        1              3 4 5            [0, 4) [0, 6) [0, 6)    0 1    (rows of positions 3 and 4)
    """
    # Row p - 1 predicts position p in a shifted family.
    rows = wanted - logit_shift  # by position
    if len(rows) and rows[0] < first:
        # Row p - 1 of the first wanted position lies before what must be fed: one cached row more.
        first = int(rows[0])
    fed = np.arange(first, len(ends))
    return Step(
        tokens=x[first : len(ends)],
        positions=fed,
        slots=fed,
        spans=prefix(ends[first:]),
        read=rows - first,
        cached=cached,
        uncertainty=uncertainty,
    )
