"""Made-up measurements: no model, no clock."""

from __future__ import annotations

import numpy as np

from decode.evaluate import Judged
from decode.report import Measurements
from decode.step import Result

TOKENS = 10  # a problem


def measured(right, speed: float) -> Measurements:
    """Problems right or not, each of `TOKENS` tokens, at so many tokens per second."""
    count = len(right)
    return Measurements(
        np.array(right, dtype=bool),
        np.full(count, TOKENS),
        np.full(count, 2),
        np.full(count, TOKENS / speed),
    )


def counted(right: int, problems: int, speed: float) -> Measurements:
    """The first `right` of the problems right."""
    return measured(np.arange(problems) < right, speed)


class Model:
    """Measures for `run_search`: setting {"i": i} has the speed speeds[i], and right[i, n] says
    whether it solves problem n. calls: what was measured. most: calls that the budget
    allows."""

    def __init__(self, right, speeds, most=None):
        self.right, self.speeds, self.most = np.asarray(right, dtype=bool), speeds, most
        self.calls: list[tuple[int, int, int]] = []

    @property
    def settings(self):
        return [{"i": i} for i in range(len(self.speeds))]

    def __call__(self, setting, first, stop):
        if self.most is not None and len(self.calls) >= self.most:
            return None
        self.calls.append((setting["i"], first, stop))
        return measured(self.right[setting["i"], first:stop], self.speeds[setting["i"]])


def judge(model, decoder, task, problems, *, batch_size):
    """In place of `decode_and_judge`: a higher tau_conf is slower, and right on more problems."""
    seconds = 0.01 + 0.1 * decoder.tau_conf
    result = Result([1] * TOKENS, [1] * TOKENS, "", 2, [(1, 0)] * 2, seconds, "end", 5)
    right = [len(problem.question) % 10 < 10 * decoder.tau_conf for problem in problems]
    return Judged([result] * len(problems), right, seconds * len(problems))
