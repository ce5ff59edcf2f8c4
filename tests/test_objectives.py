"""An objective is a class and its Kind: one from outside the package trains as its own do."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from test_train import settings

import d2f
from d2f.errors import InputError
from distill.check import check
from distill.config_keys import TrainKeys
from distill.data import Sample
from distill.objectives import OBJECTIVES
from distill.objectives.base import Objective
from distill.objectives.kinds import KINDS, Kind
from distill.train import train


class HalfKind(Kind):
    name, home, prompt_rule = "half", "test_objectives:Half", "bidirectional"

    def reads(self, keys: TrainKeys) -> set[str]:
        return {"noise.min_ratio"}

    def contract(self, keys: TrainKeys) -> dict[str, object]:
        return super().contract(keys) | {"objective": "masked_diffusion"}


class Half(Objective):
    """Every other token is hidden, from a place on that the configuration shifts."""

    def draw(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        place = np.arange(len(sample.response))
        return (place + sample.index) % 2 == 0, np.full(len(place), self.config.noise.min_ratio)


@pytest.fixture
def half(monkeypatch):
    monkeypatch.setitem(KINDS, "half", HalfKind())


def test_a_made_up_objective_trains_and_exports(tmp_path, half, capsys):
    config = settings(tmp_path, "half", noise={"min_ratio": 0.5}, steps=2)
    assert str(check(config)).startswith("half on llada: ")
    train(config)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["loss"] > 0 for line in lines)
    assert d2f.load(tmp_path / "model").contract.objective == "masked_diffusion"
    assert "by the objective `half`" in (tmp_path / "model" / "README.md").read_text()


def test_it_reads_the_keys_that_it_says_and_no_others(tmp_path, half):
    with pytest.raises(InputError, match=r"noise\.max_ratio: nothing reads it here"):
        settings(tmp_path, "half", noise={"max_ratio": 0.5})


def test_one_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path):
    listed = "'masked_diffusion', 'next_token', 'd2f', 'wino_plus' or 'wedlm'"
    with pytest.raises(InputError, match=rf"objective: expected {listed}, got 'half'$"):
        settings(tmp_path, "half", noise={})
    with pytest.raises(InputError, match=rf"objective: expected {listed}, got 3$"):
        settings(tmp_path, 3, noise={})


def test_the_classes_are_those_of_their_names():
    assert list(OBJECTIVES) == list(KINDS)
    assert all(issubclass(OBJECTIVES[name], Objective) for name in KINDS)


def test_a_configuration_is_checked_without_torch():
    code = "import sys; from distill.config import read_config; read_config('tiny-d2f')"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
