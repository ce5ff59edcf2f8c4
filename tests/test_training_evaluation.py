"""Evaluation while training: it logs, it keeps the best, and training does not notice it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from tiny import fresh_model, random_model

import d2f
from d2f.errors import InputError
from d2f.save_transformers import save_model
from distill.check import check as look
from distill.config import TrainConfig, parse_config
from distill.run import evaluation
from distill.run.evaluation import Evaluator, undisturbed
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


class Scripted(Evaluator):
    """An evaluator whose decoding has been judged already."""

    def __init__(self, model, config, scores):
        super().__init__(model, config, Accelerator())
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


def test_weights_that_are_split_over_processes_are_refused(tmp_path, teacher, monkeypatch):
    monkeypatch.setattr(evaluation, "_has_whole_weights", lambda accelerator: False)
    with pytest.raises(InputError, match="whose weights must be whole"):
        Evaluator(fresh_model("llada"), settings(tmp_path, teacher), Accelerator())
