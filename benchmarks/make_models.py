"""python -m benchmarks.make_models

Trains the models that ship in d2f/models again, measures them on held-out problems and writes
their cards. Hours on a CPU; what is already trained in runs/ is kept, a killed run goes on. For a
checkout of the repository: it writes to d2f/models and README.md there. To train one of them
elsewhere: d2f train --config NAME.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from d2f.config import read_mapping
from d2f.errors import InputError
from d2f.files import write_beside
from d2f.shipped import TRAINING, shipped
from d2f.tasks.task import RESPONSE_LENGTH
from decode.decoders import DECODERS
from distill.config import TrainConfig, read_config
from distill.export import curve, data_name, front_matter

# The cards of the models that ship with the package.

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
    kind = (config.objective.name, [contract["family"]])
    lines = [
        *front_matter(name, *kind, reports, license="apache-2.0", language="en"),
        "",
        f"# {name}",
        "",
        f"A model of the family `{contract['family']}` for the tiny tasks of this project, trained "
        f"by the objective `{config.objective.name}`. With d2f-toolkit installed:",
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


ROOT = Path(__file__).resolve().parent.parent
EVALUATION = "evaluation.json"
MARKS = ("<!-- results -->", "<!-- /results -->")
NAMES = (
    "tiny-ar", "tiny-teacher", "tiny-d2f", "tiny-wino-plus", "tiny-wino-plus-d2f", "tiny-wedlm",
    "tiny-plain-teacher", "tiny-d2f-long", "tiny-code-d2f", "tiny-code-wedlm",
)  # fmt: skip
# Measurements of each model's card: (what to call it, arguments of decode.evaluate).
MEASUREMENTS: dict[str, list[tuple[str, list[str]]]] = {
    "tiny-ar": [("autoregressive", [])],
    "tiny-teacher": [
        ("static, one token a forward, blocks of 8", ["--decoder", "static", "--block-size", "8"])
    ],
    "tiny-d2f": [("d2f, tau_conf 0.9", []), ("d2f, tau_conf 0.995", ["--tau-conf", "0.995"])],
    "tiny-wino-plus": [(f"threshold {tau}, blocks of 8", ["--tau", tau]) for tau in ("0.6", "0.9")],
    "tiny-wino-plus-d2f": [(f"d2f, tau_conf {tau}", ["--tau-conf", tau]) for tau in ("0.6", "0.9")],
    "tiny-wedlm": [
        ("wedlm", ["--entropy-threshold", "0.1"]),
        ("wedlm, verified", ["--verify", "ar"]),
        ("autoregressive", ["--decoder", "autoregressive"]),
    ],
    "tiny-plain-teacher": [
        (label, ["--tasks", "story,sudoku", *words])
        for label, words in (
            (
                "static, one token a forward, blocks of 32",
                ["--decoder", "static", "--block-size", "32"],
            ),
            (
                "the same in blocks of 16",
                ["--decoder", "static", "--block-size", "16"],
            ),
            (
                "blocks of 16 block-causally, which it was not trained for",
                ["--decoder", "d2f", "--block-size", "16", "--tau-add", "1.0", "--tau-conf", "1.0"],
            ),
        )
    ],
    "tiny-d2f-long": [
        (label, ["--tasks", "story,sudoku", *words.split()])
        for label, words in (
            ("d2f, tau_conf 0.9", "--tau-conf 0.9"),
            ("d2f, tau_conf 0.99", "--tau-conf 0.99"),
            (
                "d2f, one block of 24 at a time, tau_conf 0.995",
                "--block-size 24 --tau-add 1.0 --tau-act 1.0 --tau-conf 0.995",
            ),
        )
    ],
    "tiny-code-d2f": [
        (f"d2f, tau_conf {tau}", ["--tasks", "coding", "--tau-conf", tau])
        for tau in ("0.9", "0.99")
    ],
    "tiny-code-wedlm": [
        (label, ["--tasks", "coding", *words])
        for label, words in (
            ("wedlm", ["--entropy-threshold", "0.1"]),
            ("wedlm, verified", ["--verify", "ar"]),
            ("autoregressive", ["--decoder", "autoregressive"]),
        )
    ],
}
# glibc gives large buffers back to the kernel after each operation and faults them in again, which
# slows training on a CPU; so they are kept.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


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
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "1"]
    module = ["-m", "distill.train", "--config", str(config), "--tracker", "none"]
    subprocess.run([sys.executable, *launch, *module], check=True, env=KEEP_MEMORY | os.environ)


def ship(name: str) -> Path:
    """Copy a finished run's model (and its adapter, where what it is for is in the package too), or
    its adapter alone, in fp16, to the package; the folder."""
    from distill.export import replacing

    run, place = Path("runs") / name, MODELS / name
    trained = run / ("adapter" if name in ADAPTERS else "model")
    with replacing(place) as beside:
        shutil.copytree(trained, beside, dirs_exist_ok=True)
        if name in ADAPTERS:
            _halve(beside / "adapter_model.safetensors")
        elif (run / "adapter").is_dir() and read_config(run / "config.yaml").init in NAMES:
            shutil.copytree(run / "adapter", beside / "adapter")
    return place


def _halve(file: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, framework="pt") as stored:
        tensors = {key: stored.get_tensor(key).half() for key in stored.keys()}  # noqa: SIM118
        metadata = stored.metadata()
    save_file(tensors, file, metadata=metadata)


def measure(name: str, problems: int) -> list[dict[str, Any]]:
    """The reports of `decode.evaluate` for a shipped model."""
    reports: list[dict[str, Any]] = []
    for label, arguments in MEASUREMENTS[name]:
        path = Path("runs") / name / f"evaluation-{len(reports)}.json"
        command = ["-m", "decode.evaluate", "--model", name, *arguments]
        command += ["--problems", str(problems), "--json", str(path)]
        subprocess.run([sys.executable, *command], check=True)
        reports.append(json.loads(path.read_text()) | {"label": label})
    return reports


def results_table() -> str:
    """The README's table, from the measurements that lie beside the shipped models."""
    lines = [
        "| model | decoder | task | right of 500 | tokens a forward | forwards a problem |",
        "|---|---|---|---|---|---|",
    ]
    for name in NAMES:
        path = MODELS / name / EVALUATION
        for report in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []:
            for row in report["rows"]:
                lines.append(
                    f"| `{name}` | {report['label']} | {row['task']} | {row['right']} "
                    f"({row['accuracy']:.1%}) | {row['tokens_per_forward']:.2f} "
                    f"| {row['forwards'] / row['problems']:.1f} |"
                )
    return "\n".join(lines)


def with_results(readme: str) -> str:
    """The README with the table between its two marks made anew."""
    before, _, rest = readme.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{results_table()}\n{MARKS[1]}{after}"


def check_checkout() -> None:
    """Raise InputError where there is no checkout to write to."""
    readme = ROOT / "README.md"
    if not readme.is_file() or MARKS[0] not in readme.read_text(encoding="utf-8"):
        raise InputError(
            f"the models go to {MODELS} and their table to {readme}, which is not there: expected "
            "a checkout of the repository (pip install --editable); to train one of them into this "
            "folder: d2f train --config NAME"
        )


def main(arguments: list[str] | None = None) -> None:
    """Train, ship and measure each model in turn."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.make_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--problems", type=int, default=500, help="held-out problems a task (default 500)"
    )
    parser.add_argument(
        "--models", default=",".join(NAMES), help=f"some of {','.join(NAMES)}, in this order"
    )
    options = parser.parse_args(arguments)
    names = options.models.split(",")
    if set(names) - set(NAMES):
        parser.error(f"--models must be among {','.join(NAMES)}, got {options.models}")
    try:
        check_checkout()
        os.chdir(ROOT)
        for name in names:
            make(name, options.problems)
        readme = ROOT / "README.md"
        with _kept(readme):
            write_beside(readme, with_results(readme.read_text(encoding="utf-8")))
    except subprocess.CalledProcessError as error:  # which has said why
        command = " ".join(map(str, error.cmd))
        sys.exit(f"error: {command} ended with {error.returncode}; {_KEPT}")
    except InputError as error:
        sys.exit(f"error: {error}")


def make(name: str, problems: int) -> None:
    """Train, ship and measure a model and write its card. Raises InputError, CalledProcessError."""
    began = time.time()
    train(name)
    place = ship(name)
    reports = measure(name, problems)
    with _kept(place):
        write_beside(place / EVALUATION, json.dumps(reports, indent=1) + "\n")
        write_beside(place / CURVE, json.dumps(points(name)) + "\n")
        write_beside(place / "README.md", card(name, reports))
    print(f"{name}: done in {time.time() - began:.0f} s", flush=True)


def _kept(place: Path) -> AbstractContextManager[None]:
    from d2f.files import says_what_is_kept

    return says_what_is_kept(place, _KEPT)


_KEPT = "what is trained in runs/ is kept, the same command goes on"


if __name__ == "__main__":
    main()
