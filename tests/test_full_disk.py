"""A disk that is full, or takes no writing, at any moment: an error that says what could not be
written, with what was there before as it was."""

import errno
import json
import os

import pytest
import yaml

from tests.comparison.endpoint import answering, endpoint

FULL = "No space left on device"


class Disk:
    """Below `folder` no more than `room` writes that are told to the disk succeed."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.room = str(folder), 10**9
        write, fsync = os.write, os.fsync
        monkeypatch.setattr("os.write", lambda d, data: self.check(d) or write(d, data))
        monkeypatch.setattr("os.fsync", lambda d: self.check(d) or fsync(d))

    def check(self, descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(self.folder) and not path.endswith(".lock"):
            self.room -= 1
            if self.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(tmp_path, monkeypatch):
    return Disk(tmp_path, monkeypatch)


def pipeline(*arguments):
    from decode.pipeline import main

    common = ["--model", "tiny-d2f", "--tasks", "story", "--problems", "3", "--device", "cpu"]
    return main([*common, *map(str, arguments)])


def test_a_pipeline_keeps_its_results_and_goes_on(tmp_path, disk, capsys):
    out = tmp_path / "out"
    disk.room = 2  # the header and a result
    assert pipeline("--output", out) == 2
    assert f"{out} could not be written: {FULL}; what it had before is kept" in (
        capsys.readouterr().err
    )
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    kept = out.read_bytes()
    assert len(kept.splitlines()) == 2
    disk.room = 10**9
    assert pipeline("--output", out) == 0
    assert out.read_bytes().startswith(kept) and len(out.read_bytes().splitlines()) == 4


def test_a_trace_that_cannot_be_written_costs_nothing_else(tmp_path, disk, capsys):
    trace = tmp_path / "trace"
    trace.write_text("before")
    disk.room = 0
    assert pipeline("--trace", trace) == 2
    said = capsys.readouterr()
    assert f"{trace} could not be written: {FULL}; what was there before is unt" in said.err
    assert "of 3" in said.out and "counted: visible tokens" in said.out
    assert trace.read_text() == "before" and [p.name for p in tmp_path.iterdir()] == ["trace"]


def test_the_numbers_of_an_evaluation_are_printed_instead(tmp_path, disk, capsys):
    from decode.evaluate import main

    path = tmp_path / "report.json"
    path.write_text("before")
    disk.room = 0
    arguments = ["--tasks", "story", "--problems", "2", "--device", "cpu", "--json", str(path)]
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert f"{path} could not be written: {FULL}" in said.err and "numbers are above" in said.err
    assert json.loads(said.out[said.out.index("{") :])["model"] == "tiny-d2f"
    assert path.read_text() == "before"


def test_rollouts_are_kept_and_go_on(tmp_path, disk, capsys):
    from distill.rollouts import main

    out = tmp_path / "out"
    arguments = ["--model", "tiny-teacher", "--tasks", "sudoku", "--problems", "4", "--device",
                 "cpu", "--output", str(out)]  # fmt: skip
    assert main(arguments) == 0
    whole = out.read_bytes()
    assert len(whole.splitlines()) > 2
    out.unlink()
    disk.room = 2
    assert main(arguments) == 2
    assert f"{out} could not be written: {FULL}" in capsys.readouterr().err
    assert whole.startswith(out.read_bytes()) and out.read_bytes().endswith(b"\n")
    disk.room = 10**9
    assert main(arguments) == 0
    assert out.read_bytes() == whole


def compare_config(folder, url):
    remote = {
        "name": "remote", "kind": "endpoint", "url": url, "model": "served",
        "tokenizer": "tiny-ar",
    }  # fmt: skip
    values = {
        "output": str(folder / "out"), "entries": [remote], "tasks": ["story"], "problems": 2,
        "accuracy_problems": 0, "warmup": 1, "repetitions": 3, "figures": False,
    }  # fmt: skip
    (folder / "c.yaml").write_text(yaml.safe_dump(values))
    return str(folder / "c.yaml")


@pytest.mark.parametrize(("room", "done", "kept"), [(0, 0, 0), (6, 2, 1), (10, 3, 3)])
def test_a_comparison_keeps_its_runs_and_goes_on(tmp_path, disk, capsys, room, done, kept):
    """Full at once, at its second repetition, and at the report. A row is a write and a sync; a
    repetition asks for three answers, one of them to warm up."""
    from decode.compare.__main__ import main

    with endpoint(answering()) as server:
        path = compare_config(tmp_path, server.url)
        disk.room = room
        assert main(["--config", path]) == 2
        said = capsys.readouterr().err
        assert "could not be written: " + FULL in said and "Traceback" not in said
        assert len(server.bodies) == 3 * done
        disk.room = 10**9
        assert main(["--config", path]) == 0
        assert len(server.bodies) == 3 * (done + 3 - kept)
    (speed,) = json.loads((tmp_path / "out" / "summary.json").read_text())["speeds"]
    assert speed["repetitions"] == 3
