"""Small files of rows, and streams over them, for the tests of training data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny import saved_tokenizer, tokenizer

from distill.config import Data, TrainConfig, parse_config
from distill.data.samples import Sample
from distill.data.stream import Stream

END, MASK = 0, 1  # of the tiny tokenizer


def write(path: Path, rows: list[Any]) -> Path:
    """A JSONL file: text is a line as it is, anything else is written as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def pairs(count: int, words: int = 3) -> list[dict[str, str]]:
    """Rows that tell themselves apart, of about the same length."""
    return [{"prompt": f"q{i:03d}?", "response": f"a{i:03d} " * words} for i in range(count)]


def settings(**values: Any) -> Data:
    return Data.model_validate({"row_length": 96, "rows": 2} | values)


def stream(
    tail: bool = True, seed: int = 0, ends: tuple[int, ...] = (END,), **values: Any
) -> Stream:
    return Stream(settings(**values), tokenizer(), ends, seed, tail, MASK)


def samples(found: Stream, epoch: int = 0) -> list[Sample]:
    """The samples of an epoch in its order, without those that are left out."""
    assert found.epoch is not None
    every = [found.sample(epoch * found.epoch + i) for i in range(found.epoch)]
    return [sample for sample in every if sample is not None]


def texts(found: Stream, epoch: int = 0) -> set[tuple[str, str]]:
    """Prompt and response of an epoch's samples as text, special tokens and all."""
    decode = tokenizer().decode
    return {(decode(s.prompt), decode(s.response[: s.answer])) for s in samples(found, epoch)}


def long_rows(path: Path) -> str:
    """Ten short rows, a long response, a longer one, and a long prompt."""
    long = [("q", "a " * 40), ("q", "b " * 60), ("q " * 99, "a")]
    rows = [{"prompt": prompt, "response": response} for prompt, response in long]
    return str(write(path, [*pairs(10), *rows]))


def run_settings(
    output: Path, data: dict[str, Any], objective: Any = "masked_diffusion", **changes: Any
) -> TrainConfig:
    """A training run of a tiny model."""
    family = "causal" if objective == "next_token" else "llada"
    shape = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1}
    values: dict[str, Any] = {
        "objective": objective, "output": str(output), "family": family, "model": shape,
        "tokenizer": saved_tokenizer(), "steps": 2, "tracker": "none",
        "data": {"row_length": 96, "rows": 2} | data,
    } | changes  # fmt: skip
    if "init" in changes:
        del values["model"], values["family"], values["tokenizer"]
    return parse_config(values, "test")
