"""The cards of the models that ship with the package."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

from d2f.tasks.registry import RESPONSE_LENGTH
from decode.decoders import DECODERS
from distill.config import TrainConfig, read_config
from distill.run.card import curve, data_name
from distill.run.front_matter import front_matter

MODELS = Path(__file__).resolve().parent.parent / "d2f" / "models"
# Shipped without the base they are for.
ADAPTERS = ("tiny-wino-plus", "tiny-wino-plus-d2f", "tiny-d2f-long")
CURVE = "curve.json"
QUESTIONS = {  # of the task that a card measures first
    "story": "Mei has 15 marbles. She gives away 8 marbles. How many marbles does Mei have now?",
    "coding": (
        "Write a Python function derive(scores) of a list of whole numbers. "
        "Stop after the first 7. Keep only those above 4. Divide each by 2 and round down. "
        "Add them up. Return 9 times that."
    ),
}
# What makes the data.file of a configuration: arguments of distill.rollouts.
ROLLOUTS = {
    "tiny-wino-plus": "--model tiny-teacher --decoder wino --block-size 8 --problems 800 "
    "--temperatures 0,0.2,0.4",
    "tiny-wino-plus-d2f": "--model tiny-d2f --decoder d2f --revoke always --tau-conf 0.6 "
    "--problems 1000 --temperatures 0,0.2,0.4",
}


def card(name: str, reports: list[dict[str, Any]]) -> str:
    """The model card: recipe, data, steps, hardware, hours, measured table."""
    config = read_config(Path("runs") / name / "config.yaml")
    contract = json.loads((MODELS / name / "d2f_contract.json").read_text())
    kind = (config.objective, [contract["family"]])
    lines = [
        *front_matter(name, *kind, reports, license="apache-2.0", language="en"),
        "",
        f"# {name}",
        "",
        f"A model of the family `{contract['family']}` for the tiny tasks of this project, trained "
        f"by the objective `{config.objective}`. With d2f-toolkit installed:",
        "",
        *snippet(name, reports[0]),
        "",
        *facts(name, config, contract, reports[0]["environment"]["device"]),
        "",
        *measured(reports),
        "",
    ]
    kept = MODELS / name / CURVE
    if kept.is_file():
        lines += ["The loss of the last run, as it was logged:", ""]
        lines += [*curve(json.loads(kept.read_text())), ""]
    return "\n".join(lines)


def snippet(name: str, report: dict[str, Any]) -> list[str]:
    """Python that decodes a question with the model as `report` has it."""
    task = report["rows"][0]["task"]
    settings = report["settings"] | {"max_new_tokens": RESPONSE_LENGTH[task]}
    given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    decoder = f"decode.{DECODERS[report['decoder']].__name__}({given})"
    question = textwrap.wrap(QUESTIONS[task], 88, drop_whitespace=False)
    written = [f'question = "{question[0]}"']
    if len(question) > 1:
        written = ["question = (", *(f'    "{line}"' for line in question), ")"]
    decoding = [f"result = decode.generate(model, question, {decoder})[0]"]
    if len(decoding[0]) > 100:
        decoding = [f"decoder = {decoder}", "result = decode.generate(model, question, decoder)[0]"]
    return [
        "```python",
        "import d2f",
        "import decode",
        "",
        f'model = d2f.load("{name}")',
        *written,
        *decoding,
        "print(result.text, result.tokens_per_forward)",
        "```",
    ]


def facts(name: str, config: TrainConfig, contract: dict[str, Any], device: str) -> list[str]:
    """The table of what the model is and of how it was trained."""
    log = log_of(name)
    whole = MODELS / (contract["base"] if name in ADAPTERS else name)
    shape = json.loads((whole / "config.json").read_text())
    stored = "float16" if name in ADAPTERS else shape["dtype"]
    of_adapter = f", of a LoRA on {whole.name}" if name in ADAPTERS else ""
    return [
        "| | |",
        "|---|---|",
        f"| parameters | {parameters(MODELS / name):,}{of_adapter} |",
        f"| shape | {shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}, "
        f"{shape['num_attention_heads']} heads, vocabulary {shape['vocab_size']} |",
        f"| recipe | {recipe(name, config)} |",
        f"| starts from | {starts_from(config)} |",
        f"| data | {data_name(config)}, {log[-1]['samples']:,} samples |",
        f"| steps | {log[-1]['step']:,} of {config.data.rows} packed rows of "
        f"{config.data.row_length} tokens |",
        f"| time | {hours(log):.2f} hours on {os.cpu_count()} cores, {device}, beside other work |",
        f"| weights stored in | {stored} |",
    ]


def measured(reports: list[dict[str, Any]]) -> list[str]:
    """The table of what was measured, with what is counted above and where it was below."""
    rows = [
        f"| {report['label']} | {row['task']} | {row['right']} of {row['problems']} "
        f"| {row['accuracy']:.1%} | {row['accuracy_low']:.1%} to {row['accuracy_high']:.1%} "
        f"| {row['tokens_per_forward']:.2f} | {row['forwards'] / row['problems']:.1f} |"
        for report in reports
        for row in report["rows"]
    ]
    e = reports[0]["environment"]
    return [
        "Measured on held-out problems (never trained on: the splits are disjoint by the hash of "
        "each problem's key), greedy. Visible tokens are those before the first end token; "
        "forwards are calls of the model that a request was in.",
        "",
        "| decoder | task | right | accuracy | 95 % interval | tokens a forward | forwards |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"Measured {e['date']} on {e['device']}, {e['threads']} threads, {e['dtype']}, torch "
        f"{e['torch']}, transformers {e['transformers']}, Python {e['python']}, with "
        "`python -m decode.evaluate`.",
    ]


def log_of(name: str) -> list[dict[str, Any]]:
    """The lines of its run's log."""
    text = (Path("runs") / name / "log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def points(name: str) -> list[dict[str, Any]]:
    """Some steps of a run's log, evenly apart, the last among them: what its curve is drawn of."""
    log = log_of(name)
    apart = max(1, len(log) // 200)
    return [{"step": line["step"], "loss": line["loss"]} for line in log[::-apart]][::-1]


def recipe(name: str, config: TrainConfig) -> str:
    """The commands that train it."""
    commands = [f"accelerate launch -m distill.train --config {name}"]
    if name in ROLLOUTS:
        rollouts = f"python -m distill.rollouts {ROLLOUTS[name]} --output {config.data.file}"
        commands.insert(0, rollouts)
    return ", then ".join(f"`{command}`" for command in commands)


def starts_from(config: TrainConfig) -> str:
    """What the weights were at the first step."""
    if config.init_adapter is None:
        return config.init or "random weights"
    return f"{config.init} with the adapter {config.init_adapter}"


def parameters(folder: Path) -> int:
    """Weights in a model folder."""
    from safetensors import safe_open

    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="numpy") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
    total = 0
    for shape in shapes:
        size = 1
        for n in shape:
            size *= n
        total += size
    return total


def hours(log: list[dict[str, Any]]) -> float:
    """Wall time of a run from its log, over restarts."""
    total, before = 0.0, 0.0
    for line in log:
        if line["seconds"] < before:
            total += before
        before = line["seconds"]
    return (total + before) / 3600
