"""What is written is whole or not there, whatever fails; one command at a time writes it."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from d2f.errors import OutputError
from d2f.files import (
    GrowingFile,
    locked,
    locked_file,
    says_what_is_kept,
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
    script = (
        "import os, sys, pathlib, d2f.files as f\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "with f.writing(place / 'file') as file, f.writing_folder(place / 'folder') as folder:\n"
        "    file.write(b'half'); file.flush(); (folder / 'half').write_text('half')\n"
        "    os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)])
    assert done.returncode == 9 and len(list(tmp_path.iterdir())) == 2
    (tmp_path / "other.0123456789abcdef.writing").write_text("another's")
    write_beside(tmp_path / "file", "whole")
    fill_folder(tmp_path / "folder")
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["file", "folder", "other.0123456789abcdef.writing"]


def test_a_folder_that_a_kill_left_beside_its_place_is_put_back(tmp_path):
    place, old = tmp_path / "model", tmp_path / "model.0123456789abcdef.replaced"
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
    script = (
        "import pathlib, resource, sys\n"
        "import numpy as np\n"
        "from safetensors.numpy import save_file\n"
        "from d2f.errors import OutputError\n"
        "from d2f.files import writing_folder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    with writing_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "        save_file({'w': np.zeros(9999)}, folder / 'w')\n"
        "except OutputError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "model could not be written: " in done.stdout and "too large" in done.stdout, done.stderr
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


def test_the_file_that_failed_is_named_not_the_folder_it_was_for(tmp_path):
    part, full_disk = tmp_path / "part", "No space left on device"
    for error in (OSError(errno.ENOSPC, full_disk, str(part)), OSError(full_disk)):
        named = part if error.filename else tmp_path
        with (
            pytest.raises(
                OutputError, match=f"^{named} could not be written: {full_disk}; as it was"
            ),
            says_what_is_kept(tmp_path, "as it was"),
        ):
            raise error


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


def test_what_cannot_be_locked(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file cannot be made"), locked(tmp_path / "file"):
        raise AssertionError("it is no folder")
