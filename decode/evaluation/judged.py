"""Problems decoded together and judged, for those who want the verdicts and no report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from d2f.model import DiffusionModel
from d2f.tasks import Problem, Task
from decode.api import generate
from decode.commands.task_problems import encode_problems
from decode.decoders import Decoder
from decode.engine.result import Result
from decode.reporting.measurements import Measurements


@dataclass(frozen=True)
class Judged:
    """Problems that were decoded together: a result and a verdict each, and the wall seconds of
    the decoding, prompts included."""

    results: list[Result]
    right: list[bool]
    seconds: float

    def measurements(self) -> Measurements:
        """Problem by problem; each has the share of the seconds that its own time has."""
        own = np.array([result.seconds for result in self.results])
        return Measurements(
            np.array(self.right, dtype=bool),
            np.array([len(result.tokens) for result in self.results], dtype=np.int64),
            np.array([result.forwards for result in self.results], dtype=np.int64),
            # Requests of a batch overlap: scaled, their seconds add up to the time that passed.
            own * (self.seconds / own.sum()),
        )


def decode_and_judge(
    model: DiffusionModel,
    decoder: Decoder,
    task: Task,
    problems: Sequence[Problem],
    *,
    batch_size: int,
) -> Judged:
    """Decode the problems and check the responses; only the decoding is timed."""
    # Prompts are encoded within the time that is counted, answers checked outside of it.
    began = time.perf_counter()
    ids = encode_problems(model, problems, decoder)
    results = generate(model, ids, decoder, batch_size=batch_size)
    seconds = time.perf_counter() - began
    right = [task.right(p, r.text or "") for p, r in zip(problems, results, strict=True)]
    return Judged(results, right, seconds)
