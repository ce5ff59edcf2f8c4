"""`make models`: which commands it runs, in which order, and what of it a later call leaves out."""

from __future__ import annotations

import sys

import pytest

from d2f.shipped import TRAINING, shipped
from distill import make_models
from distill.make_models import ROLLOUTS


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands that are run, each without the Python before it; nothing of them is done."""
    run = []

    def record(line, *, check, env=None):
        assert line[0] == sys.executable and check
        run.append(line[1:])

    monkeypatch.setattr(make_models.subprocess, "run", record)
    monkeypatch.chdir(tmp_path)
    return run


def training(name):
    return ["-m", "accelerate.commands.launch", "--num_processes", "1", "-m", "distill.train",
            "--config", str(shipped(*TRAINING)[name]), "--tracker", "none"]  # fmt: skip


def test_what_a_training_starts_from_is_trained_first_and_once(commands, tmp_path):
    make_models.train("tiny-teacher")
    assert commands == [training("tiny-teacher-start"), training("tiny-teacher")]
    commands.clear()
    made = tmp_path / "runs" / "tiny-teacher-start" / "model"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    make_models.train("tiny-teacher")
    assert commands == [training("tiny-teacher")]


def test_rollouts_are_collected_before_the_training_on_them(commands):
    make_models.train("tiny-wino-plus")
    collect, train = commands
    assert collect[:2] == ["-m", "distill.rollouts"] and train == training("tiny-wino-plus")
    assert collect[2:-2] == ROLLOUTS["tiny-wino-plus"].split() and collect[-2] == "--output"
