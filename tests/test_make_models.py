"""`make models`: the commands it runs, what a later call leaves out, what it ships and writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from benchmarks import make_models
from benchmarks.make_models import MEASUREMENTS, MODELS, NAMES, ROLLOUTS, card
from d2f.contract import Contract
from d2f.shipped import TRAINING
from d2f.shipped import shipped as shipped_configs
from decode import evaluate
from decode.decoders import default_decoder
from distill.config import read_config


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands that are run, each without the Python before it; nothing of them is done."""
    run = []

    def record(line, *, check, env=None):
        assert line[0] == sys.executable and check
        assert env is None or env["MALLOC_MMAP_THRESHOLD_"] == "33554432"
        run.append(line[1:])

    monkeypatch.setattr(make_models.subprocess, "run", record)
    monkeypatch.chdir(tmp_path)
    return run


def training(name):
    config = str(shipped_configs(*TRAINING)[name])
    return ["-m", "distill.train", "--config", config, "--tracker", "none"]


def test_what_a_training_needs_is_made_first_and_once(commands, tmp_path):
    make_models.train("tiny-teacher")
    assert commands == [training("tiny-teacher-start"), training("tiny-teacher")]
    commands.clear()
    made = tmp_path / "runs" / "tiny-teacher-start" / "model"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    make_models.train("tiny-teacher")
    assert commands == [training("tiny-teacher")]
    commands.clear()
    make_models.train("tiny-wino-plus")
    collect, train = commands
    assert collect[:2] == ["-m", "distill.rollouts"] and train == training("tiny-wino-plus")
    assert collect[2:-2] == ROLLOUTS["tiny-wino-plus"].split() and collect[-2] == "--output"


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A folder with runs/, and what is shipped in models/ beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_models, "MODELS", tmp_path / "models")
    (tmp_path / "models").mkdir()
    return tmp_path


ADAPTER = "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("name", "shipped"),
    [
        ("tiny-ar", {"a"}),
        ("tiny-d2f", {"a", f"adapter/{ADAPTER}"}),
        ("tiny-code-d2f", {"a"}),  # its teacher is not in the package
        ("tiny-wino-plus", {ADAPTER}),
    ],
)
def test_a_run_ships_its_model_with_its_adapter_or_the_adapter_alone(elsewhere, name, shipped):
    run = elsewhere / "runs" / name
    (run / "model").mkdir(parents=True)
    shutil.copy(shipped_configs(*TRAINING)[name], run / "config.yaml")
    (run / "model" / "a").write_text("a")
    if name != "tiny-ar":
        (run / "adapter").mkdir()
        save_file({"w": torch.ones(2) / 3}, run / "adapter" / ADAPTER, metadata={"format": "pt"})
    (elsewhere / "models" / name).mkdir()
    (elsewhere / "models" / name / "old").write_text("")
    place = make_models.ship(name)
    assert place == elsewhere / "models" / name
    files = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    assert files == shipped
    if name == "tiny-wino-plus":
        assert load_file(place / ADAPTER)["w"].dtype == torch.float16


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_measurements_and_cards_are_what_the_command_writes(
    monkeypatch, tmp_path, name
):
    """Of the shipped configurations and measurements, and of a log with the card's own numbers. The
    hub finds every measured accuracy in its head."""
    reports = json.loads((MODELS / name / "evaluation.json").read_text())
    wanted = []
    for label, words in MEASUREMENTS[name]:
        options = evaluate.parse(["--model", name, *words.split()])
        kind = options.decoder or default_decoder(Contract.load(MODELS / name)).name
        wanted.append((label, kind, options.given))
    assert wanted == [(r["label"], r["decoder"], r["settings"]) for r in reports]
    run = tmp_path / "runs" / name
    run.mkdir(parents=True)
    read_config(name).save(run / "config.yaml")
    there = (MODELS / name / "README.md").read_text()
    found = re.search(r", ([\d,]+) samples \|\n\| steps \| ([\d,]+) of .*\n"
                      r"\| time \| ([\d.]+) hours on (\d+) cores", there)  # fmt: skip
    samples, step = (int(found[i].replace(",", "")) for i in (1, 2))
    line = {"step": step, "samples": samples, "seconds": 3600 * float(found[3])}
    (run / "log.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: int(found[4]))
    assert card(name, reports) == there
    data = ModelCard(there).data
    assert data.pipeline_tag == "text-generation" and data.license == "apache-2.0"
    told = [(one.dataset_type, one.metric_value) for one in data.eval_results]
    measured = [(row["task"], row["accuracy"]) for one in reports for row in one["rows"]]
    assert sorted(told) == sorted(measured)


def test_the_snippet_of_a_card_runs(capsys):
    text = (MODELS / "tiny-wedlm" / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(snippet, {})
    assert "#### 7" in capsys.readouterr().out


@pytest.fixture
def checkout(monkeypatch, elsewhere):
    """A checkout's README and a run; nothing is trained, and measuring writes a report."""
    readme = elsewhere / "README.md"
    readme.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    monkeypatch.setattr(make_models, "ROOT", elsewhere)
    monkeypatch.setattr(make_models, "train", lambda name: None)
    monkeypatch.setattr(make_models, "card", lambda name, reports: f"card of {name}")
    row = {"task": "story", "right": 1, "accuracy": 0.5, "tokens_per_forward": 2.0,
           "forwards": 6, "problems": 2}  # fmt: skip

    def run(line, *, check):
        assert line[1:3] == ["-m", "decode.evaluate"] and line[-4:-1] == [
            "--problems",
            "2",
            "--json",
        ]
        Path(line[-1]).write_text(json.dumps({"rows": [row], "asked": line[5:-4]}))

    monkeypatch.setattr(make_models.subprocess, "run", run)
    for name in ("tiny-d2f", "tiny-ar"):
        (elsewhere / "runs" / name / "model").mkdir(parents=True)
        config = shipped_configs(*TRAINING)[name]
        shutil.copy(config, elsewhere / "runs" / name / "config.yaml")
        lines = [{"step": 10 * i, "loss": 1 / i, "seconds": i} for i in range(1, 1001)]
        log = "".join(json.dumps(line) + "\n" for line in lines)
        (elsewhere / "runs" / name / "log.jsonl").write_text(log)
    return elsewhere


def test_the_command_writes_measurements_curve_card_and_table(checkout, monkeypatch, capsys):
    make_models.main(["--models", "tiny-d2f", "tiny-ar", "--problems", "2"])
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["tiny-d2f", "tiny-ar"], "in the order that was asked for"
    made = checkout / "models" / "tiny-d2f"
    assert (made / "README.md").read_text() == "card of tiny-d2f"
    reports = json.loads((made / "evaluation.json").read_text())
    told = [(report["label"], report["asked"]) for report in reports]
    assert told == [("d2f, tau_conf 0.9", []), ("d2f, tau_conf 0.995", ["--tau-conf", "0.995"])]
    points = json.loads((made / "curve.json").read_text())
    assert len(points) == 200 and points[-1] == {"step": 10_000, "loss": 0.001}
    readme = (checkout / "README.md").read_text()
    assert readme.startswith("before\n<!-- results -->\n| model |")
    assert readme.endswith("| 2.00 | 3.0 |\n<!-- /results -->\nafter\n") and "old" not in readme
    assert readme.index("| `tiny-ar` | autoregressive |") < readme.index("| `tiny-d2f` | d2f")

    def fail(name):
        raise subprocess.CalledProcessError(3, ["train", "it"])

    monkeypatch.setattr(make_models, "train", fail)
    message = r"error: .*'it'.* exit status 3.*; what is trained in runs/ is kept"
    with pytest.raises(SystemExit, match=message):
        make_models.main(["--models", "tiny-ar"])
    assert (checkout / "README.md").read_text() == readme
