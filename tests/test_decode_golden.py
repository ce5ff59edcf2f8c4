"""Our decoders against the recorded outputs of the official code (tests/golden)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import d2f
import decode
from decode.decoders.d2f_session import D2FSession

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ("llada", "dream")


def cases(family: str, name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / f"{family}-tiny" / name).read_text())["cases"]


def pipeline(case: dict[str, Any], early_exit: bool) -> decode.D2F:
    return decode.D2F(
        block_size=case["block_size"],
        tau_add=case["tau_add"],
        tau_act=case["tau_act"],
        tau_conf=case["tau_conf"],
        max_new_tokens=case["max_new_tokens"],
        early_exit=early_exit,
    )


def before_end(tokens: list[int], end_id: int = 2) -> list[int]:
    return tokens[: tokens.index(end_id)] if end_id in tokens else tokens


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, d2f.DiffusionModel]:
    return request.param, d2f.load(GOLDEN / f"{request.param}-tiny")


@pytest.mark.parametrize("fed", ["all open blocks", "those that matter"])
@pytest.mark.parametrize("batch_size", [1, 16])
def test_d2f_gives_the_official_tokens_forwards_and_rows(family, batch_size, fed, monkeypatch):
    """The rows where all open blocks are fed, as there; else no more."""
    name, model = family
    traces = cases(name, "d2f.json")
    assert len(traces) == 40
    if fed == "all open blocks":
        monkeypatch.setattr(D2FSession, "needed_end", lambda self: self.pipeline[-1].end)
    results = decode.generate(
        model,
        [case["prompt"] for case in traces],
        [pipeline(case, early_exit=False) for case in traces],
        batch_size=batch_size,
    )
    extra = {0, 1} if name == "dream" else {0}  # a shifted family may feed one cached row again
    for case, result in zip(traces, results, strict=True):
        assert result.raw_tokens == case["output"]
        assert result.tokens == before_end(case["output"])
        assert result.forwards == case["forwards"]
        for (rows, cached), (official_rows, official_cached) in zip(
            result.calls, case["calls"], strict=True
        ):
            assert cached == official_cached
            if fed == "all open blocks":
                assert rows - official_rows in extra
            assert rows - official_rows <= max(extra)


def test_early_exit_gives_the_same_text_in_no_more_forwards(family):
    name, model = family
    traces = cases(name, "d2f.json")
    results = decode.generate(
        model,
        [case["prompt"] for case in traces],
        [pipeline(case, early_exit=True) for case in traces],
    )
    for case, result in zip(traces, results, strict=True):
        assert result.tokens == before_end(case["output"])
        assert result.forwards <= case["forwards"]
    assert sum(r.forwards for r in results) < sum(case["forwards"] for case in traces)


def test_static_gives_the_official_tokens():
    model = d2f.load(GOLDEN / "llada-tiny")
    traces = cases("llada", "static.json")
    assert len(traces) == 24
    results = decode.generate(
        model,
        [case["prompt"] for case in traces],
        [
            decode.Static(
                block_size=case["block_length"],
                steps=case["steps"],
                max_new_tokens=case["gen_length"],
                early_exit=False,
            )
            for case in traces
        ],
    )
    for case, result in zip(traces, results, strict=True):
        assert result.raw_tokens == case["output"]
        assert result.forwards == case["forwards"]
