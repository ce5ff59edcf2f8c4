"""Kept token lengths: whole or not at all, and no failure where they cannot be kept."""

from __future__ import annotations

import numpy as np
import pytest

from distill.data.samples import SMALL, LengthsFile


@pytest.fixture
def lengths(tmp_path):
    made = object.__new__(LengthsFile)
    made.path = tmp_path / "cache" / "lengths.npy"
    return made


def test_what_is_written_is_read(lengths):
    counted = np.arange(2 * SMALL, dtype=np.int32).reshape(SMALL, 2)
    lengths.write(counted)
    assert np.array_equal(lengths.read(SMALL), counted)
    assert lengths.read(SMALL + 1) is None, "another number of rows is another set"


def test_where_the_disk_is_full_nothing_stays(lengths, monkeypatch):
    def full(file, array):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    lengths.write(np.zeros((SMALL, 2), dtype=np.int32))
    assert list(lengths.path.parent.iterdir()) == []
    assert lengths.read(SMALL) is None
