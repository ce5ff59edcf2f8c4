"""An objective is one file: its options are the section `objective`, and one from outside the
package trains as the package's own do."""

from __future__ import annotations

import json

import numpy as np
import pytest
from data_rows import run_settings

import d2f
from d2f.config import Ratio
from d2f.errors import InputError
from distill.check import check
from distill.config import Options
from distill.data import Sample
from distill.objectives import OBJECTIVES
from distill.objectives.base import Objective
from distill.train import train


class HalfOptions(Options):
    """Every other token is hidden."""

    prompt_rule = "bidirectional"

    weight: Ratio = 1.0
    """Of each."""

    def contract(self) -> dict[str, object]:
        return super().contract() | {"objective": "masked_diffusion"}


class Half(Objective):
    """Every other token is hidden, from a place on that the sample shifts."""

    section = HalfOptions

    def draw(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        place = np.arange(len(sample.response))
        weight = self.config.objective.weight
        return (place + sample.index) % 2 == 0, np.full(len(place), weight)


HALF = "test_objectives:Half"
TASKS = {"tasks": {"countdown": 1.0}}


def test_an_objective_of_ones_own_trains_and_exports(tmp_path):
    config = run_settings(tmp_path, TASKS, {"name": HALF, "weight": 0.5}, log_every=1)
    assert str(check(config)).startswith(f"{HALF} on llada: ")
    train(config)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["loss"] > 0 for line in lines)
    assert d2f.load(tmp_path / "model").contract.objective == "masked_diffusion"
    assert f"by the objective `{HALF}`" in (tmp_path / "model" / "README.md").read_text()


def test_the_classes_are_those_of_their_files():
    assert list(OBJECTIVES) == ["d2f", "masked_diffusion", "next_token", "wedlm", "wino_plus"]
    assert all(issubclass(OBJECTIVES[name], Objective) for name in OBJECTIVES)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("half", r"objective\.name: expected 'd2f', .* or 'wino_plus', .* got 'half'"),
        (3, r"objective\.name: expected 'd2f', .* got 3"),
        ({}, r"objective\.name: expected 'd2f', .* got None"),
        ("no_such_module:Half", "objective.name: .* cannot be imported: No module"),
        ("test_objectives:None", "objective.name: .* cannot be imported: .* no attribute 'None'"),
        ({"name": HALF, "wait": 1}, r"objective\.wait: there is no such key"),
        ({"name": HALF, "weight": 2}, r"objective\.weight: expected at most 1, got 2"),
    ],
)
def test_a_wrong_section_is_an_error_that_names_it(tmp_path, objective, message):
    with pytest.raises(InputError, match=message):
        run_settings(tmp_path, TASKS, objective)
