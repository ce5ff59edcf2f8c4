"""The training card: what made a result, so that it can be made again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import yaml

import d2f
from distill.config import TrainConfig
from distill.data import Stream

_HASHED = 256  # samples


def card(config: TrainConfig, stream: Stream, log: Path) -> str:
    """Markdown with the command, the resolved configuration, hashes of the data, and the loss at
    the first and the last logged step.

    log: the run's ``log.jsonl``, which is only read.
    """
    values = config.model_dump(mode="json")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    first, last = lines[0], lines[-1]
    rows = [
        ("made by", f"d2f-toolkit {d2f.__version__}"),
        ("command", "`accelerate launch distill/train.py --config config.yaml`"),
        ("starts from", config.init or "random weights"),
        ("data", data_name(config)),
        (f"SHA-256 of the first {_HASHED} samples", f"`{samples_hash(stream)}`"),
    ]
    if config.data.file is not None:
        rows.append(
            (f"SHA-256 of {Path(config.data.file).name}", f"`{file_hash(config.data.file)}`")
        )
    rows += [
        ("steps", f"{last['step']:,}, {last['samples']:,} samples"),
        (f"loss at step {first['step']:,}", f"{first['loss']:.4f}"),
        (f"loss at step {last['step']:,}", f"{last['loss']:.4f}"),
    ]
    table = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join(
        [
            f"# {Path(config.output).name}",
            "",
            f"Trained by the objective `{config.objective}`.",
            "",
            "| | |",
            "|---|---|",
            *table,
            "",
            "config.yaml, every key resolved:",
            "",
            "```yaml",
            yaml.safe_dump(values, sort_keys=False).rstrip(),
            "```",
            "",
        ]
    )


def data_name(config: TrainConfig) -> str:
    """What was trained on, in words."""
    if config.data.tasks is not None:
        return f"generated {', '.join(config.data.tasks)} problems, split train, seed {config.seed}"
    return Path(config.data.file or config.data.dataset or "").name


def samples_hash(stream: Stream) -> str:
    """SHA-256 over the ids of the first samples, prompts and responses apart, as training sees
    them."""
    digest = hashlib.sha256()
    for index in range(_HASHED):
        sample = stream.sample(index)
        if sample is not None:  # left out
            digest.update(json.dumps([sample.prompt, sample.response]).encode())
    return digest.hexdigest()


def file_hash(path: str) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
