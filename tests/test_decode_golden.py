"""Our decoders against the recorded outputs of the official code (tests/golden)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import d2f
import decode
from decode.decoders.d2f import D2FSession

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ("llada", "dream")


def cases(family: str, name: str, count: int) -> list[dict[str, Any]]:
    found = json.loads((GOLDEN / f"{family}-tiny" / name).read_text())["cases"]
    assert len(found) == count
    return found


def some(traces: list[dict[str, Any]], batch_size: int) -> list[dict[str, Any]]:
    """All in batches; one by one every fourth, which says that a batch is not all that is right."""
    return traces if batch_size > 1 else traces[::4]


def run(model, traces, make, **options) -> list[decode.Result]:
    prompts, decoders = [case["prompt"] for case in traces], [make(case) for case in traces]
    return decode.generate(model, prompts, decoders, **options)


def pipeline(case: dict[str, Any], **options: Any) -> decode.D2F:
    names = ("block_size", "tau_add", "tau_act", "tau_conf", "max_new_tokens")
    return decode.D2F(**{name: case[name] for name in names}, **options)


def before_end(tokens: list[int], end_id: int = 2) -> list[int]:
    return tokens[: tokens.index(end_id)] if end_id in tokens else tokens


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[str, d2f.DiffusionModel]:
    return request.param, d2f.load(GOLDEN / f"{request.param}-tiny")


@pytest.mark.parametrize(
    ("batch_size", "fed"),
    [(1, "those that matter"), (16, "those that matter"), (16, "all open blocks")],
)
def test_d2f_gives_the_official_tokens_forwards_and_rows(family, batch_size, fed, monkeypatch):
    """The rows where all open blocks are fed, as there; else no more."""
    name, model = family
    traces = some(cases(name, "d2f.json", 40), batch_size)
    if fed == "all open blocks":
        monkeypatch.setattr(D2FSession, "needed_end", lambda self: self.pipeline[-1].end)
    results = run(
        model, traces, lambda case: pipeline(case, early_exit=False), batch_size=batch_size
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


@pytest.mark.parametrize("options", [{}, {"lossless": 4, "early_exit": False}])
def test_d2f_with_early_exit_or_lossless_saves_forwards(family, options):
    name, model = family
    traces = cases(name, "d2f.json", 40)
    results = run(model, traces, lambda case: pipeline(case, **options))
    for case, result in zip(traces, results, strict=True):
        assert result.tokens == before_end(case["output"])
        assert not options or result.raw_tokens == case["output"]
        assert result.forwards <= case["forwards"]
    assert sum(r.forwards for r in results) < sum(case["forwards"] for case in traces)


def test_block_is_the_official_pipeline_where_that_is_serial(family):
    """Recorded runs whose tau_add lets no block be appended before the last is decoded; the
    contract of official weights does not name the blocks."""
    name, model = family
    traces = cases(name, "d2f.json", 40)
    serial = [case for case in traces if case["tau_add"] > 1 - 1 / case["block_size"]]
    assert len(serial) >= 3

    def make(case: dict[str, Any]) -> decode.Block:
        new = case["max_new_tokens"]
        return decode.Block(
            case["block_size"], tau=case["tau_conf"], align="prompt", max_new_tokens=new
        )

    for case, result in zip(serial, run(model, serial, make), strict=True):
        assert result.tokens == before_end(case["output"])


def test_static_gives_the_official_tokens(llada):
    traces = cases("llada", "static.json", 24)

    def make(case: dict[str, Any]) -> decode.Static:
        size, new = case["block_length"], case["gen_length"]
        return decode.Static(size, new, steps=case["steps"], early_exit=False)

    for case, result in zip(traces, run(llada, traces, make), strict=True):
        assert (result.raw_tokens, result.forwards) == (case["output"], case["forwards"])


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_threshold_gives_the_official_tokens(llada, cache):
    """The official loop with a cache makes a forward more for each block that its first forward
    completes; without a cache the forwards are the same."""
    traces = cases("llada", "fast_dllm.json", 24)

    def make(case: dict[str, Any]) -> decode.Threshold:
        size, new = case["block_length"], case["gen_length"]
        return decode.Threshold(size, new, cache, tau=case["threshold"], early_exit=False)

    for case, result in zip(traces, run(llada, traces, make), strict=True):
        official, blocks = case[cache], case["gen_length"] // case["block_length"]
        assert result.raw_tokens == official["output"]
        spared = official["forwards"] - result.forwards
        assert spared == 0 if cache == "none" else 0 <= spared <= blocks


@pytest.mark.parametrize("batch_size", [1, 16])
def test_wino_gives_the_official_tokens_and_forwards(llada, batch_size):
    traces = some(cases("llada", "wino.json", 24), batch_size)

    def make(case: dict[str, Any]) -> decode.Wino:
        size, new = case["block_length"], case["gen_length"]
        return decode.Wino(size, new, tau1=case["tau1"], tau2=case["tau2"], early_exit=False)

    results = run(llada, traces, make, batch_size=batch_size)
    for case, result in zip(traces, results, strict=True):
        assert (result.raw_tokens, result.forwards) == (case["output"], case["forwards"])
    assert sum(result.counts["revoked"] for result in results) > 4 * len(traces)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_wedlm_gives_the_official_tokens_forwards_and_rows(batch_size):
    """The official loop follows a forward of the prompt alone, which is part of the first forward
    here, and ends with one that only commits, which is left out."""
    model = d2f.load(GOLDEN / "dream-tiny", family="wedlm", device="cpu")
    traces = some(cases("dream", "wedlm.json", 24), batch_size)

    def make(case: dict[str, Any]) -> decode.WeDLM:
        rule = case["entropy_threshold"], case["pos_penalty"], case["max_new_tokens"]
        return decode.WeDLM(case["window"], *rule, refill="repository")

    for case, result in zip(traces, run(model, traces, make, batch_size=batch_size), strict=True):
        official = case["output"][: case["max_new_tokens"]]
        assert result.tokens == before_end(official)
        assert (result.finish_reason == "end") == (2 in official)
        assert len(result.raw_tokens) <= case["max_new_tokens"]
        (rows, cached), *later = case["calls"]
        assert result.calls == [(rows + cached, 0), *map(tuple, later[:-1])]
        # The same rows but for the forward that only commits, and that of the prompt.
        assert result.counts["window_rows"] == rows + sum(fed for fed, _ in later[:-1])
        assert result.p_cache == len(result.tokens) / result.counts["window_rows"]
        assert result.forwards == case["forwards"] - 1


def test_verified_drafts_are_accepted_and_rejected():
    """A draft that holds saves a forward, even on a model that was not trained to draft."""
    model = d2f.load(GOLDEN / "dream-tiny", family="wedlm", device="cpu")
    prompts = [case["prompt"] for case in cases("dream", "wedlm.json", 24)]
    found = decode.generate(model, prompts, decode.WeDLM(max_new_tokens=32, verify="ar"))
    plain = decode.generate(model, prompts, decode.Autoregressive(32))
    assert [r.raw_tokens for r in found] == [r.raw_tokens for r in plain]
    assert sum(r.forwards for r in found) < sum(r.forwards for r in plain)
    assert sum(r.counts["accepted"] for r in found) > 0
    assert sum(r.counts["rejected"] for r in found) > 0
