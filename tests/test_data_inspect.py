"""python -m distill.data --inspect: what the model will see, with and without colours."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
import yaml
from data_rows import long_rows, run_settings, write
from rich.console import Console
from tiny import random_model

import d2f
from d2f.saving import save_model
from distill.config import read_config
from distill.data.__main__ import block_starts, main
from distill.objectives import OBJECTIVES


def inspected(tmp_path, *arguments, status=0, **console):
    out = io.StringIO()
    given = ["--inspect", "--config", str(tmp_path / "c.yaml"), *arguments]
    assert main(given, Console(file=out, width=100, **console)) == status
    return out.getvalue()


@pytest.fixture
def d2f_config(tmp_path):
    long_file = long_rows(tmp_path / "long[b].jsonl")
    save_model(random_model("llada"), tmp_path / "base", dtype=torch.float32)
    data = {"file": long_file, "on_long": "drop", "row_length": 60, "short_tail": 3}
    config = run_settings(tmp_path / "out", data, "d2f", init=str(tmp_path / "base"), block_size=4)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return tmp_path


def test_inspect_shows_what_the_objective_masks(d2f_config):
    """Without colours: masked tokens in brackets, the tail in braces, a bar before each block."""
    text = inspected(d2f_config, "--samples", "2")
    config = read_config(d2f_config / "c.yaml")
    model = random_model("llada")
    made = OBJECTIVES["d2f"](model, config)
    found = made.stream()
    kept = [s for s in map(found.sample, range(10)) if s is not None][:2]
    shown = re.split(r"\nsample ", text)[1:]
    assert len(shown) == 2 and "\x1b" not in text
    for sample, part in zip(kept, shown, strict=True):
        masked, _ = made.draw(sample)
        head, rest = part.split("\n", 1)
        tail = len(sample.response) - sample.answer
        assert f"prompt {len(sample.prompt)} tokens, response {len(sample.response)} " in head
        assert f"({sample.answer} answer, {tail} tail)" in head and "long[b].jsonl, line " in head
        body, blocks = rest.split("masked by block: ")
        assert body.count("[") == masked.sum() and body.count("{") == tail
        assert body.count("|") - 2 * body.count("<|") == -(-len(sample.response) // 4)
        ratios = [entry.split("=")[0] for entry in blocks.split("\n")[0].split()]
        sizes = np.split(masked, range(4, len(masked), 4))
        assert ratios == [f"{part.sum()}/{len(part)}" for part in sizes]
    assert "10 of 13 rows used" in text or "11 of 13 rows used" in text
    assert "an epoch: 1" in text and "a step: " in text
    assert not (d2f_config / "out").exists()


@pytest.mark.parametrize("size", [1, 3, 200])
def test_blocks_begin_where_what_is_seen_grows(d2f_config, size):
    config = read_config(d2f_config / "c.yaml", ["--block_size", str(min(size, 60))])
    model = random_model("llada")
    made = OBJECTIVES["d2f"](model, config)
    sample = made.stream().sample(0)
    assert block_starts(sample, made) == list(range(0, len(sample.response), size))
    assert len(sample.response) > 4
    made.sample_spans = lambda sample: d2f.spans.causal(len(sample))
    assert block_starts(sample, made) == [0]


def test_a_line_feed_is_seen_and_a_terminal_has_colours(d2f_config):
    path = write(d2f_config / "d.jsonl", [{"prompt": "q", "response": "one\ntwo"}])
    text = inspected(d2f_config, "--samples", "1", "--data.file", str(path))
    body = text.split("\nsample ")[1].split("masked by block")[0]
    assert re.search(r"(?m)[^X]⏎$\n[^X]", body)
    text = inspected(d2f_config, "--samples", "1", force_terminal=True, color_system="truecolor")
    _, body = text.split("\nsample ")[1].split("masked by block")[0].split("\n", 1)
    assert "\x1b[1;37;41m" in body
    assert "[" not in re.sub(r"\x1b\[[0-9;]*m", "", body)


def test_inspect_names_what_is_wrong(d2f_config, capsys):
    inspected(d2f_config, "--samples", "0", status=2)
    assert "--samples must be at least 1, got 0" in capsys.readouterr().err
    inspected(d2f_config, "--data.fil", "x", status=2)
    assert "data.fil" in capsys.readouterr().err
    assert main(["--config", "c"]) == 2
    assert "expected --inspect" in capsys.readouterr().err
