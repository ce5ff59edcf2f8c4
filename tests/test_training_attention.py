"""The attention that a training run computes with."""

from __future__ import annotations

import json

import pytest
import torch
from test_train import settings
from tiny import random_model

from d2f.errors import InputError
from d2f.spans import block_causal
from distill import trainer as attention
from distill.train import train
from distill.trainer import choose_attention, measure_attention

SPANS = torch.stack([block_causal(24, 5, 4), block_causal(24, 9, 8)])


def test_a_run_chooses_once_by_its_first_batch(tmp_path, monkeypatch):
    asked = []

    def choose(wanted, model, spans, dtype, place):
        asked.append((wanted, *spans.shape[:2], dtype, place))
        return "sdpa"

    monkeypatch.setattr("distill.trainer.choose_attention", choose)
    config = settings(tmp_path / "run", steps=3)
    train(config)
    data = config.data
    assert asked == [("auto", data.rows, data.row_length, torch.float32, tmp_path / "run")]


def test_a_cpu_takes_sdpa_and_measures_nothing(tmp_path):
    model = random_model("llada")
    assert choose_attention("auto", model, SPANS, torch.float32, tmp_path) == "sdpa"
    assert list(tmp_path.iterdir()) == []


class OnGpu:
    """Spans that say that they are on a GPU."""

    is_cuda = True
    shape = SPANS.shape


def test_the_fastest_is_taken_and_kept_for_a_resumed_run(tmp_path, monkeypatch, capsys):
    times = {"sdpa": 3.0, "flex": 1.5}
    monkeypatch.setattr(attention, "measure_attention", lambda *given: times)
    model = random_model("llada")
    assert choose_attention("auto", model, OnGpu(), torch.float32, tmp_path) == "flex"
    assert "attention: flex (sdpa 3.000 ms" in capsys.readouterr().out
    kept = json.loads((tmp_path / attention.FILE_NAME).read_text())
    assert kept == {"chosen": "flex", "milliseconds": times}
    times["sdpa"] = 0.1
    assert choose_attention("auto", model, OnGpu(), torch.float32, tmp_path) == "flex"
    assert choose_attention("sdpa", model, OnGpu(), torch.float32, tmp_path) == "sdpa"


def test_a_way_that_is_no_more_is_chosen_anew(tmp_path, monkeypatch):
    """A run of an earlier version, which trained with a kernel of its own."""
    (tmp_path / attention.FILE_NAME).write_text('{"chosen": "kernel", "milliseconds": {}}')
    monkeypatch.setattr(attention, "measure_attention", lambda *given: {"sdpa": 1.0, "flex": 2.0})
    model = random_model("llada")
    assert choose_attention("auto", model, OnGpu(), torch.float32, tmp_path) == "sdpa"


def test_a_way_that_does_not_work_is_left_out(monkeypatch):
    """flex_attention has no backward on a CPU."""
    monkeypatch.setattr(attention, "_REPEAT", 1)
    with pytest.warns(UserWarning, match="attention by flex does not work here"):
        found = measure_attention(random_model("llada"), SPANS, torch.float32)
    assert set(found) == {"sdpa"}


def test_what_needs_a_gpu_is_refused_before_any_work(tmp_path):
    with pytest.raises(InputError, match="attention flex trains on a GPU only, this is cpu"):
        train(settings(tmp_path / "run", attention="flex"))
    assert not (tmp_path / "run").exists()
