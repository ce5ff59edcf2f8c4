"""What is written is whole or not there, whatever fails; one command at a time writes it."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from d2f.errors import OutputError
from d2f.files import (
    GrowingFile,
    locked,
    locked_file,
    write_beside,
    writing,
    writing_folder,
)

ROOT = Path(__file__).parents[1]


def fill_folder(place):
    with writing_folder(place) as folder:
        (folder / "new").write_text("new")


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        (tmp_path / f"to_{name}").symlink_to(name)
    write_beside(tmp_path / "to_file", "new")
    fill_folder(tmp_path / "to_folder")
    assert (tmp_path / "file").read_text() == "new" == (tmp_path / "folder" / "new").read_text()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["file", "folder", "to_file", "to_folder"]


def test_what_a_killed_command_left_does_not_stay(tmp_path):
    (tmp_path / "file.writing").write_text("half")
    (tmp_path / "folder.writing").mkdir()
    (tmp_path / "folder.writing" / "half").touch()
    write_beside(tmp_path / "file", "whole")
    fill_folder(tmp_path / "folder")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == [
        "file", "folder", "folder/new",
    ]  # fmt: skip


def test_a_folder_that_a_kill_left_beside_its_place_is_put_back(tmp_path):
    place, old = tmp_path / "model", tmp_path / "model.replaced"
    old.mkdir()
    (old / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        with writing_folder(place):
            raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["model"] and (place / "old").is_file()
    fill_folder(place)
    assert [p.name for p in place.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def full(*args, **more):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    place = tmp_path / "out"
    place.write_text("before")
    monkeypatch.setattr("d2f.files.os.fsync", full)
    with pytest.raises(OutputError, match=r"out could not.*No space left.*before is untouched"):
        write_beside(place, "after")
    with pytest.raises(OutputError, match=r"none could not.*No space left.*nothing is there"):
        write_beside(tmp_path / "none", "after")
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and place.read_text() == "before"


def test_a_folder_is_as_it_was_where_the_disk_is_full(tmp_path, monkeypatch):
    place = tmp_path / "out"
    place.mkdir()
    (place / "before").touch()
    rename = type(place).rename

    def fail_at_the_end(self, target):
        return full() if self.name.endswith(".writing") else rename(self, target)

    monkeypatch.setattr(type(place), "rename", fail_at_the_end)
    with pytest.raises(OutputError, match="No space left"):
        fill_folder(place)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["out", "out/before"]


def test_weights_that_the_disk_does_not_take(tmp_path):
    """safetensors has an error of its own for it."""
    with pytest.raises(OutputError, match=r"model could not be written: I/O error: No space"):
        with writing_folder(tmp_path / "model"):
            raise SafetensorError("I/O error: No space left on device")
    with pytest.raises(SafetensorError, match="shape"), writing_folder(tmp_path / "model"):
        raise SafetensorError("a shape")
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_body_is_no_error_of_the_disk(tmp_path):
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "out") as file:
        file.write(b"%d" % (1 // 0))
    assert not list(tmp_path.iterdir())


def test_a_growing_file_has_whole_lines_only(tmp_path, monkeypatch):
    write = os.write
    with GrowingFile(tmp_path / "log") as file:
        file.write("one\n")
        monkeypatch.setattr("d2f.files.os.write", lambda d, data: write(d, data[:2]))
        file.write("second\n")  # in pieces
        pieces = iter([lambda d, data: write(d, data[:2]), full])
        monkeypatch.setattr("d2f.files.os.write", lambda d, data: next(pieces)(d, data))
        with pytest.raises(OutputError, match=r"log could not.*No space left.*before is kept"):
            file.write("third\n")
        assert (tmp_path / "log").read_text() == "one\nsecond\n"


# Locks.

HOLDER = (
    "import pathlib, sys, d2f.files as l\n"
    "with l.locked(pathlib.Path(sys.argv[1])):\n"
    "    print('held', flush=True); sys.stdin.read()\n"
)


def hold(folder):
    command = [sys.executable, "-c", HOLDER, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    process = subprocess.Popen(command, **pipes)
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_refused_until_the_first_is_killed(tmp_path):
    out = tmp_path / "out"
    with hold(out) as process:
        with pytest.raises(OutputError, match="out is being written by another command"):
            with locked(out):
                raise AssertionError("it is held")
        process.send_signal(signal.SIGKILL)
    assert [p.name for p in out.iterdir()] == [".lock"]
    with locked(out):
        pass
    assert not list(out.iterdir())


def test_a_folder_made_for_the_lock_goes_unless_something_is_in_it(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "a" / "b"):
        raise ZeroDivisionError
    with locked(tmp_path / "c") as folder:
        (folder / "result").touch()
    (tmp_path / "d").mkdir()
    with locked(tmp_path / "d"):
        pass
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "c", "d", "result"]


def test_a_file_is_held_by_a_lock_beside_it(tmp_path):
    path = tmp_path / "out.jsonl"
    with locked_file(path):
        with pytest.raises(OutputError, match="is being written by"), locked_file(path):
            raise AssertionError("it is held")
        with locked_file(tmp_path / "other.jsonl"):
            pass
        assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl.lock"]
    assert not list(tmp_path.iterdir())
