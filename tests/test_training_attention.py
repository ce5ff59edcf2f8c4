"""The attention that a training run computes with."""

from __future__ import annotations

import json

import pytest
import torch
from test_train import settings, weights
from tiny import random_model

from d2f.attention import SpanPlan
from d2f.errors import InputError
from d2f.spans import block_causal
from distill.run import attention_choice as attention
from distill.run.attention_choice import choose_attention, measure_attention
from distill.train import train

SPANS = torch.stack([block_causal(24, 5, 4), block_causal(24, 9, 8)])


def test_all_ways_give_the_same(monkeypatch):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 24, 32) for heads in (4, 2, 2))
    want = SpanPlan(SPANS, way="sdpa").attend(None, q, k, v)
    for way in ("kernel", "flex"):
        got = SpanPlan(SPANS, way=way).attend(None, q, k, v)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_run_with_the_kernel_learns_what_one_without_does(tmp_path):
    """Forward and backward by Triton, here in its interpreter, inside the training loop."""
    shape = {
        "hidden_size": 64, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1,
        "context_length": 128,
    }  # fmt: skip
    for way in ("kernel", "sdpa"):
        data = {"tasks": {"sudoku": 1.0}, "row_length": 64, "rows": 1}
        train(settings(tmp_path / way, steps=1, attention=way, model=shape, data=data))
    kernel, sdpa = weights(tmp_path / "kernel"), weights(tmp_path / "sdpa")
    for name, value in sdpa.items():
        torch.testing.assert_close(kernel[name], value, rtol=1e-3, atol=1e-4)


def test_a_run_chooses_once_by_its_first_batch(tmp_path, monkeypatch):
    asked = []

    def choose(wanted, model, spans, dtype, place):
        asked.append((wanted, *spans.shape[:2], dtype, place))
        return "sdpa"

    monkeypatch.setattr("distill.run.training_step.choose_attention", choose)
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
    times = {"kernel": 2.0, "sdpa": 3.0, "flex": 1.5}
    monkeypatch.setattr(attention, "measure_attention", lambda *given: times)
    model = random_model("llada")
    assert choose_attention("auto", model, OnGpu(), torch.float32, tmp_path) == "flex"
    assert "attention: flex (kernel 2.000 ms" in capsys.readouterr().out
    kept = json.loads((tmp_path / attention.FILE_NAME).read_text())
    assert kept == {"chosen": "flex", "milliseconds": times}
    times["kernel"] = 0.1
    assert choose_attention("auto", model, OnGpu(), torch.float32, tmp_path) == "flex"
    assert choose_attention("sdpa", model, OnGpu(), torch.float32, tmp_path) == "sdpa"


def test_a_way_that_does_not_work_is_left_out(monkeypatch):
    """flex_attention has no backward on a CPU."""
    monkeypatch.setattr(attention, "_REPEAT", 1)
    with pytest.warns(UserWarning, match="attention by flex does not work here"):
        found = measure_attention(random_model("llada"), SPANS, torch.float32)
    assert set(found) == {"sdpa"}, "a head dimension of 8 is not for the kernel"


@pytest.mark.parametrize("way", ["kernel", "flex"])
def test_what_needs_a_gpu_is_refused_before_any_work(tmp_path, monkeypatch, way):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError, match=f"attention {way} trains on a GPU only, this is cpu"):
        train(settings(tmp_path / "run", attention=way))
    assert not (tmp_path / "run").exists()
