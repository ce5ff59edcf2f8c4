"""The ledger: what was measured stays, and is not mistaken for another run's."""

import errno
import json
import os

import numpy as np
import pytest
from made_up import counted

from d2f.errors import InputError, OutputError
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
        ledger.add(one)
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


@pytest.mark.parametrize("cut", [1, 40])
def test_a_torn_last_line(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    filled(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    ledger = TuningLedger(path, RUN)
    assert ledger.torn and len(ledger.done) == 3
    assert path.read_bytes() == whole[:-cut]  # reading changes nothing
    ledger.add(measurement(0, "heldout", 1))
    assert path.read_bytes() == whole


def test_a_torn_header(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({"run": RUN}))  # its line end is missing
    ledger = TuningLedger(path, RUN)
    ledger.add(measurement(0))
    assert len(TuningLedger(path, RUN).done) == 1


def test_another_run_is_refused(tmp_path):
    path = tmp_path / "m.jsonl"
    filled(path)
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"another run: seed was 0, now 1; weights was 'aa', now"):
        TuningLedger(path, RUN | {"seed": 1, "weights": "bb"})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["text\n", "{}\n", "[1]\n", '{"run": 3}\n'])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "m.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="is not a ledger of this command"):
        TuningLedger(path, RUN)
    assert path.read_text() == content


def test_a_line_that_is_no_measurement(tmp_path):
    path = tmp_path / "m.jsonl"
    filled(path)
    lines = path.read_text().splitlines(keepends=True)
    for bad in (lines[1], '{"task": "story"}\n', lines[1].replace('"right": [1, ', '"right": [')):
        path.write_text("".join([*lines, bad]))
        with pytest.raises(InputError, match="line 6 is not a measurement of this run"):
            TuningLedger(path, RUN)


def test_a_full_disk_leaves_what_was_measured(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    ledger = filled(path)
    whole = path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OutputError, match=r"m.jsonl could not be written: No space left"):
            ledger.add(measurement(6))
    assert path.read_bytes() == whole and len(ledger.done) == 4
    ledger.add(measurement(6))
    assert len(TuningLedger(path, RUN).done) == 5
