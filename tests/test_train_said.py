"""The training command: its configuration without --config, what it says, noise of libraries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_train import settings
from tiny import fresh_model, random_model

from d2f.contract import FILE_NAME, Contract
from d2f.errors import InputError
from d2f.saving import save_model
from distill import train as command
from distill.check import check
from distill.config import TrainConfig, read_config
from distill.objectives import OBJECTIVES
from distill.train import train
from distill.trainer import doubts

ROOT = Path(__file__).parent.parent


def teacher_warning(config: TrainConfig) -> str | None:
    return OBJECTIVES[config.objective.name].doubt(config)


@pytest.mark.parametrize(
    ("family", "objective", "said"),
    [
        ("llada", "masked_diffusion", None),
        ("llada", "d2f", None),
        ("dream", "wino_plus", None),
        ("dream", "next_token", r"was never trained .*its contract says objective next_token"),
        ("dream", None, r"was never trained .*its contract names no objective"),
    ],
)
def test_a_teacher_that_was_never_bidirectional_is_said(tmp_path, family, objective, said):
    """Before the run, which goes on, and by --check."""
    save_model(random_model(family), tmp_path / "base", dtype=torch.float32)
    contract = vars(Contract.load(tmp_path / "base")) | {"objective": objective}
    Contract(**contract).save(tmp_path / "base")
    config = settings(tmp_path / "run", "d2f", init=str(tmp_path / "base"), steps=1)
    message = teacher_warning(config)
    assert (message is not None and bool(re.search(said, message))) if said else message is None
    assert doubts(config) == [message] * (message is not None)
    assert message is None or message in check(config).text


def test_a_plain_autoregressive_checkpoint_is_no_teacher(tmp_path):
    """Of transformers' own format, without a contract; a published diffusion model has none
    either."""
    save_model(fresh_model("causal"), tmp_path / "ar", dtype=torch.float32)
    (tmp_path / "ar" / FILE_NAME).unlink()
    config = settings(tmp_path / "run", "d2f", init=str(tmp_path / "ar"))
    message = teacher_warning(config)
    assert message is not None and "was never trained to read both sides (it is auto" in message
    published = ROOT / "tests" / "published" / "llada-8b"
    assert teacher_warning(settings(tmp_path / "run", "d2f", init=str(published))) is None
    assert teacher_warning(settings(tmp_path / "run", "masked_diffusion", init="nowhere")) is None


@pytest.mark.parametrize(
    ("precision", "has_bf16", "warned"),
    [("bf16", False, True), ("bf16", True, False), ("no", False, False)],
)
def test_bf16_on_a_cpu_without_it_is_said(tmp_path, monkeypatch, precision, has_bf16, warned):
    """The bundled configurations ask for bf16, which a laptop without AVX-512 only imitates."""
    monkeypatch.setattr("distill.trainer.cpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    config = settings(tmp_path / "run", "next_token", mixed_precision=precision)
    lines = doubts(config)
    assert any("--mixed_precision no" in line for line in lines) == warned


def test_without_a_configuration_it_is_that_of_the_bundled_student(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / command.DEFAULT_CONFIG).write_text("objective: next_token\n")  # of the user's
    monkeypatch.delenv("RANK", raising=False)
    config, options = command.parse(["--steps", "3"])
    assert config == read_config("tiny-d2f.yaml", ["--steps", "3"])
    assert (options.check, options.verbose) == (False, False)
    assert "notice: no --config: tiny-d2f, which distils" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")  # one process says it
    command.parse([])
    monkeypatch.setenv("RANK", "0")
    command.parse(["--config", "tiny-ar"])
    assert capsys.readouterr().err == ""
    with pytest.raises(InputError, match=r"stepz: .* did you mean steps"):
        command.parse(["--stepz", "3"])


PROBE = """
import sys
from distill.train import main
sys.argv[1:] = ["--steps", "1", "--data.rows", "2"]
status = main()
assert not [name for name in sys.modules if name.partition(".")[0] == "decode"]
sys.exit(status)
"""


def test_the_first_command_of_the_readme_is_quiet_and_imports_no_decoder(tmp_path):
    """In a folder of its own, with all defaults: nothing of libraries, no folder of a tracker."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = [line.partition(":")[0] for line in done.stderr.splitlines()]
    # Where the CPU has no bf16, the bundled configuration is warned of.
    assert (done.returncode, said[0], set(said[1:]) - {"warning"}) == (0, "notice", set())
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    card = (tmp_path / "runs" / "tiny-d2f" / "adapter" / "README.md").read_text()
    assert "| starts from | tiny-teacher |" in card


def test_accelerate_launch_on_a_cpu_says_that_it_started_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    train(settings(tmp_path / "alone", steps=1))
    assert "notice" not in capsys.readouterr().err
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")  # as it sets it, asked for any number
    train(settings(tmp_path / "launched", steps=1))
    assert "one process trains; on a CPU accelerate launch starts several by" in (
        capsys.readouterr().err
    )
