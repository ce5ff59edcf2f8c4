"""python -m benchmarks.make_models [--models NAME ...] [--problems 500]

Train the models that ship in d2f/models again, measure them on held-out problems and write their
cards. Hours on a CPU; what is already trained in runs/ is kept, a killed run goes on. For a
checkout of the repository: it writes to d2f/models and docs/models.md there. To train one of them
elsewhere: d2f train --config NAME.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from benchmarks import parser
from d2f.config import read_mapping
from d2f.errors import InputError
from d2f.files import write_beside, writing_folder
from d2f.shipped import TRAINING, shipped
from d2f.tasks.task import RESPONSE_LENGTH
from decode.decoders import DECODERS
from decode.report import markdown_table
from distill.config import read_config
from distill.export import curve, data_name, front_matter

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "d2f" / "models"
MARKS = ("<!-- results -->", "<!-- /results -->")
NAMES = (
    "tiny-ar", "tiny-teacher", "tiny-d2f", "tiny-wino-plus", "tiny-wino-plus-d2f", "tiny-wedlm",
    "tiny-plain-teacher", "tiny-d2f-long", "tiny-code-d2f", "tiny-code-wedlm",
)  # fmt: skip
# Shipped without the base they are for.
ADAPTERS = ("tiny-wino-plus", "tiny-wino-plus-d2f", "tiny-d2f-long")
EVALUATION, CURVE = "evaluation.json", "curve.json"
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
# Measurements of each model's card: what to call it, and arguments of decode.evaluate.
_LONG = "--tasks story,sudoku"
MEASUREMENTS: dict[str, list[tuple[str, str]]] = {
    "tiny-ar": [("autoregressive", "")],
    "tiny-teacher": [
        ("static, one token a forward, blocks of 8", "--decoder static --block-size 8")
    ],
    "tiny-d2f": [("d2f, tau_conf 0.9", ""), ("d2f, tau_conf 0.995", "--tau-conf 0.995")],
    "tiny-wino-plus": [(f"threshold {t}, blocks of 8", f"--tau {t}") for t in ("0.6", "0.9")],
    "tiny-wino-plus-d2f": [(f"d2f, tau_conf {t}", f"--tau-conf {t}") for t in ("0.6", "0.9")],
    "tiny-wedlm": [
        ("wedlm", "--entropy-threshold 0.1"),
        ("wedlm, verified", "--verify ar"),
        ("autoregressive", "--decoder autoregressive"),
    ],
    "tiny-plain-teacher": [
        (
            "static, one token a forward, blocks of 32",
            f"{_LONG} --decoder static --block-size 32",
        ),
        ("the same in blocks of 16", f"{_LONG} --decoder static --block-size 16"),
        (
            "blocks of 16 block-causally, which it was not trained for",
            f"{_LONG} --decoder d2f --block-size 16 --tau-add 1.0 --tau-conf 1.0",
        ),
    ],
    "tiny-d2f-long": [
        ("d2f, tau_conf 0.9", f"{_LONG} --tau-conf 0.9"),
        ("d2f, tau_conf 0.99", f"{_LONG} --tau-conf 0.99"),
        (
            "d2f, one block of 24 at a time, tau_conf 0.995",
            f"{_LONG} --block-size 24 --tau-add 1.0 --tau-act 1.0 --tau-conf 0.995",
        ),
    ],
    "tiny-code-d2f": [
        (f"d2f, tau_conf {t}", f"--tasks coding --tau-conf {t}") for t in ("0.9", "0.99")
    ],
    "tiny-code-wedlm": [
        ("wedlm", "--tasks coding --entropy-threshold 0.1"),
        ("wedlm, verified", "--tasks coding --verify ar"),
        ("autoregressive", "--tasks coding --decoder autoregressive"),
    ],
}
# glibc gives large buffers back to the kernel after each operation and faults them in again, which
# slows training on a CPU; so they are kept.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def main(arguments: list[str] | None = None) -> None:
    """Train, ship and measure each model in turn."""
    given = parser(__doc__)
    given.add_argument("--problems", type=int, default=500, help="held-out problems a task")
    given.add_argument("--models", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    options = given.parse_args(arguments)
    page = ROOT / "docs" / "models.md"
    os.chdir(ROOT)
    try:
        for name in options.models:
            make(name, options.problems)
        before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        write_beside(page, f"{before}{MARKS[0]}\n{results_table()}\n{MARKS[1]}{after}")
    except (InputError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}; what is trained in runs/ is kept, the same command goes on")


def make(name: str, problems: int) -> None:
    """Train, ship and measure a model and write its card. Raises InputError, CalledProcessError."""
    began = time.time()
    train(name)
    place = ship(name)
    reports = measure(name, problems)
    log = log_of(name)
    apart = max(1, len(log) // 200)
    points = [{key: line[key] for key in ("step", "loss")} for line in log[::-apart]][::-1]
    write_beside(place / EVALUATION, json.dumps(reports, indent=1) + "\n")
    write_beside(place / CURVE, json.dumps(points) + "\n")
    write_beside(place / "README.md", card(name, reports))
    print(f"{name}: done in {time.time() - began:.0f} s", flush=True)


def train(name: str) -> None:
    """Run the training of the configuration NAME, unless its result is there; first the one whose
    result it starts from, where that is not a shipped model."""
    config = shipped(*TRAINING)[name]
    values = read_mapping(config)
    if (Path(values["output"]) / "model" / "config.json").is_file():
        return
    for start in (Path(values.get(key) or "") for key in ("init", "init_adapter")):
        if start.parts[:1] == ("runs",):
            train(start.parts[1])
    file = values["data"].get("file")
    if file is not None:  # a call that has nothing left to do is short
        collect = ["-m", "distill.rollouts", *ROLLOUTS[name].split(), "--output", file]
        subprocess.run([sys.executable, *collect], check=True)
    module = ["-m", "distill.train", "--config", str(config), "--tracker", "none"]
    subprocess.run([sys.executable, *module], check=True, env=KEEP_MEMORY | os.environ)


def ship(name: str) -> Path:
    """Copy a finished run's model (and its adapter, where what it is for is in the package too), or
    its adapter alone, in fp16, to the package; return the folder."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    run, place = Path("runs") / name, MODELS / name
    with writing_folder(place) as beside:
        shutil.copytree(
            run / ("adapter" if name in ADAPTERS else "model"), beside, dirs_exist_ok=True
        )
        if name in ADAPTERS:
            file = beside / "adapter_model.safetensors"
            with safe_open(file, framework="pt") as stored:
                halves = {key: stored.get_tensor(key).half() for key in stored.keys()}  # noqa: SIM118
                metadata = stored.metadata()
            save_file(halves, file, metadata=metadata)
        elif (run / "adapter").is_dir() and read_config(run / "config.yaml").init in NAMES:
            shutil.copytree(run / "adapter", beside / "adapter")
    return place


def measure(name: str, problems: int) -> list[dict[str, Any]]:
    """Return the reports of `decode.evaluate` for a shipped model."""
    reports: list[dict[str, Any]] = []
    for label, arguments in MEASUREMENTS[name]:
        path = Path("runs") / name / f"evaluation-{len(reports)}.json"
        command = ["-m", "decode.evaluate", "--model", name, *arguments.split()]
        command += ["--problems", str(problems), "--json", str(path)]
        subprocess.run([sys.executable, *command], check=True)
        reports.append(json.loads(path.read_text()) | {"label": label})
    return reports


def results_table() -> str:
    """Make the table of the measurements that lie beside the shipped models."""
    head = "model", "decoder", "task", "right of 500", "tokens a forward", "forwards a problem"
    rows = []
    for name in NAMES:
        path = MODELS / name / EVALUATION
        for report in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []:
            for row in report["rows"]:
                right = f"{row['right']} ({row['accuracy']:.1%})"
                work = (
                    f"{row['tokens_per_forward']:.2f}",
                    f"{row['forwards'] / row['problems']:.1f}",
                )
                rows.append((f"`{name}`", report["label"], row["task"], right, *work))
    return "\n".join(markdown_table(head, rows))


def log_of(name: str) -> list[dict[str, Any]]:
    """Read the log of a model's run."""
    text = (Path("runs") / name / "log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def card(name: str, reports: list[dict[str, Any]]) -> str:
    """Write the model card: how to use it, recipe, data, steps, hours, measured table, curve."""
    from safetensors import safe_open

    config = read_config(Path("runs") / name / "config.yaml")
    contract = json.loads((MODELS / name / "d2f_contract.json").read_text())
    log, objective = log_of(name), config.objective.name
    whole = MODELS / (contract["base"] if name in ADAPTERS else name)
    shape = json.loads((whole / "config.json").read_text())
    of_adapter = f", of a LoRA on {whole.name}" if name in ADAPTERS else ""
    (file,) = (MODELS / name).glob("*.safetensors")
    with safe_open(file, framework="numpy") as tensors:
        sizes = [math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys()]  # noqa: SIM118
    recipe = f"`accelerate launch -m distill.train --config {name}`"
    if name in ROLLOUTS:
        rollouts = f"python -m distill.rollouts {ROLLOUTS[name]} --output {config.data.file}"
        recipe = f"`{rollouts}`, then {recipe}"
    starts_from = config.init or "random weights"
    if config.init_adapter is not None:
        starts_from += f" with the adapter {config.init_adapter}"
    used = reports[0]["environment"]
    head = ("decoder", "task", "right", "accuracy", "95 % interval", "tokens a forward", "forwards")
    rows = [
        (
            report["label"],
            row["task"],
            f"{row['right']} of {row['problems']}",
            f"{row['accuracy']:.1%}",
            f"{row['accuracy_low']:.1%} to {row['accuracy_high']:.1%}",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['forwards'] / row['problems']:.1f}",
        )
        for report in reports
        for row in report["rows"]
    ]
    lines = [
        *front_matter(
            objective,
            [contract["family"]],
            model_name=name,
            eval_results=[
                EvalResult(
                    task_type="text-generation",
                    dataset_type=row["task"],
                    dataset_name=f"{row['task']}, held out",
                    metric_type="accuracy",
                    metric_name=f"accuracy, {report['label']}",
                    metric_value=row["accuracy"],
                )
                for report in reports
                for row in report["rows"]
            ],
            license="apache-2.0",
            language="en",
        ),
        "",
        f"# {name}",
        "",
        f"A model of the family `{contract['family']}` for the tiny tasks of this project, trained "
        f"by the objective `{objective}`. With d2f-toolkit installed:",
        "",
        *snippet(name, reports[0]),
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {sum(sizes):,}{of_adapter} |",
        f"| shape | {shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}, "
        f"{shape['num_attention_heads']} heads, vocabulary {shape['vocab_size']} |",
        f"| recipe | {recipe} |",
        f"| starts from | {starts_from} |",
        f"| data | {data_name(config)}, {log[-1]['samples']:,} samples |",
        f"| steps | {log[-1]['step']:,} of {config.data.rows} packed rows of "
        f"{config.data.row_length} tokens |",
        f"| time | {log[-1]['seconds'] / 3600:.2f} hours on {os.cpu_count()} cores, "
        f"{used['device']}, beside other work |",
        f"| weights stored in | {'float16' if name in ADAPTERS else shape['dtype']} |",
        "",
        "Measured on held-out problems (never trained on: the splits are disjoint by the hash of "
        "each problem's key), greedy. Visible tokens are those before the first end token; "
        "forwards are calls of the model that a request was in.",
        "",
        *markdown_table(head, rows),
        "",
        f"Measured {used['date']} on {used['device']}, {used['threads']} threads, "
        f"{used['dtype']}, torch {used['torch']}, transformers {used['transformers']}, Python "
        f"{used['python']}, with `python -m decode.evaluate`.",
        "",
    ]
    kept = MODELS / name / CURVE
    if kept.is_file():
        points = json.loads(kept.read_text())
        apart = max(1, len(points) - 1) / 9
        chosen = sorted({min(round(i * apart), len(points) - 1) for i in range(10)})
        lines += ["The loss of the last run, as it was logged:", ""]
        lines += [*curve([points[i] for i in chosen]), ""]
    return "\n".join(lines)


def snippet(name: str, report: dict[str, Any]) -> list[str]:
    """Return Python that decodes a question with the model as `report` has it."""
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


if __name__ == "__main__":
    main()
