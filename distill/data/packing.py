"""Samples packed into rows: the same stream whatever the processes or resumes.

A row is `data.row_length` places that are fed as one sequence; its samples do not see each other.
A step is `data.rows` rows, over all processes. Samples are taken in order; each goes to the first
row with room; the first that fits nowhere opens the next step. So the position in the data is one
number. Two rows of 8 places and samples 0, 1, 2, ... of 5, 4, 3, 4 and 2 tokens:

    row 0      0 0 0 0 0 2 2 2    sample 2 fits in beside 0
    row 1      1 1 1 1 3 3 3 3    sample 4 fits in neither: it is the first of the next step
    positions  0 1 2 3 4 0 1 2    in row 0; each sample counts its own
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from distill.data.samples import Placed
from distill.data.stream import Stream


def fill_rows(stream: Stream, first: int) -> tuple[list[list[Placed]], int]:
    """The packed rows of the step that begins at sample `first`, and the next step's first.
    Samples that the stream leaves out are passed over. Raises InputError as the stream does."""
    rows: list[list[Placed]] = [[] for _ in range(stream.data.rows)]
    used = [0] * len(rows)
    index = first
    while True:
        sample = stream.sample(index)
        if sample is None:
            # A left-out record keeps its index: the order does not depend on what is left out.
            index += 1
            continue
        place = next(
            (i for i, n in enumerate(used) if n + len(sample) <= stream.data.row_length), None
        )
        # Room that is left stays empty, so that the next step begins at one sample and a resume
        # needs no more than its number.
        if place is None:
            return rows, index
        rows[place].append(Placed(sample, used[place]))
        used[place] += len(sample)
        index += 1


def lay_out(rows: list[list[Placed]], length: int) -> tuple[Tensor, Tensor]:
    """Clean ids and positions, int64 ``[rows, length]``; unused places hold 0."""
    ids = np.zeros((len(rows), length), dtype=np.int64)
    positions = np.zeros_like(ids)
    for r, row in enumerate(rows):
        for placed in row:
            part = slice(placed.start, placed.start + len(placed.sample))
            ids[r, part] = placed.sample.prompt + placed.sample.response
            positions[r, part] = np.arange(len(placed.sample))
    return torch.from_numpy(ids), torch.from_numpy(positions)
