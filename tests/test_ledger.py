"""A ledger goes on where a run was stopped, and refuses the files of other runs."""

from __future__ import annotations

import errno
import json
import os

import pytest

from d2f.errors import InputError, OutputError
from decode.ledger import Ledger, refuse_early

RUN = {"model": "tiny", "seed": 0, "lengths": (8, 16)}
ROWS = [{"id": "a", "right": True}, {"id": "b", "right": False}, {"id": 3, "text": "é\u2028"}]


@pytest.fixture
def path(tmp_path):
    """A ledger with three rows."""
    place = tmp_path / "rows.jsonl"
    with Ledger(place, RUN) as ledger:
        for row in ROWS:
            ledger.add(row)
    return place


def test_what_is_written_is_read(path):
    header, *lines = path.read_text().splitlines()
    assert json.loads(header) == {"run": {"model": "tiny", "seed": 0, "lengths": [8, 16]}}
    assert [json.loads(line) for line in lines] == ROWS
    with Ledger(path, RUN) as ledger:
        assert ledger.rows == {row["id"]: row for row in ROWS} and not ledger.torn


@pytest.mark.parametrize("cut", [1, 26])
def test_a_torn_last_row_is_dropped(path, cut):
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    refuse_early(path, RUN)
    assert path.read_bytes() == whole[:-cut]
    with Ledger(path, RUN) as ledger:
        assert ledger.torn and list(ledger.rows) == ["a", "b"]
        ledger.add(ROWS[-1])
    assert path.read_bytes() == whole


def test_another_run_is_refused_with_the_differences_named(path):
    before = path.read_bytes()
    other = RUN | {"seed": 1, "weights": "bb"}
    with pytest.raises(InputError, match="seed was 0, now 1; weights was None, now 'bb'; nothing"):
        Ledger(path, other)
    assert path.read_bytes() == before
    Ledger(path, RUN).close()  # the refused one holds no lock


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_header_without_rows_is_replaced(tmp_path, end):
    """Also one that was cut: nothing may be put behind it."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"run": RUN}) + end)
    with Ledger(path, {"seed": 1}) as ledger:
        ledger.add(ROWS[0])
    with Ledger(path, {"seed": 1}) as ledger:
        assert list(ledger.rows) == ["a"]


@pytest.mark.parametrize("content", ["text\n", "{}\n", "[1]\n", '{"run": 3}\n'])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    for refuse in (Ledger, refuse_early):
        with pytest.raises(InputError, match="is not an output of this command"):
            refuse(path, RUN)
    assert path.read_text() == content


def test_early_only_settings_that_need_no_weights_are_compared(path):
    refuse_early(path, RUN | {"weights": ""})
    with Ledger(path, RUN), pytest.raises(OutputError, match="is being written by"):
        refuse_early(path, RUN)
    with pytest.raises(InputError, match="seed was 0, now 1"):
        refuse_early(path, RUN | {"seed": 1})


@pytest.mark.parametrize("call", ["os.write", "os.fsync"])
def test_a_full_disk_leaves_what_was_there(path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    whole = path.read_bytes()
    with Ledger(path, RUN, sync=True) as ledger:
        with monkeypatch.context() as patch, pytest.raises(OutputError, match="No space left"):
            patch.setattr(call, full)
            ledger.add({"id": "d"})
        assert path.read_bytes() == whole and "d" not in ledger.rows
        ledger.add({"id": "d"})
    with Ledger(path, RUN) as ledger:
        assert len(ledger.rows) == 4


def test_rows_after_a_torn_first_row_stay_and_opening_writes_nothing(tmp_path):
    path = tmp_path / "out.jsonl"
    with Ledger(path, {"a": 1}) as ledger:
        assert not path.exists()
        ledger.start()
    assert path.read_text() == '{"run": {"a": 1}}\n'
    with path.open("a") as file:
        file.write('{"id": "x", "ri')
    with Ledger(path, {"a": 1}, fields=("id",)) as ledger:
        ledger.add({"id": "x", "text": "long"})
        ledger.add({"id": "y", "text": "long"})
        assert ledger.rows == {"x": {"id": "x"}, "y": {"id": "y"}}  # what is kept in memory
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"run": {"a": 1}}, {"id": "x", "text": "long"}, {"id": "y", "text": "long"},
    ]  # fmt: skip
