"""A kill or a damaged disk at any byte of what a command keeps: the same command goes on to the
result of a run that was never stopped, or refuses and says which file; no whole line is lost."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import settings as training
from test_train import weights

from d2f.errors import InputError
from d2f.loading import load
from decode import pipeline, tune
from distill import rollouts
from distill.train import train


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch):
    """The bundled models, each read once."""
    models: dict[Any, Any] = {}

    def cached(*args: Any, **kwargs: Any) -> Any:
        key = repr((args, sorted(kwargs.items())))
        if key not in models:
            models[key] = load(*args, **kwargs)
        return models[key]

    monkeypatch.setattr("d2f.load", cached)


def lines_of(data: bytes) -> list[Any]:
    """The lines of a file, whole ones, without what a clock said."""
    found = [json.loads(line) for line in data.splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "wall")} for line in found]


class Command:
    """A command with a file of lines that it resumes from, and what it writes uninterrupted."""

    def __init__(self, main: Callable[[list[str]], int], line: str, folder: Path, name: str):
        self.main, self.path = main, folder / name
        self.line = [*line.split(), "--device", "cpu", "--output", str(folder / name.split("/")[0])]
        assert main(self.line) == 0
        self.whole = self.path.read_bytes()
        assert len(self.whole.splitlines()) > 2

    def goes_on_after_a_kill(self, share: float) -> None:
        """Cut the file at a share of its bytes, and give the command again."""
        before = self.whole[: round(share * len(self.whole))]
        self.path.write_bytes(before)
        if self.main(self.line) != 0:  # the header is written at once: no kill leaves half of it
            assert b"\n" not in before and self.path.read_bytes() == before
            return
        after = self.path.read_bytes()
        assert after.startswith(before[: before.rfind(b"\n") + 1]), "whole lines were lost"
        assert lines_of(after) == lines_of(self.whole)


TUNING = (
    "--tasks story --problems 2 --heldout 2 --repetitions 2 --tau-conf 0.9 --tau-add 0.1 --tau-act "
    "0.95 --no-figures --batch-size 2"
)
COLLECTING = "--model tiny-teacher --tasks sudoku --problems 3 --block-size 8"


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, Command]:
    folder = tmp_path_factory.mktemp("commands")
    return {
        "pipeline": Command(pipeline.main, "--tasks sudoku,story --problems 1", folder, "out"),
        "tune": Command(tune.main, TUNING, folder, "tuned/measurements.jsonl"),
        "rollouts": Command(rollouts.main, COLLECTING, folder, "rollouts.jsonl"),
    }


@pytest.mark.parametrize("name", ["pipeline", "tune", "rollouts"])
@settings(max_examples=6)
@given(share=st.floats(0, 1))
def test_lines_that_a_command_goes_on_from(commands, name, share):
    commands[name].goes_on_after_a_kill(share)


FILES = ["checkpoints/step-0000002/state.pt", "checkpoints/step-0000001/state.pt", "config.yaml",
         "run.json", "log.jsonl"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run that was stopped after two of three steps, and beside it one that was not."""
    folder = tmp_path_factory.mktemp("trained")
    train(training(folder / "whole", steps=3, save_every=1, keep=3))
    train(training(folder / "stopped", steps=3, save_every=1, keep=3), stop_after=2)
    return folder


@settings(max_examples=5)
@given(
    name=st.sampled_from(FILES),
    share=st.floats(0, 1),
    piece=st.sampled_from([b"\0" * 20, b"\xff\n", b"{}\n"]) | st.binary(max_size=30),
    cut=st.booleans(),
)
def test_a_training_that_was_stopped(trained, tmp_path_factory, name, share, piece, cut):
    """A file is cut at any byte, or a piece of it replaced."""
    run = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(trained / "stopped", run)
    data = (run / name).read_bytes()
    place = round(share * len(data))
    (run / name).write_bytes(data[:place] + (b"" if cut else piece + data[place + len(piece) :]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the damaged checkpoint that is passed over
        try:
            train(training(run, steps=3, save_every=1, keep=3))
        except InputError as error:
            assert Path(name).name in str(error) or "another run" in str(error), error
            return
    ours, whole = weights(run), weights(trained / "whole")
    assert ours.keys() == whole.keys()
    assert all(torch.equal(ours[key], whole[key]) for key in whole)
