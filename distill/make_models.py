"""python -m distill.make_models

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
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from d2f.configuration import read_mapping
from d2f.errors import InputError
from d2f.files import write_beside
from d2f.shipped import TRAINING, shipped
from distill.config import read_config
from distill.model_cards import ADAPTERS, CURVE, MODELS, ROLLOUTS, card, points

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
    from distill.run.export import replacing

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
        prog="python -m distill.make_models",
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
    from d2f.write_errors import says_what_is_kept

    return says_what_is_kept(place, _KEPT)


_KEPT = "what is trained in runs/ is kept, the same command goes on"


if __name__ == "__main__":
    main()
