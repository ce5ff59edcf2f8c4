"""The ledger: what was measured stays, and is not mistaken for another run's."""

import numpy as np
from made_up import counted

from decode.tune import JobDone, TuningLedger, job

RUN = {"weights": "aa", "seed": 0, "grid": {"tau_conf": [0.9, 1.0]}}


def measurement(first, split="tuning", repetition=0, tau_conf=0.9):
    place = job("story", split, {"tau_conf": tau_conf, "block_size": 8}, first, first + 3)
    if repetition:
        place = job("story", split, dict(place.setting), first, first + 3, repetition)
    return JobDone(place, counted(2, 3, 5.0), 1.5)


def filled(path):
    ledger = TuningLedger(path, RUN)
    for one in (
        measurement(0),
        measurement(3, tau_conf=1.0),
        measurement(0, "heldout"),
        measurement(0, "heldout", 1),
    ):
        ledger.add_done(one)
    ledger.close()
    return ledger


def same(a, b):
    return all(
        np.array_equal(getattr(a.measured, name), getattr(b.measured, name))
        for name in ("right", "tokens", "forwards", "seconds")
    ) and (a.job, a.wall) == (b.job, b.wall)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "m.jsonl"
    written, read = filled(path), TuningLedger(path, RUN)
    assert list(read.done) == list(written.done) and not read.torn
    assert all(same(read.done[key], written.done[key]) for key in read.done)
    assert read.spent("story") == 3.0  # the search's, not the final measurement's
    assert read.spent("sudoku") == 0
