"""Evaluation while training: it logs, it keeps the best, and training does not notice it."""

from __future__ import annotations

import contextlib
import io
import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from data_rows import pairs, write
from test_train import SHAPE
from tiny import random_model

import d2f
from d2f.adapters import new_lora
from d2f.errors import InputError
from d2f.saving import save_model
from distill import evaluation
from distill.check import check
from distill.config import TrainConfig, parse_config
from distill.evaluation import Evaluator
from distill.objectives import OBJECTIVES
from distill.train import train

EVALUATION = {"problems": 2, "tasks": ["countdown"], "options": {"tau_conf": 0.5}}
LOSS = {"loss_rows": 4, "loss_ratios": [0.3, 0.8]}
LORA = {"r": 4, "alpha": 4, "dropout": 0.3}


def settings(output: Path, init: Path | None, **changes: Any) -> TrainConfig:
    """A run on rows of the user's own, some of which are held out, that decodes problems too."""
    output.parent.mkdir(exist_ok=True)
    file = write(output.parent / "rows.jsonl", pairs(12, words=5))
    values = {
        "objective": {"name": "d2f", "block_size": 8, "lora": LORA},
        "output": str(output),
        "init": None if init is None else str(init),
        "data": {"file": str(file), "row_length": 80, "rows": 2},
        "optimizer": {"lr": 0.003, "warmup": 2},
        "steps": 6,
        "save_every": 2,
        "log_every": 3,
        "eval_every": 2,
        "evaluation": EVALUATION | LOSS,
    }
    return parse_config(values | changes, "test")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    save_model(random_model("llada"), folder, dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, teacher) -> Path:
    """A whole run that is evaluated; what it printed is beside it."""
    folder, said = tmp_path_factory.mktemp("evaluated"), io.StringIO()
    with contextlib.redirect_stdout(said):
        train(settings(folder / "run", teacher))
    (folder / "said").write_text(said.getvalue())
    return folder / "run"


@pytest.fixture
def student(teacher) -> d2f.DiffusionModel:
    model = d2f.load(teacher, device="cpu")
    new_lora(model, **LORA)
    return model


def log(output: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in (output / "log.jsonl").open()]
    for line in lines:
        del line["seconds"]
    return {line["step"]: line for line in lines}


def report(folder: Path) -> dict:
    return json.loads((folder / "evaluation.json").read_text())


def adapter(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def evaluator_of(model: d2f.DiffusionModel, config: TrainConfig) -> Evaluator:
    return Evaluator(OBJECTIVES[config.objective.name](model, config), None, Accelerator())


def test_training_does_not_notice_it_and_a_killed_run_measures_the_same(tmp_path, teacher, run):
    """Dropout draws from torch's random state, so a moved state or mode would show in the loss."""
    rows = {"evaluation": LOSS}  # which are held out without being evaluated, too
    train(settings(tmp_path / "without", teacher, eval_every=None, **rows))
    for _ in range(2):
        train(settings(tmp_path / "killed", teacher, save_every=3), stop_after=3)
    evaluated, plain = log(run), log(tmp_path / "without")
    assert list(plain) == [3, 6] and list(evaluated) == [2, 3, 4, 6]
    assert all(evaluated[step]["loss"] == plain[step]["loss"] for step in plain)
    assert adapter(run / "adapter") == adapter(tmp_path / "without" / "adapter")
    killed = log(tmp_path / "killed")
    for step, line in evaluated.items():  # the rows' file, which is named, is another
        assert killed[step] == line
    best, again = run / "best", tmp_path / "killed" / "best"
    assert report(best) == report(again) and adapter(best) == adapter(again)
    assert not [key for key in evaluated[3] if key.startswith("evaluation/")]


def test_what_is_measured_is_logged_said_and_on_the_card(run):
    said, lines = (run.parent / "said").read_text(), log(run)
    for step in (2, 4, 6):
        line = lines[step]
        accuracy, rate = line["evaluation/accuracy"], line["evaluation/tokens_per_forward"]
        assert line["evaluation/countdown/accuracy"] == accuracy and 0 <= accuracy <= 1
        assert "(wrong)" in line["evaluation/countdown/example"]
        kl, error = line["evaluation/kl"], line["evaluation/kl_stderr"]
        assert f"evaluation after step {step}: cross-entropy " in said
        assert (
            f", KL {kl:.4f} ± {error:.4f}, countdown accuracy {accuracy:.3f} of 2 problems, "
            f"{rate:.2f} tokens a forward\n"
        ) in said
    assert {"evaluation/cross_entropy_stderr/0.8", "evaluation/kl/0.3"} < lines[6].keys()
    held = f"4 of 12 rows of {run.parent / 'rows.jsonl'}"
    assert f"held-out loss: {held}\n" in said
    card = (run / "model" / "README.md").read_text()
    assert f"| held-out loss | {held} |" in card
    assert "| step | loss | accuracy | tokens per forward | kl | cross entropy |" in card
    assert report(run / "best")["best_by"] == "accuracy"


def test_a_file_of_held_out_rows_changes_nothing_in_training(tmp_path, teacher):
    other = write(tmp_path / "other.jsonl", pairs(20)[12:])
    train(settings(tmp_path / "with", teacher, evaluation={"loss_file": str(other)}, steps=3))
    train(settings(tmp_path / "without", teacher, evaluation={}, eval_every=None, steps=3))
    evaluated, plain = log(tmp_path / "with"), log(tmp_path / "without")
    assert plain and all(evaluated[step]["loss"] == plain[step]["loss"] for step in plain)
    losses = {step: evaluated[step]["evaluation/kl"] for step in (2, 3)}
    kept = report(tmp_path / "with" / "best")
    assert (kept["best_by"], kept["step"]) == ("kl", min(losses, key=losses.__getitem__))


@pytest.mark.parametrize(
    ("by", "best"),
    [("accuracy", [1, 2, 2, 4, 4]), ("kl", [1, 1, 3, 3, 3]), ("cross_entropy", [1, 2, 2, 2, 2])],
)
def test_the_best_is_by_what_was_asked_for(tmp_path, teacher, student, by, best):
    """The most accurate, then the fastest, then the first; or the lowest loss. One that is not
    finite is no best."""
    changes = {"evaluation": EVALUATION | LOSS | {"best_by": by}}
    evaluator = evaluator_of(student, settings(tmp_path / "run", teacher, **changes))
    values = [(0.1, 0.5, 2.0), (0.3, 0.6, 1.0), (0.3, 0.4, 1.5), (0.3, 0.4, 1.0), (0.2, nan, inf)]
    rates, found = [9.0, 2.0, 2.0, 3.0, 8.0], []
    (tmp_path / "run").mkdir()
    for step, (measured, rate) in enumerate(zip(values, rates, strict=True), 1):
        names = ("accuracy", "kl", "cross_entropy", "tokens_per_forward")
        scores = zip(names, (*measured, rate), strict=True)
        evaluator._keep(step, {f"evaluation/{name}": value for name, value in scores})
        found.append(report(tmp_path / "run" / "best")["step"])
    assert found == best
    kept = d2f.load(teacher, adapter=tmp_path / "run" / "best", device="cpu")
    assert (kept.contract.objective, kept.contract.block_size) == ("d2f", 8)


def test_a_whole_model_is_kept_where_no_adapter_is_trained(tmp_path):
    """Of generated problems, with a tracker."""
    config = settings(
        tmp_path, None, objective={"name": "wedlm", "block_size": 8}, family="wedlm", model=SHAPE,
        data={"tasks": {"countdown": 1.0}, "row_length": 80, "rows": 2}, steps=1,
        evaluation={"problems": 1, "options": {"window": 4}}, tracker="tensorboard",
    )  # fmt: skip
    train(config)
    assert d2f.load(tmp_path / "best", device="cpu").contract.objective == "wedlm"
    events = b"".join(path.read_bytes() for path in tmp_path.rglob("*tfevents*"))
    assert b"evaluation/countdown/example" in events


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["chess"]}, "evaluation: tasks: there is no task or task file 'chess'"),
        ({"decoder": "autoregressive", "options": {}}, "autoregressive needs a causal model"),
        ({"options": {"tau": 0.5}}, "has no option tau"),
        ({"options": {"tau_conf": 3}}, "tau_conf must lie in"),
        ({"options": {"max_new_tokens": 3}}, "max_new_tokens is that of each task"),
    ],
)
def test_a_bad_evaluation_is_an_error_before_any_step(tmp_path, teacher, changes, message):
    for call in (check, train):
        with pytest.raises(InputError, match=message):
            call(settings(tmp_path / "run", teacher, evaluation=EVALUATION | changes))
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_split_weights_are_not_evaluated(tmp_path, teacher, student, monkeypatch):
    monkeypatch.setattr(evaluation, "has_whole_weights", lambda accelerator: False)
    with pytest.raises(InputError, match="whose weights must be whole"):
        evaluator_of(student, settings(tmp_path / "run", teacher))
