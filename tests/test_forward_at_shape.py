"""What the forwards of a large shape are reckoned from; how fast they are is not for a test."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from benchmarks import forward
from benchmarks.at_shape.floors import Machine, Work
from benchmarks.at_shape.measure_shape import parse
from benchmarks.at_shape.traces import (
    Trace,
    autoregressive_seconds,
    pipeline_seconds,
    record,
    widest,
)
from benchmarks.at_shape.vllm_baseline import run_vllm
from benchmarks.shapes import SHAPES, build, build_by_layers
from d2f.errors import InputError

TRACES = [Trace(prompt=10, rows=(12, 4, 2), tokens=5), Trace(prompt=8, rows=(8,), tokens=1)]


def test_seconds_of_recorded_rows():
    """1 ms and 0.5 ms a row: rows 12, 4, 2 and 8; autoregressively 10 and 8, then 6 times 1."""
    forwards = {1: 1.5, 4: 3.0, 12: 7.0}
    assert pipeline_seconds(TRACES, forwards) == pytest.approx((7 + 3 + 2 + 5) / 1e3)
    assert autoregressive_seconds(TRACES, forwards) == pytest.approx((6 + 5 + 6 * 1.5) / 1e3)
    assert widest(TRACES) == 12


def test_traces_are_what_the_engine_fed():
    (trace,) = record("tiny-d2f", "sudoku", 1)
    assert trace.rows[0] > trace.prompt > 10
    assert 1 < len(trace.rows) < trace.tokens, "several tokens a forward"


@pytest.mark.parametrize("quantize", [None, "int8", "int8-weight", "nf4"])
def test_a_model_made_by_layers_is_that_shape(quantize):
    if quantize is not None:
        pytest.importorskip("bitsandbytes" if quantize == "nf4" else "torchao")
    model = build_by_layers("tiny", torch.float32, quantize)
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        logits = model.forward(ids, torch.tensor([[[0, 3]]] * 3, dtype=torch.int32))
    assert logits.shape == (1, 3, 300) and logits.isfinite().all()
    assert model.quantized == quantize
    assert model.backbone.model.rotary_emb.rotary.inv_freq[0] == 1


def test_the_work_of_a_forward():
    """The tiny shape, counted by hand: 2 layers of q, o (64 x 64), k, v (64 x 32), and three of
    64 x 128; a head of 300 x 64; 5 norms of 64; 2 layers of 2 x 32 keys and values."""
    layers, head = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128), 300 * 64
    work = Work.of(build_by_layers("tiny", torch.float32), "tiny")
    assert (work.layers, work.head) == (layers, head)
    assert work.weights == 4 * (layers + head + 5 * 64)
    assert work.slot == 4 * 2 * 2 * 32
    machine = Machine()
    machine.__dict__ |= {"bandwidth": 1e9, "_rates": {torch.float32: 1e9}}
    moved, operated = work.floor(machine, 3, 7)
    assert moved == pytest.approx((work.weights + 10 * work.slot) / 1e6)
    assert operated == pytest.approx((6 * (layers + head) + 4 * 3 * 10 * 64 * 2) / 1e6)


def test_quantised_layers_are_read_in_their_bits():
    pytest.importorskip("torchao")
    plain = Work.of(build_by_layers("tiny", torch.float32), "tiny")
    eight = Work.of(build_by_layers("tiny", torch.float32, "int8-weight"), "tiny")
    assert eight.layers == plain.layers
    assert 3 * plain.layers * 0.9 < plain.weights - eight.weights < 3 * plain.layers


def test_the_shapes_are_as_large_as_they_say():
    """As docs/low-precision.md says: 1.49 · 10⁹ parameters, 0.97 without embeddings."""
    backbone = build("llada-1b", torch.bfloat16, "meta").backbone
    inner = sum(m.weight.numel() for m in backbone.model.modules() if isinstance(m, nn.Linear))
    assert round(backbone.num_parameters() / 1e9, 2) == 1.49 and round(inner / 1e9, 2) == 0.97
    assert 3.1e9 < build("llada-3b", torch.bfloat16, "meta").backbone.num_parameters() < 3.3e9


def test_the_command_writes_its_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    status = forward.main([
        "--shape", "tiny", "--precisions", "float32,bfloat16", "--rows", "1", "3", "--repeat", "1",
        "--cached", "4", "--problems", "1", "--tasks", "sudoku", "--output", str(tmp_path),
    ])  # fmt: skip
    assert status == 0
    report = json.loads((tmp_path / "report.json").read_text())
    plain, half = report["precisions"]
    assert [one["rows"] for one in plain["forwards"]][:2] == [1, 3]
    assert half["gigabytes"] == plain["gigabytes"] / 2
    assert set(plain["tokens_per_second"]["sudoku"]) == {"d2f", "autoregressive"}
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "report.md").read_text() and "| D2F | bfloat16 |" in printed
    assert (tmp_path / "rows.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--shape huge", r"--shape must be one of .*llada-1b.*got 'huge'"),
        ("--shape tiny --precisions float32,fp8", "quantize fp8: not on cpu"),
        ("--shape tiny --rows 0", "--rows must be at least 1, got 0"),
        ("--shape tiny --tasks chess", "--tasks: 'chess' is none of"),
        ("--shape tiny --vllm-python nowhere/python", "nowhere/python: no such program"),
    ],
)
def test_what_cannot_be_measured(words, said):
    with pytest.raises(InputError, match=said):
        parse(words.split())


def test_vllm_that_does_not_run_is_said_in_the_report():
    """This environment has none."""
    found = run_vllm(sys.executable, "tiny", "float32", {"sudoku": TRACES}, 60.0)
    assert found["refused"] == "ModuleNotFoundError: No module named 'vllm'"


def test_large_shapes_are_known():
    assert {"llada-1b", "llada-3b"} < set(SHAPES)
