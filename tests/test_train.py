"""The training loop: it learns, resumes to the bit, computes the same in parts, exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import random_model, saved_tokenizer

import d2f
from d2f.errors import CheckpointError, InputError
from d2f.saving import save_model
from distill import checkpoint
from distill.config import TrainConfig, parse_config
from distill.data.stream import fill_rows
from distill.export import prepare_model
from distill.objectives import OBJECTIVES
from distill.train import train
from distill.trainer import (
    NonFiniteLossError,
    learning_rate,
)

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1,
    "context_length": 128,
}  # fmt: skip
NOISE = {"masked_diffusion": {"uniform_share": 0.5}, "d2f": {"monotone_share": 0.5}}


def settings(output: Path, objective: str = "masked_diffusion", **changes: Any) -> TrainConfig:
    """A run of a tiny model. changes: keys of the configuration, the objective's own among them."""
    values = {
        "objective": objective,
        "output": str(output),
        "family": "causal" if objective == "next_token" else "llada",
        "model": SHAPE,
        "tokenizer": saved_tokenizer(),
        "data": {"tasks": {"countdown": 1.0, "sudoku": 1.0}, "row_length": 96, "rows": 2},
        "noise": NOISE.get(objective, {}),
        "optimizer": {"lr": 0.003, "warmup": 2},
        "steps": 6,
        "save_every": 2,
        "log_every": 1,
    } | changes
    if "init" in changes:
        del values["model"], values["family"], values["tokenizer"]
    return parse_config(values, "test")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    save_model(random_model("llada"), folder, dtype=torch.float32, objective="masked_diffusion")
    return folder


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def curve(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "log.jsonl").open()]


def same(one: Path, other: Path) -> bool:
    """Whether two runs gave the same weights and losses to the bit."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    equal = all(torch.equal(ours[name], theirs[name]) for name in ours)
    return equal and curve(one) == curve(other)


def batch_of(objective: str, model: d2f.DiffusionModel, config: TrainConfig):
    made = OBJECTIVES[objective](model, config)
    rows, _ = fill_rows(made.stream(), 0)
    return made, rows


@pytest.mark.parametrize(
    ("objective", "killed_after"),
    [("next_token", 3), ("d2f", 2)],
)
def test_a_killed_run_resumes_to_the_same_weights(tmp_path, teacher, objective, killed_after):
    """Optimizer, rate, noise, dropout and data position all continue; a half-written checkpoint of
    a kill is ignored."""
    changes = {"init": str(teacher)} if objective == "d2f" else {}
    train(settings(tmp_path / "whole", objective, **changes))
    for _ in range(6 // killed_after):
        train(settings(tmp_path / "killed", objective, **changes), stop_after=killed_after)
        left = "checkpoints/step-0000002.writing"
        (tmp_path / "killed" / left).mkdir(exist_ok=True)
    assert same(tmp_path / "whole", tmp_path / "killed")
    lines = [json.loads(line) for line in (tmp_path / "killed" / "log.jsonl").open()]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds), "they go on after a resume"


def test_the_loss_falls(tmp_path):
    optimizer = {"lr": 0.01, "warmup": 2}
    train(settings(tmp_path, "next_token", steps=40, optimizer=optimizer, save_every=40))
    losses = curve(tmp_path)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_wandb_logs_offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    train(settings(tmp_path / "run", tracker="wandb", steps=1))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # nothing in the working folder
    assert [path for path in tmp_path.rglob("*.wandb") if path.is_file()]


def test_d2f_exports_adapter_merged_model_and_contract(tmp_path, teacher):
    """The adapter on its base equals the merged model; the contract says what was trained."""
    train(settings(tmp_path, "d2f", init=str(teacher), block_size=8))
    assert (tmp_path / "loss.png").is_file()
    merged = d2f.load(tmp_path / "model")
    adapted = d2f.load(teacher, adapter=tmp_path / "adapter")
    assert merged.contract.objective == adapted.contract.objective == "d2f"
    assert merged.contract.block_size == 8
    assert merged.contract.noise == (0.2, 0.7)
    assert adapted.contract.base == "teacher"
    ids = torch.randint(4, 200, (2, 12))
    spans = d2f.spans.block_causal(12, 4, 8)
    with torch.no_grad():
        ours, theirs = merged.forward(ids, spans), adapted.forward(ids, spans)
        base = d2f.load(teacher).forward(ids, spans)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert not torch.equal(theirs, base)  # it has learned something
    other = tmp_path / "other"
    save_model(random_model("llada", 1), other, dtype=torch.float32)
    with pytest.raises(CheckpointError, match="belongs to the base teacher"):
        d2f.load(other, adapter=tmp_path / "adapter")


def test_a_bf16_base_trains_its_adapter_in_fp32_and_exports_from_the_whole_base(tmp_path, teacher):
    train(settings(tmp_path, "d2f", init=str(teacher), base_dtype="bfloat16"))
    saved = checkpoint.newest(tmp_path / "checkpoints")
    assert {value.dtype for value in saved["weights"].values()} == {torch.float32}
    assert all("lora_" in name for name in saved["weights"])
    merged, base = weights(tmp_path), load_file(teacher / "model.safetensors")
    adapted = [name for name in base if re.search("[qkvo]_proj", name)]
    assert adapted and not any(torch.equal(merged[name], base[name]) for name in adapted)
    assert all(torch.equal(merged[name], base[name]) for name in base.keys() - adapted)


def test_gradient_checkpointing_and_parts_change_nothing(tmp_path, teacher):
    """Recomputing has the same dropout; parts of a step add up to it."""
    lora = {"r": 4, "alpha": 4, "dropout": 0.1}
    for name, more in (("plain", {}), ("recomputed", {"gradient_checkpointing": True})):
        train(settings(tmp_path / name, "d2f", init=str(teacher), lora=lora, steps=3, **more))
    assert same(tmp_path / "plain", tmp_path / "recomputed")
    for name, parts in (("one", 1), ("two", 2)):
        train(settings(tmp_path / name, gradient_accumulation=parts, steps=3))
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=2e-5)
    with pytest.raises(InputError, match="multiple of the 1 processes x 3 parts"):
        train(settings(tmp_path / "three", gradient_accumulation=3))


# An adapter that is trained on may be given more layers, and loses nothing that it has learned.

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_a_wider_adapter_begins_where_the_narrow_one_ended(tmp_path):
    save_model(random_model("dream"), tmp_path / "base", dtype=torch.float32)
    lora = {"r": 3, "alpha": 3, "dropout": 0.0, "targets": ["q_proj", "up_proj"]}
    given = {"init": str(tmp_path / "base"), "steps": 2, "optimizer": {"lr": 0.05, "warmup": 0}}
    first = train(settings(tmp_path / "first", "d2f", lora=lora, **given)) / "adapter"
    given |= {"init_adapter": str(first)}
    config = settings(tmp_path / "wide", "d2f", lora={"targets": LAYERS}, **given)
    ids, spans = torch.arange(5, 17)[None], d2f.spans.bidirectional(12)
    before, wider = d2f.load(given["init"], adapter=first), prepare_model(config)
    with torch.no_grad():
        logits = before.forward(ids, spans)
        assert torch.equal(wider.forward(ids, spans), logits)
        assert not torch.equal(d2f.load(given["init"]).forward(ids, spans), logits)
    wide = train(config) / "adapter"
    kept = train(settings(tmp_path / "kept", "d2f", **given)) / "adapter"
    targets = [
        json.loads((folder / "adapter_config.json").read_text())["target_modules"]
        for folder in (wide, kept)
    ]
    assert targets == [sorted(LAYERS), ["q_proj", "up_proj"]]
    narrow, found = (load_file(f / "adapter_model.safetensors") for f in (first, wide))
    assert narrow.keys() < found.keys()
    assert {len(value) for key, value in found.items() if "lora_A" in key} == {3}
    learned = [k for k in found.keys() - narrow.keys() if "lora_B" in k and found[k].any()]
    assert len(learned) == 5 * before.backbone.config.num_hidden_layers
    with pytest.raises(InputError, match="expected an adapter of k_proj, q_proj, or of some"):
        train(settings(tmp_path / "no", "d2f", lora={"targets": ["q_proj", "k_proj"]}, **given))


def test_a_model_from_scratch_has_a_tokenizer_that_knows_its_tasks(tmp_path):
    """Else the words of a function would be cut into letters, and too long for its response."""
    data = {"tasks": {"coding": 1.0}, "row_length": 320, "rows": 2}
    known, unknown = (
        prepare_model(config, "meta").tokenizer
        for config in (settings(tmp_path, data=data, tokenizer=None), settings(tmp_path))
    )
    program = "def rate(sizes):"
    assert len(known(program).input_ids) == 6 < len(unknown(program).input_ids)


def test_a_gradient_that_is_not_finite_stops_and_saves_nothing(tmp_path, monkeypatch):
    """Of a finite loss. Found before the save at step 4 though nothing is logged; the samples of
    step 3 are named. (A loss that is NaN is in test_train_processes.py.)"""
    kind = OBJECTIVES["masked_diffusion"]
    plain, calls = kind.forward, iter(range(1, 100))

    def forward(self, batch):
        loss = plain(self, batch)
        return loss + (loss * 0).sqrt() if next(calls) == 3 else loss

    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(NonFiniteLossError, match=r"at step 3 \(samples") as caught:
        train(settings(tmp_path, log_every=100))
    assert checkpoint.steps(tmp_path / "checkpoints") == [2]
    before = checkpoint.newest(tmp_path / "checkpoints")["sample"]
    assert f"(samples {before} to " in str(caught.value)
    assert not (tmp_path / "model").exists()


# The rate of each step, and the norm to which gradients are cut before it.


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        (
            {"lr": 0.8, "warmup": 4, "schedule": "constant"},
            [0.2, 0.4, 0.6, 0.8, 0.8, 0.8],
        ),
        ({"lr": 0.5, "warmup": 0, "schedule": "constant"}, [0.5] * 6),
        # cos(0), cos(pi/4), cos(pi/2), cos(3 pi/4) of four steps after the warm-up of two.
        (
            {"lr": 1.0, "warmup": 2, "final_lr_share": 0.2},
            [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + 2**-0.5), 0.6, 0.2 + 0.4 * (1 - 2**-0.5)],
        ),
    ],
)
def test_the_learning_rate(tmp_path, optimizer, rates):
    config = settings(tmp_path, optimizer=optimizer)
    assert [learning_rate(config, step) for step in range(6)] == pytest.approx(rates)


@pytest.mark.parametrize(("clip", "cut"), [(0.01, True), (1e6, False)])
def test_gradients_are_cut_to_the_given_norm_and_no_shorter(tmp_path, monkeypatch, clip, cut):
    """What the optimizer meets; the log has the norm as it was before."""
    met: list[float] = []
    real = torch.optim.AdamW.step

    def step(self, *arguments, **options):
        parts = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        met.append(torch.stack(parts).norm().item())
        return real(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(settings(tmp_path, "next_token", steps=4, optimizer={"lr": 0.001, "clip": clip}))
    norms = [json.loads(line)["grad_norm"] for line in (tmp_path / "log.jsonl").open()]
    assert len(met) == len(norms) == 4 and min(norms) > 0.01
    assert met == pytest.approx([clip] * 4 if cut else norms, rel=1e-3)
