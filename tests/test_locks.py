"""One command at a time in an output; the second one says so and touches nothing."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from d2f.errors import OutputError
from d2f.files import locked, locked_file

ROOT = Path(__file__).parents[1]
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


# The commands


def no_work(*args, **more):
    raise AssertionError("work was done without the lock")


def run_rollouts(out, monkeypatch):
    from distill.rollouts import main

    monkeypatch.setattr("decode.cli.load", no_work)
    return main(["--model", "tiny-teacher", "--output", str(out)])


def run_states(out, monkeypatch):
    from decode.record_states import main

    monkeypatch.setattr("d2f.load", no_work, raising=False)
    return main(["--model", "tiny-d2f", "--output", str(out)])


def run_tune(out, monkeypatch):
    from decode.tune import main

    monkeypatch.setattr("decode.cli.load", no_work)
    return main(["--tasks", "story", "--no-figures", "--output", str(out)])


def run_compare(out, monkeypatch):
    from decode.compare.__main__ import main

    monkeypatch.setattr("decode.compare.config.make_workloads", no_work)
    config = {
        "output": str(out),
        "tasks": ["story"],
        "figures": False,
        "entries": [{"name": "D2F", "kind": "ours", "model": "tiny-d2f"}],
    }
    (out.parent / "c.yaml").write_text(yaml.safe_dump(config))
    return main(["--config", str(out.parent / "c.yaml")])


def run_train(out, monkeypatch):
    from distill.train import main

    monkeypatch.setattr("distill.train.train", no_work)
    config = ROOT / "configs" / "training" / "tiny-ar.yaml"
    monkeypatch.setattr("sys.argv", ["train", "--config", str(config), "--output", str(out)])
    try:
        main()
    except SystemExit as error:
        print(error.code, file=sys.stderr)
        return 2 if error.code else 0
    return 0


def run_ablation(out, monkeypatch):
    from benchmarks.ablation.__main__ import main

    monkeypatch.setattr("benchmarks.ablation.__main__.run", no_work)
    monkeypatch.chdir(ROOT)  # its configuration names others
    return main(["--config", "configs/ablations/d2f.yaml", "--output", str(out)])


@pytest.mark.parametrize(
    ("run", "lock"),
    [
        (run_rollouts, locked_file),
        (run_states, locked_file),
        (run_tune, locked),
        (run_compare, locked),
        (run_train, locked),
        (run_ablation, locked),
    ],
)
def test_a_command_whose_output_is_held(tmp_path, monkeypatch, capsys, run, lock):
    out = tmp_path / "out"
    with lock(out):
        before = sorted(tmp_path.rglob("*"))
        assert run(out, monkeypatch) == 2
        said = capsys.readouterr().err
        assert "out is being written by another command" in said, said
        assert [p for p in sorted(tmp_path.rglob("*")) if p.suffix != ".yaml"] == before


def test_of_several_training_processes_the_first_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr("distill.train.train", lambda config: None)
    config = ROOT / "configs" / "training" / "tiny-ar.yaml"
    monkeypatch.setattr("sys.argv", ["train", "--config", str(config), "--output", str(tmp_path)])
    from distill.train import main

    with locked(tmp_path):
        monkeypatch.setenv("RANK", "1")
        main()
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(SystemExit, match="is being written by"):
            main()
