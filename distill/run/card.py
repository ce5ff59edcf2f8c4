"""The training card: what made a result, so that it can be made again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import d2f
from d2f.yaml_core import dump
from distill.config import TrainConfig
from distill.data import Stream
from distill.run.front_matter import front_matter
from distill.run.identity import file_digest
from distill.run.progress import extension_text

CARD = "README.md"
_HASHED = 256  # samples
_POINTS = 10  # of the curve
_EVALUATED = tuple(
    f"evaluation/{name}" for name in ("accuracy", "tokens_per_forward", "kl", "cross_entropy")
)


def card(
    config: TrainConfig, stream: Stream, log: Path, extended: list[dict[str, int]] | None = None
) -> str:
    """Markdown with the command, hashes of the data, the curve of the loss, what was evaluated on
    the way, and the resolved configuration.

    log: the run's ``log.jsonl``, which is only read. extended: when the run was given more steps,
    as its `RunFolder` has it.
    """
    values = config.model_dump(mode="json")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    last = lines[-1]
    entries = [
        ("made by", f"d2f-toolkit {d2f.__version__}"),
        ("command", "`accelerate launch -m distill.train --config config.yaml`"),
        ("starts from", config.init or "random weights"),
        ("data", data_name(config)),
        (f"SHA-256 of the first {_HASHED} samples", f"`{samples_hash(stream)}`"),
    ]
    if stream.held_out is not None:
        entries.append(("held-out loss", stream.held_out.said))
    for file in (config.data.file, config.evaluation.loss_file):
        if file is not None:
            entries.append((f"SHA-256 of {Path(file).name}", f"`{file_digest(Path(file))}`"))
    entries.append(("steps", f"{last['step']:,}, {last['samples']:,} samples"))
    entries += [("", extension_text(config, more)) for more in extended or []]
    table = [f"| {name} | {value} |" for name, value in entries]
    return "\n".join(
        [
            *front_matter(Path(config.output).name, config.objective),
            "",
            f"# {Path(config.output).name}",
            "",
            f"Trained by the objective `{config.objective}`.",
            "",
            "| | |",
            "|---|---|",
            *table,
            "",
            *curve(lines),
            "",
            "config.yaml, every key resolved:",
            "",
            "```yaml",
            dump(values).rstrip(),
            "```",
            "",
        ]
    )


def curve(lines: list[dict[str, Any]]) -> list[str]:
    """A table of the loss at some of the logged steps, evenly apart, the first and the last among
    them, and of every evaluation."""
    # As many points as asked for, or every line where there are fewer.
    apart = max(1, len(lines) - 1) / (_POINTS - 1)
    chosen = {min(round(i * apart), len(lines) - 1) for i in range(_POINTS)}
    evaluated = [name for name in _EVALUATED if any(name in line for line in lines)]
    head = ["step", "loss", *(name.rsplit("/", 1)[1].replace("_", " ") for name in evaluated)]
    table = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for number, line in enumerate(lines):
        values = [line.get(name) for name in evaluated]
        if number in chosen or any(value is not None for value in values):
            cells = [f"{line['step']:,}", f"{line['loss']:.4f}"]
            cells += ["" if value is None else f"{value:.3f}" for value in values]
            table.append(f"| {' | '.join(cells)} |")
    return table


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
