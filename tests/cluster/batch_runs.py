"""Batch jobs of a few rows on a small random model, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decode import batch

ROWS: list[Any] = [
    {"id": "a", "prompt": "2 + 3", "text": "the input's own"},
    {"id": "b", "promt": "2 + 4"},
    {"id": "c", "messages": [{"role": "user", "content": "Use 3 and 4 to make 12."}]},
    {"ids": [5, 6, 7, 9999]},
    *({"question": f"What is {n} and 1?", "n": n} for n in range(8)),
]
BAD = (1, 3)


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def command(model: str, rows: Path, output: Path, *more: str) -> list[str]:
    options = ["--max-new-tokens", "16", "--block-size", "4", "--tau-conf", "0.1", "--raw"]
    words = ["--model", model, "--input", str(rows), "--output", str(output), *options, *more]
    return [*words, "--batch-size", "3"]


def answered(*words: Any) -> dict[str, bytes]:
    """The files that a run leaves, but for the order of its ledger. words: of `command`."""
    assert batch.main(command(*words)) == 0
    return files(words[2])


def files(folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    header, *lines = found["ledger.jsonl"].splitlines(keepends=True)
    return found | {"ledger.jsonl": header + b"".join(sorted(lines))}
