"""A kill or a damaged disk at any byte of what a command keeps: the same command goes on to the
result of a run that was never stopped, or refuses and says which file; no whole line is lost."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2f.errors import CheckpointError, InputError
from d2f.loading import load
from decode import pipeline, tune
from distill import rollouts
from distill.train import train
from tests.fuzz.commands import run_command
from tests.fuzz.outcome import attempt, budget
from tests.test_train import settings, weights

ENDS = [b"", b"\n", b"\0" * 20, b"\xff\xfe", b"\xff\n", b"null\n", b"{}\n", b"[" * 30_000 + b"\n",
        b'{"run": 3}\n', b'{"run": null}\n', b"1" * 5000 + b"\n", b'{"id": 1e999}\n',
        b'"\\ud800"\n', b"NaN\n"]  # fmt: skip


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, float, bytes]:
    """How a file ends: cut at a share of its bytes, cut with something after, a piece replaced."""
    kind = draw(st.sampled_from(["cut", "cut", "cut", "end", "piece"]))
    return kind, draw(st.floats(0, 1)), draw(st.sampled_from(ENDS) | st.binary(max_size=30))


def damaged(data: bytes, damage: tuple[str, float, bytes]) -> bytes:
    kind, share, what = damage
    place = round(share * len(data))
    return (
        data[:place]
        + (b"" if kind == "cut" else what)
        + data[place + len(what) :] * (kind == "piece")
    )


def lines_of(data: bytes) -> list[Any]:
    """The lines of a file, whole ones, without what a clock said."""
    found = [json.loads(line) for line in data.splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "wall")} for line in found]


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


class Command:
    """A command with a file of lines that it resumes from, and what it writes uninterrupted."""

    def __init__(self, main: Callable[[list[str]], int], line: list[str], folder: Path, name: str):
        self.main, self.path = main, folder / name
        self.line = [*line, "--device", "cpu", "--output", str(folder / name.split("/")[0])]
        run_command(main, self.line)
        self.whole = self.path.read_bytes()
        assert len(self.whole.splitlines()) > 2

    def goes_on_after_a_kill(self, share: float) -> None:
        """Cut the file at a share of its bytes, and give the command again."""
        before = self.whole[: round(share * len(self.whole))]
        self.path.write_bytes(before)
        try:
            run_command(self.main, self.line)
        except InputError as error:  # the header is written at once, so no kill leaves half of it
            assert str(self.path) in str(error) and b"\n" not in before
            assert self.path.read_bytes() == before
            return
        after = self.path.read_bytes()
        assert after.startswith(before[: before.rfind(b"\n") + 1]), "whole lines were lost"
        assert lines_of(after) == lines_of(self.whole)


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, Command]:
    folder = tmp_path_factory.mktemp("commands")
    tuning = ["--tasks", "story", "--problems", "2", "--heldout", "2", "--repetitions", "2",
              "--tau-conf", "0.9", "--tau-add", "0.1", "--tau-act", "0.95", "--no-figures",
              "--batch-size", "2"]  # fmt: skip
    collecting = ["--model", "tiny-teacher", "--tasks", "sudoku", "--problems", "3",
                  "--block-size", "8"]  # fmt: skip
    return {
        "pipeline": Command(
            pipeline.main, ["--tasks", "sudoku,story", "--problems", "1"], folder, "out"
        ),
        "tune": Command(tune.main, tuning, folder, "tuned/measurements.jsonl"),
        "rollouts": Command(rollouts.main, collecting, folder, "rollouts.jsonl"),
    }


@pytest.mark.parametrize("name", ["pipeline", "tune", "rollouts"])
@budget(0.12)
@given(share=st.floats(0, 1))
def test_lines_that_a_command_goes_on_from(commands, name, share):
    commands[name].goes_on_after_a_kill(share)


FILES = ["checkpoints/step-0000002/state.pt", "checkpoints/step-0000002/checksum.json",
         "checkpoints/step-0000001/state.pt", "config.yaml", "run.json", "log.jsonl"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run that was stopped after two of three steps, and the weights of one that was not."""
    folder = tmp_path_factory.mktemp("trained")
    with contextlib.redirect_stdout(io.StringIO()):
        train(configuration(folder / "whole"))
        train(configuration(folder / "stopped"), stop_after=2)
    return folder / "stopped", weights(folder / "whole")


def configuration(output: Path) -> Any:
    return settings(output, steps=3, save_every=1, keep=3)


def resumed(trained, folder: Path, name: str, damage: tuple[str, float, bytes]) -> None:
    stopped, expected = trained
    shutil.copytree(stopped, folder)
    path = folder / name
    path.write_bytes(damaged(path.read_bytes(), damage))

    def call() -> Path:
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")  # of the damaged checkpoint that is passed over
                return train(configuration(folder))
        except (InputError, CheckpointError) as error:
            assert Path(name).name in str(error) or "another run" in str(error), error
            raise

    if attempt(call) is not None:
        found = weights(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)
    shutil.rmtree(folder)


@budget(0.08)
@given(name=st.sampled_from(FILES), damage=damages())
def test_a_training_that_was_stopped(trained, tmp_path_factory, name, damage):
    resumed(trained, tmp_path_factory.mktemp("run") / "run", name, damage)


@pytest.mark.parametrize("name", FILES[1::2] + FILES[4:5])
def test_a_record_that_is_nested_too_deep(trained, tmp_path, name):
    resumed(trained, tmp_path / "run", name, ("end", 0.0, b"[" * 30_000 + b"\n"))
