"""A command whose output another one writes says so and touches nothing."""

from importlib import import_module
from pathlib import Path

import pytest
import yaml

from d2f.files import locked, locked_file

TRAINING = Path(__file__).parents[1] / "configs" / "training" / "tiny-ar.yaml"
COMMANDS = {
    "distill.rollouts": (locked_file, "--model tiny-teacher"),
    "decode.record_states": (locked_file, "--model tiny-d2f"),
    "decode.tune": (locked, "--tasks story --no-figures"),
    "decode.compare.__main__": (locked, "--config {folder}/c.yaml"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_whose_output_is_held(tmp_path, capsys, name):
    main = import_module(name).main
    out, (lock, arguments) = tmp_path / "out", COMMANDS[name]
    config = {
        "output": str(out),
        "tasks": ["story"],
        "figures": False,
        "entries": [{"name": "D2F", "kind": "ours", "model": "tiny-d2f"}],
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    with lock(out):
        before = sorted(tmp_path.rglob("*"))
        words = arguments.format(folder=tmp_path).split()
        more = [] if "--config" in words else ["--output", str(out)]
        assert main([*words, *more]) == 2
        assert "out is being written by another command" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


def test_of_several_training_processes_the_first_holds_it(tmp_path, monkeypatch, capsys):
    from distill.train import main

    monkeypatch.setattr("distill.train.train", lambda config: None)
    monkeypatch.setattr("sys.argv", ["train", "--config", str(TRAINING), "--output", str(tmp_path)])
    with locked(tmp_path):
        monkeypatch.setenv("RANK", "1")
        assert main() == 0
        monkeypatch.setenv("RANK", "0")
        assert main() == 2
        assert "is being written by another command" in capsys.readouterr().err
