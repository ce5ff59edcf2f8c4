"""What low precision costs in answers, counted right; how much it is is not for a test."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import low_precision
from benchmarks.low_precision import compared
from d2f.errors import InputError
from decode.jobs import Record


def answered(tokens: list[int], right: bool) -> Record:
    return Record(
        id=0, task="t", question="", text="", right=right, finish_reason="end", prompt_tokens=1,
        max_new_tokens=8, forwards=1, rows=1, counts={}, seconds=1.0, tokens=tokens,
        raw_tokens=tokens,
    )  # fmt: skip


def test_what_is_counted():
    """By problem: the same, one token of three other, two tokens longer, another answer."""
    before = [([1, 2, 3], True), ([1, 2, 3], True), ([1], False), ([4, 5], False)]
    now = [([1, 2, 3], True), ([1, 9, 3], False), ([1, 2, 3], True), ([7, 8], True)]
    found = compared(
        {i: answered(*one) for i, one in enumerate(before)},
        {i: answered(*one) for i, one in enumerate(now)},
    )
    assert found == {
        "lost": 1, "won": 2, "answers_changed": 3, "tokens_changed": 5, "places": 11,
    }  # fmt: skip


def test_the_command_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torchao")
    words = [
        "--models", "tiny-d2f", "--tasks", "sudoku", "--problems", "2",
        "--precisions", "int8,int8-weight", "--runs", str(tmp_path / "runs"),
        "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    assert low_precision.main(words) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["precision"] for row in report["rows"]] == ["float32", "int8", "int8-weight"]
    assert report["rows"][0]["answers_changed"] == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| int8-weight | " in text and capsys.readouterr().out.endswith(text)
    monkeypatch.setattr("decode.engine.engine.Engine.advance", lambda engine: pytest.fail("again"))
    assert low_precision.main(words) == 0
    assert (tmp_path / "out" / "report.md").read_text() == text


def test_int8_products_through_float32_are_the_same_integers(monkeypatch):
    """Where PyTorch has none that are fast: the largest sums too."""
    monkeypatch.setattr(low_precision, "slowness", lambda name, device: "slow")
    a = torch.full((3, 1024), -128, dtype=torch.int8)
    b = torch.full((1024, 8), -128, dtype=torch.int8)
    a[1, ::2], b[:, 1] = 127, 127
    expected = a.int() @ b.int()
    with low_precision._int8_products(torch.device("cpu")):
        assert torch.equal(torch._int_mm(a, b), expected)
        wide = torch.cat([a, a], dim=1), torch.cat([b, b])
        assert torch.equal(torch._int_mm(*wide), wide[0].int() @ wide[1].int())


def test_a_precision_that_is_not_there():
    with pytest.raises(InputError, match="quantize fp8: not on cpu"):
        low_precision.parse(["--device", "cpu", "--precisions", "fp8"])
