"""How long a forward takes, from what it feeds: measured, or a GPU's floor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import ValidationError

from d2f.checkpoint import read_object
from d2f.config import Section, explain
from d2f.errors import InputError

NS = 1_000_000  # nanoseconds in a millisecond


class ForwardTime(Section):
    """Milliseconds of a forward that feeds `rows` of `requests` requests on `cached` slots:
    `points` read at the rows, and so much a request and a cached slot. Between two points the time
    is on the line through them, beyond the last one too, before the first it is the first one's."""

    kind: Literal["measured", "estimated floor"]
    """Where it is from."""
    points: tuple[tuple[int, float], ...]
    """(rows, ms), by rows."""
    request_ms: float = 0.0
    """Of each request in the forward: its own Python, its attention on a CPU."""
    cached_ms: float = 0.0
    """Of each slot that is read."""

    def by_rows(self, most: int) -> list[int]:
        """Nanoseconds of 0 to `most` rows, without requests and slots."""
        rows, ms = (list(column) for column in zip(*self.points, strict=True))
        if rows[-1] < most:
            slope = (ms[-1] - ms[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
            ms.append(ms[-1] + slope * (most - rows[-1]))
            rows.append(most)
        return [round(NS * value) for value in np.interp(range(most + 1), rows, ms)]

    def check(self, where: str) -> None:
        """Raise InputError unless more rows never take less, and no forward takes no time."""
        rows, times = [count for count, _ in self.points], [ms for _, ms in self.points]
        if not rows or rows[0] < 1 or any(a >= b for a, b in pairwise(rows)):
            raise InputError(f"{where}: expected points of rows from 1 on that grow, got {rows}")
        added = self.request_ms, self.cached_ms
        if times != sorted(times) or min(times[0], *added) < 0 or times[0] + added[0] <= 0:
            raise InputError(
                f"{where}: expected times above 0 that never fall with the rows, got {times}, "
                f"request_ms {added[0]:g} and cached_ms {added[1]:g}"
            )


def fitted(forwards: ArrayLike) -> ForwardTime:
    """The time that measured forwards took. forwards: ``[n, 4]``, each rows, cached slots, requests
    and milliseconds.

    Least squares with no negative part, so that more work never takes less: a constant, so much a
    row between two powers of two, a request, a slot. The mean over all forwards is kept, as the
    constant is free (unless it would fall below 0). Needs scipy (the extra `ablation`).
    """
    found = np.asarray(forwards, dtype=np.float64)
    rows, cached, requests, ms = found.T
    knots = _knots(int(rows.min()), int(rows.max()))
    ramps = [np.clip(rows, low, high) - low for low, high in pairwise(knots)]
    parts = [np.ones_like(rows), requests, cached, *ramps]
    constant, request, slot, *slopes = nonnegative(parts, ms)
    points, height = [(knots[0], constant)], constant
    for (low, high), slope in zip(pairwise(knots), slopes, strict=True):
        height += slope * (high - low)
        points.append((high, height))
    return ForwardTime(
        kind="measured", points=tuple(points), request_ms=request, cached_ms=slot
    )  # fmt: skip


def nonnegative(parts: Sequence[NDArray[np.float64]], total: NDArray[np.float64]) -> list[float]:
    """How much of each part adds up to `total` best (least squares), none of it negative."""
    from scipy.optimize import nnls

    columns = np.stack(parts, axis=1)
    # Columns of one size: slots come by the hundred, requests one by one.
    sizes = np.maximum(np.abs(columns).max(axis=0), 1e-12)
    found, _ = nnls(columns / sizes, total)
    return [float(value) for value in found / sizes]


def _knots(least: int, most: int) -> list[int]:
    """The powers of two between, and both ends."""
    inner = [2**n for n in range(1, most.bit_length()) if least < 2**n < most]
    return sorted({least, *inner, most})


def read_time(path: Path) -> ForwardTime:
    """Of a file: a `ForwardTime` as a recording has it, or what `python -m benchmarks.forward
    --json` wrote, a point a batch size: its median rows and milliseconds, in which its requests'
    own work is included. Raises InputError."""
    values = read_object(path)
    try:
        if "points" not in values:
            found = {round(row["rows"]): float(row["forward"]) for row in values.values()}
            values = {"kind": "measured", "points": sorted(found.items())}
        time = ForwardTime.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise InputError(f"{path}: {explain(error, values)}") from error
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(
            f"{path}: expected `points`, or what `python -m benchmarks.forward --json` writes"
        ) from error
    time.check(str(path))
    return time
