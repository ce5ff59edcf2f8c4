"""The rate of each step, and the length to which gradients are cut before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from distill.config import TrainConfig, parse_config
from distill.train import train
from distill.trainer import learning_rate


def settings(output: Path, **optimizer: object) -> TrainConfig:
    shape = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1}
    values = {
        "objective": "next_token",
        "output": str(output),
        "family": "causal",
        "model": {**shape, "context_length": 128},
        "data": {"tasks": {"countdown": 1.0}, "row_length": 96, "rows": 2},
        "optimizer": optimizer,
        "steps": 4,
        "log_every": 1,
        "tracker": "none",
    }
    return parse_config(values, "test")


def rates(tmp_path: Path, steps: int, **optimizer: object) -> list[float]:
    config = settings(tmp_path, **optimizer).model_copy(update={"steps": steps})
    return [learning_rate(config, step) for step in range(steps)]


def test_constant_after_a_linear_warm_up(tmp_path):
    found = rates(tmp_path, 7, lr=0.8, warmup=4, schedule="constant")
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8])


def test_without_warm_up_the_first_step_has_the_whole_rate(tmp_path):
    assert rates(tmp_path, 3, lr=0.5, warmup=0, schedule="constant") == [0.5] * 3


def test_cosine_falls_from_the_rate_to_its_share(tmp_path):
    """cos(0), cos(pi/4), cos(pi/2), cos(3 pi/4) of four steps after the warm-up of two."""
    found = rates(tmp_path, 6, lr=1.0, warmup=2, schedule="cosine", final_lr_share=0.2)
    half = 2**-0.5
    shape = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert found == pytest.approx([0.5, 1.0, *(0.2 + 0.8 * share for share in shape)])


@pytest.mark.parametrize(("clip", "cut"), [(0.01, True), (1e6, False)])
def test_gradients_are_cut_to_the_given_length_and_no_shorter(tmp_path, monkeypatch, clip, cut):
    """What the optimizer meets: Adam's own steps would hardly show it. The log has the norm as it
    was before."""
    met: list[float] = []
    real = torch.optim.AdamW.step

    def step(self, *arguments, **options):
        parts = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        met.append(torch.stack(parts).norm().item())
        return real(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(settings(tmp_path, lr=0.001, clip=clip))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    norms = [line["grad_norm"] for line in lines]
    assert len(met) == len(norms) == 4 and min(norms) > 0.01
    assert met == pytest.approx([clip] * 4 if cut else norms, rel=1e-3)
