"""Rollouts of random models and trainings on them, for the tests of WINO+."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from tiny import random_model

from d2f.saving import save_model
from distill import rollouts
from distill.config import TrainConfig, parse_config

ROOT = Path(__file__).parent.parent
OPTIONS = {
    "wino": ["--block-size", "4", "--tau1", "0.1", "--tau2", "0.9"],
    "d2f": ["--block-size", "4", "--tau-conf", "0.1"],
}
BLOCK_CAUSAL = {"mask": "block_causal", "kl_weight": 0.7}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("base")
    for family in ("llada", "dream"):
        save_model(random_model(family), folder / family, dtype=torch.float32)
    return {family: folder / family for family in ("llada", "dream")}


@pytest.fixture(scope="module")
def files(tmp_path_factory, base) -> dict[tuple[str, str], Path]:
    """Rollouts of random models, whatever they say."""
    folder = tmp_path_factory.mktemp("rollouts")
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("d2f.tasks.task.GeneratedTask.right", lambda *_: True)
        for family, decoder in product(base, OPTIONS):
            path = made[family, decoder] = folder / f"{family}-{decoder}.jsonl"
            what = ["--model", str(base[family]), "--tasks", "sudoku", "--problems", "3"]
            command = [*what, "--decoder", decoder, "--output", str(path), *OPTIONS[decoder]]
            assert rollouts.main(command) == 0
    return made


def settings(output: Path, file: Path, **changes) -> TrainConfig:
    """A run; a change is a key of the objective's where it has one of that name."""
    own = {"name": "wino_plus", "block_size": 4, "lora": {"r": 4, "alpha": 4, "dropout": 0.1}}
    values = {
        "output": str(output), "init": "unused", "data": {"row_length": 128, "rows": 8},
        "optimizer": {"lr": 0.003, "warmup": 2}, "steps": 6, "save_every": 2, "log_every": 1,
        "tracker": "none",
    }  # fmt: skip
    for name, value in changes.items():
        (values if name in TrainConfig.model_fields else own)[name] = value
    if "tasks" not in values["data"]:
        values["data"] = values["data"] | {"file": str(file)}
    return parse_config(values | {"objective": own}, "test")
