"""Evaluation while training: it logs, it keeps the best, and training does not notice it."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from data_rows import pairs, write
from tiny import fresh_model, random_model

import d2f
from d2f.errors import InputError
from d2f.saving import save_model
from distill import evaluation
from distill.check import check as look
from distill.config import TrainConfig, parse_config
from distill.evaluation import Evaluator, undisturbed
from distill.objectives import OBJECTIVES
from distill.train import train

EVALUATION = {"problems": 2, "tasks": ["countdown"], "options": {"tau_conf": 0.5}}


def settings(output: Path, init: Path | None, **changes) -> TrainConfig:
    values = {
        "objective": "d2f",
        "output": str(output),
        "init": None if init is None else str(init),
        "block_size": 8,
        "data": {"tasks": {"countdown": 1.0}, "row_length": 80, "rows": 2},
        "lora": {"r": 4, "alpha": 4, "dropout": 0.3},
        "optimizer": {"lr": 0.003, "warmup": 2},
        "steps": 6,
        "save_every": 2,
        "log_every": 3,
        "tracker": "none",
        "eval_every": 2,
        "evaluation": EVALUATION,
    }
    return parse_config(values | changes, "test")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    save_model(random_model("llada"), folder, dtype=torch.float32)
    return folder


def log(output: Path) -> dict[int, dict]:
    lines = [json.loads(line) for line in (output / "log.jsonl").open()]
    return {line["step"]: line for line in lines}


def test_a_run_with_evaluation_trains_as_one_without(tmp_path, teacher):
    """Dropout draws from torch's random state, so a moved state or mode would show in the loss."""
    train(settings(tmp_path / "with", teacher))
    train(settings(tmp_path / "without", teacher, eval_every=None))
    evaluated, plain = log(tmp_path / "with"), log(tmp_path / "without")
    assert list(plain) == [3, 6]
    assert list(evaluated) == [2, 3, 4, 6]
    assert all(evaluated[step]["loss"] == plain[step]["loss"] for step in plain)
    files = [
        (tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes()
        for run in ("with", "without")
    ]
    assert files[0] == files[1]
    for step in (2, 4, 6):
        line = evaluated[step]
        assert 0 <= line["evaluation/accuracy"] <= 1
        assert line["evaluation/tokens_per_forward"] >= 0
        assert line["evaluation/countdown/accuracy"] == line["evaluation/accuracy"]
        assert "(wrong)" in line["evaluation/countdown/example"]
    assert "evaluation/accuracy" not in evaluated[3]


def test_a_killed_run_evaluates_and_keeps_as_a_whole_one(tmp_path, teacher):
    train(settings(tmp_path / "whole", teacher))
    for _ in range(3):
        train(settings(tmp_path / "killed", teacher, save_every=3), stop_after=3)
    ours, theirs = log(tmp_path / "killed"), log(tmp_path / "whole")
    for line in (*ours.values(), *theirs.values()):
        del line["seconds"]
    assert ours == theirs
    for name in ("evaluation.json", "adapter_model.safetensors"):
        kept = [(tmp_path / run / "best" / name).read_bytes() for run in ("whole", "killed")]
        assert kept[0] == kept[1]


def evaluator_of(model: d2f.DiffusionModel, config: TrainConfig) -> Evaluator:
    return Evaluator(OBJECTIVES[config.objective.name](model, config), None, Accelerator())


class Scripted(Evaluator):
    """An evaluator whose decoding has been judged already."""

    def __init__(self, model, config, scores):
        super().__init__(OBJECTIVES["d2f"](model, config), None, Accelerator())
        self.scores = scores

    def run(self, step):
        accuracy, rate = self.scores[step]
        values = {"evaluation/accuracy": accuracy, "evaluation/tokens_per_forward": rate}
        self._keep(step, values)
        return values


def test_the_best_is_the_most_accurate_then_the_fastest_then_the_first(tmp_path, teacher):
    model = with_lora(teacher)
    scores = {1: (0.1, 9.0), 2: (0.5, 2.0), 3: (0.5, 2.0), 4: (0.5, 3.0), 5: (0.4, 8.0)}
    evaluator = Scripted(model, settings(tmp_path, teacher), scores)
    best = {}
    for step in scores:
        evaluator.run(step)
        best[step] = json.loads((tmp_path / "best" / "evaluation.json").read_text())["step"]
    assert best == {1: 1, 2: 2, 3: 2, 4: 4, 5: 4}
    kept = d2f.load(teacher, adapter=tmp_path / "best", device="cpu")
    assert (kept.contract.objective, kept.contract.block_size) == ("d2f", 8)


def with_lora(folder: Path) -> d2f.DiffusionModel:
    from d2f.adapters import new_lora

    model = d2f.load(folder, device="cpu")
    new_lora(model, r=4, alpha=4, dropout=0.3)
    return model


def test_a_whole_model_is_kept_where_no_adapter_is_trained(tmp_path):
    shape = {
        "hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1,
        "context_length": 128,
    }  # fmt: skip
    config = settings(
        tmp_path, None, objective="wedlm", family="wedlm", model=shape, steps=1, lora={},
        evaluation={"problems": 1, "options": {"window": 4}}, tracker="tensorboard",
    )  # fmt: skip
    train(config)
    kept = d2f.load(tmp_path / "best", device="cpu")
    assert kept.contract.objective == "wedlm"
    assert log(tmp_path)[1]["evaluation/accuracy"] in (0.0, 1.0)
    events = b"".join(path.read_bytes() for path in tmp_path.rglob("*tfevents*"))
    assert b"evaluation/tokens_per_forward" in events
    assert b"evaluation/countdown/example" in events


def test_modes_and_random_state_come_back_also_after_an_error(teacher):
    model = with_lora(teacher)
    model.adapter.train()
    model.backbone.lm_head.eval()
    modes = [module.training for module in model.adapter.modules()]
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="stop"), undisturbed(model):
        assert not any(module.training for module in model.adapter.modules())
        torch.rand(3)
        raise RuntimeError("stop")
    assert [module.training for module in model.adapter.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["chess"]}, r"evaluation: tasks: expected a task among .* got 'chess'"),
        ({"decoder": "fastest"}, "evaluation.decoder must be one of .* got 'fastest'"),
        ({"decoder": "autoregressive", "options": {}}, "autoregressive needs a causal model"),
        ({"options": {"tau": 0.5}}, "has no option tau"),
        ({"options": {"tau_conf": 3}}, "tau_conf must lie in"),
        ({"options": {"max_new_tokens": 3}}, "max_new_tokens is that of each task"),
    ],
)
def test_a_bad_evaluation_is_an_error_before_any_step(tmp_path, teacher, changes, message):
    for call in (look, train):  # --check says the same
        with pytest.raises(InputError, match=message):
            call(settings(tmp_path, teacher, evaluation=EVALUATION | changes))
    assert not (tmp_path / "log.jsonl").exists()


def test_evaluation_needs_tasks(tmp_path, teacher):
    data = {"file": "some.jsonl", "row_length": 80, "rows": 2}
    with pytest.raises(InputError, match=r"eval_every needs evaluation\.tasks"):
        settings(tmp_path, teacher, data=data, evaluation={})


# The held-out loss.


LOSS = {"loss_rows": 4, "loss_ratios": [0.3, 0.8]}


def with_loss(output: Path, init: Path, **changes) -> TrainConfig:
    """A run on rows of the user's own, some of which are held out."""
    file = write(output.parent / "rows.jsonl", pairs(12, words=5))
    data = {"file": str(file), "row_length": 80, "rows": 2}
    return settings(output, init, **{"data": data, "evaluation": LOSS} | changes)


def test_a_run_with_a_held_out_loss_trains_as_one_without(tmp_path, teacher, capsys):
    """It draws and drops nothing of what training does, also where adapter and teacher differ."""
    train(with_loss(tmp_path / "with", teacher))
    said = capsys.readouterr().out
    train(with_loss(tmp_path / "without", teacher, eval_every=None))
    evaluated, plain = log(tmp_path / "with"), log(tmp_path / "without")
    assert list(plain) == [3, 6]
    assert all(evaluated[step]["loss"] == plain[step]["loss"] for step in plain)
    files = [
        (tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes()
        for run in ("with", "without")
    ]
    assert files[0] == files[1]
    names = [
        f"evaluation/{loss}{error}{ratio}"
        for loss in ("cross_entropy", "kl")
        for error in ("", "_stderr")
        for ratio in ("", "/0.3", "/0.8")
    ]
    for step in (2, 4, 6):
        assert sorted(name for name in evaluated[step] if "/" in name) == sorted(names)
        loss, error = (evaluated[step][f"evaluation/kl{end}"] for end in ("", "_stderr"))
        assert f"evaluation after step {step}: cross-entropy " in said
        assert f", KL {loss:.4f} ± {error:.4f}\n" in said
    assert "evaluation/kl" not in evaluated[3]
    held = f"4 of 12 rows of {tmp_path / 'rows.jsonl'}"
    assert f"held-out loss: {held}\n" in said
    card = (tmp_path / "with" / "model" / "README.md").read_text()
    assert f"| held-out loss | {held} |" in card
    assert "| step | loss | kl | cross entropy |" in card


def test_a_file_of_its_own_changes_nothing_in_training(tmp_path, teacher):
    other = write(tmp_path / "other.jsonl", pairs(20)[12:])
    train(with_loss(tmp_path / "with", teacher, evaluation={"loss_file": str(other)}))
    train(with_loss(tmp_path / "without", teacher, evaluation={}, eval_every=None))
    evaluated, plain = log(tmp_path / "with"), log(tmp_path / "without")
    assert all(evaluated[step]["loss"] == plain[step]["loss"] for step in plain)
    # What is held out belongs to the run: a resume does not take other rows for it.
    write(other, pairs(21)[12:])
    config = with_loss(tmp_path / "with", teacher, evaluation={"loss_file": str(other)}, steps=8)
    with pytest.raises(InputError, match=r"evaluation\.loss_file had SHA-256"):
        train(config)


def test_a_killed_run_measures_and_keeps_as_a_whole_one(tmp_path, teacher):
    train(with_loss(tmp_path / "whole", teacher))
    for _ in range(3):
        train(with_loss(tmp_path / "killed", teacher, save_every=3), stop_after=3)
    ours, theirs = log(tmp_path / "killed"), log(tmp_path / "whole")
    for line in (*ours.values(), *theirs.values()):
        del line["seconds"]
    assert ours == theirs
    for name in ("evaluation.json", "adapter_model.safetensors"):
        kept = [(tmp_path / run / "best" / name).read_bytes() for run in ("whole", "killed")]
        assert kept[0] == kept[1]
    losses = {step: line["evaluation/kl"] for step, line in theirs.items() if step % 2 == 0}
    report = json.loads((tmp_path / "whole" / "best" / "evaluation.json").read_text())
    assert (report["best_by"], report["step"]) == ("kl", min(losses, key=losses.__getitem__))


def test_accuracy_and_the_held_out_loss_stand_side_by_side(tmp_path, teacher, capsys):
    """Of generated tasks, too; the best is by accuracy where nothing else is said."""
    train(settings(tmp_path, teacher, steps=2, evaluation=EVALUATION | {"loss_rows": 3}))
    line = log(tmp_path)[2]
    assert {"evaluation/accuracy", "evaluation/kl", "evaluation/cross_entropy"} <= set(line)
    assert "tokens a forward\n" in capsys.readouterr().out
    report = json.loads((tmp_path / "best" / "evaluation.json").read_text())
    assert report["best_by"] == "accuracy"


@pytest.mark.parametrize(
    ("by", "best"),
    [("accuracy", [1, 2, 2, 2]), ("kl", [1, 1, 3, 3]), ("cross_entropy", [1, 2, 2, 2])],
)
def test_the_best_is_by_what_was_asked_for(tmp_path, teacher, by, best):
    evaluation = EVALUATION | {"loss_rows": 3, "best_by": by}
    config = settings(tmp_path, teacher, evaluation=evaluation)
    evaluator = evaluator_of(with_lora(teacher), config)
    values = [(0.1, 0.5, 2.0), (0.3, 0.6, 1.0), (0.2, 0.4, 1.5), (0.3, 0.4, 1.0)]
    found = []
    for step, (accuracy, kl, entropy) in enumerate(values, 1):
        scores = {
            "accuracy": accuracy,
            "kl": kl,
            "cross_entropy": entropy,
            "tokens_per_forward": 2.0,
        }
        evaluator._keep(step, {f"evaluation/{name}": value for name, value in scores.items()})
        found.append(json.loads((tmp_path / "best" / "evaluation.json").read_text())["step"])
    assert found == best


@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_a_loss_that_is_not_finite_is_no_best(tmp_path, teacher, bad):
    run = tmp_path / "run"
    run.mkdir()
    evaluator = evaluator_of(with_lora(teacher), with_loss(run, teacher))
    evaluator._keep(1, {"evaluation/kl": bad})
    assert not evaluator.best.exists()
    evaluator._keep(2, {"evaluation/kl": 3.0})
    evaluator._keep(3, {"evaluation/kl": bad})
    assert json.loads((evaluator.best / "evaluation.json").read_text())["step"] == 2


def test_weights_that_are_split_over_processes_are_refused(tmp_path, teacher, monkeypatch):
    monkeypatch.setattr(evaluation, "has_whole_weights", lambda accelerator: False)
    with pytest.raises(InputError, match="whose weights must be whole"):
        evaluator_of(fresh_model("llada"), settings(tmp_path, teacher))
