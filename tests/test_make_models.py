"""`make models`: which commands it runs, in which order, what of it a later call leaves out, what
it ships of a run, and what the card says."""

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
from benchmarks.make_models import (
    MEASUREMENTS,
    MODELS,
    NAMES,
    ROLLOUTS,
    card,
    hours,
    points,
    starts_from,
)
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
        run.append(line[1:])

    monkeypatch.setattr(make_models.subprocess, "run", record)
    monkeypatch.chdir(tmp_path)
    return run


def training(name):
    return ["-m", "accelerate.commands.launch", "--num_processes", "1", "-m", "distill.train",
            "--config", str(shipped_configs(*TRAINING)[name]), "--tracker", "none"]  # fmt: skip


def test_what_a_training_starts_from_is_trained_first_and_once(commands, tmp_path):
    make_models.train("tiny-teacher")
    assert commands == [training("tiny-teacher-start"), training("tiny-teacher")]
    commands.clear()
    made = tmp_path / "runs" / "tiny-teacher-start" / "model"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    make_models.train("tiny-teacher")
    assert commands == [training("tiny-teacher")]


def test_rollouts_are_collected_before_the_training_on_them(commands):
    make_models.train("tiny-wino-plus")
    collect, train = commands
    assert collect[:2] == ["-m", "distill.rollouts"] and train == training("tiny-wino-plus")
    assert collect[2:-2] == ROLLOUTS["tiny-wino-plus"].split() and collect[-2] == "--output"


def test_training_keeps_large_buffers_unless_the_user_says_otherwise(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(make_models.subprocess, "run", lambda *_, env, **__: given.append(env))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    monkeypatch.chdir(tmp_path)
    make_models.train("tiny-ar")
    assert given[0]["MALLOC_MMAP_THRESHOLD_"] == "33554432"
    assert given[0]["MALLOC_TRIM_THRESHOLD_"] == "7" and "PATH" in given[0]


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A folder with runs/, and what is shipped in models/ beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_models, "MODELS", tmp_path / "models")
    (tmp_path / "models").mkdir()
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


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
    assert files(place) == shipped
    if name == "tiny-wino-plus":
        assert load_file(place / ADAPTER)["w"].dtype == torch.float16


def test_each_measurement_is_read_from_a_file_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny-wedlm").mkdir(parents=True)
    asked = []

    def evaluate(line, *, check):
        assert check and line[:3] == [sys.executable, "-m", "decode.evaluate"]
        asked.append(line[3:-1])
        Path(line[-1]).write_text(json.dumps({"rows": [], "file": line[-1]}))

    monkeypatch.setattr(make_models.subprocess, "run", evaluate)
    reports = make_models.measure("tiny-wedlm", 7)
    shown = [(label, f"runs/tiny-wedlm/evaluation-{i}.json") for i, label in
             enumerate(["wedlm", "wedlm, verified", "autoregressive"])]  # fmt: skip
    assert [(report["label"], report["file"]) for report in reports] == shown
    assert asked[1] == "--model tiny-wedlm --verify ar --problems 7 --json".split()


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_measurements_are_those_that_the_command_would_take(name):
    told = []
    for label, words in MEASUREMENTS[name]:
        options = evaluate.parse(["--model", name, *words])
        kind = options.decoder or default_decoder(Contract.load(MODELS / name)).name
        told.append((label, kind, options.given))
    there = json.loads((MODELS / name / "evaluation.json").read_text())
    assert told == [(r["label"], r["decoder"], r["settings"]) for r in there]


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_cards_are_what_the_command_writes(monkeypatch, tmp_path, name):
    """Of the shipped configurations and measurements, and of a log with the card's own numbers."""
    run = tmp_path / "runs" / name
    run.mkdir(parents=True)
    read_config(name).save(run / "config.yaml")
    there = (MODELS / name / "README.md").read_text()
    found = re.search(r", ([\d,]+) samples \|\n\| steps \| ([\d,]+) of .*\n"
                      r"\| time \| ([\d.]+) hours on (\d+) cores", there)  # fmt: skip
    samples, step = (int(found[i].replace(",", "")) for i in (1, 2))
    lines = [{"step": 1, "samples": 0, "seconds": 0.0},
             {"step": step, "samples": samples, "seconds": 3600 * float(found[3])}]  # fmt: skip
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: int(found[4]))
    reports = json.loads((MODELS / name / "evaluation.json").read_text())
    assert card(name, reports) == there


@pytest.mark.parametrize("name", NAMES)
def test_the_hub_reads_the_head_of_a_card(name):
    """Its metadata: every measured accuracy is in it, as it was measured."""
    data = ModelCard((MODELS / name / "README.md").read_text()).data
    assert data.pipeline_tag == "text-generation" and data.license == "apache-2.0"
    reports = json.loads((MODELS / name / "evaluation.json").read_text())
    told = [(one.dataset_type, one.metric_value) for one in data.eval_results]
    measured = [(row["task"], row["accuracy"]) for one in reports for row in one["rows"]]
    assert sorted(told) == sorted(measured)


@pytest.mark.parametrize("name", ["tiny-ar", "tiny-teacher", "tiny-wedlm"])
def test_the_snippet_of_a_card_runs(name, capsys):
    text = (MODELS / name / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(snippet, {})
    assert "#### 7" in capsys.readouterr().out


def test_the_points_of_a_curve_are_of_the_whole_log(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    lines = [{"step": 10 * i, "loss": 1 / i, "seconds": i} for i in range(1, 1001)]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = points("one")
    assert len(found) == 200 and found[-1] == {"step": 10_000, "loss": 0.001}
    assert found[0]["step"] == 50


def test_the_hours_of_a_run_are_added_over_its_restarts():
    assert hours([{"seconds": s} for s in (60, 1800, 0.5, 3600, 3600, 2, 1800)]) == 2.0


def test_the_card_says_which_adapter_a_training_goes_on_from():
    config = read_config("tiny-wino-plus").model_copy(update={"init_adapter": "first"})
    assert starts_from(config) == "tiny-teacher with the adapter first"


@pytest.fixture
def checkout(monkeypatch, elsewhere):
    """A checkout's README, seen from another folder; nothing is trained or measured."""
    readme = elsewhere / "README.md"
    readme.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    (elsewhere / "other").mkdir()
    monkeypatch.chdir(elsewhere / "other")
    monkeypatch.setattr(make_models, "ROOT", elsewhere)
    monkeypatch.setattr(make_models, "train", lambda name: None)
    monkeypatch.setattr(make_models, "points", lambda name: [{"step": 1, "loss": 2.0}])
    monkeypatch.setattr(make_models, "card", lambda name, reports: f"card of {name}")
    row = {"task": "story", "right": 1, "accuracy": 0.5, "tokens_per_forward": 2.0,
           "forwards": 6, "problems": 2}  # fmt: skip

    def measure(name, problems):
        return [{"label": f"{problems} asked", "rows": [row]}]

    monkeypatch.setattr(make_models, "measure", measure)
    return elsewhere


def test_the_command_writes_measurements_card_and_table_into_the_checkout(checkout, capsys):
    for name in ("tiny-teacher", "tiny-ar"):
        (checkout / "runs" / name / "model").mkdir(parents=True)
    make_models.main(["--models", "tiny-teacher,tiny-ar", "--problems", "2"])
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["tiny-teacher", "tiny-ar"], "in the order that was asked for"
    made = checkout / "models" / "tiny-ar"
    assert (made / "README.md").read_text() == "card of tiny-ar"
    assert json.loads((made / "evaluation.json").read_text())[0]["label"] == "2 asked"
    readme = (checkout / "README.md").read_text()
    assert readme.startswith("before\n<!-- results -->\n| model |")
    assert readme.endswith("| 2.00 | 3.0 |\n<!-- /results -->\nafter\n") and "old" not in readme
    assert readme.index("| `tiny-ar` | 2 asked |") < readme.index("| `tiny-teacher` | 2 asked |")


@pytest.mark.parametrize("text", [None, "no marks"])
def test_without_a_checkout_nothing_is_trained(checkout, monkeypatch, text):
    (checkout / "README.md").unlink()
    if text is not None:
        (checkout / "README.md").write_text(text)
    monkeypatch.setattr(make_models, "make", None)
    with pytest.raises(SystemExit, match=r"error: the models go to .* expected a checkout"):
        make_models.main([])


def test_a_name_that_is_no_model_is_an_error(checkout, capsys):
    with pytest.raises(SystemExit, match="2"):
        make_models.main(["--models", "tiny-ar,tiny"])
    assert "--models must be among tiny-ar,tiny-teacher," in capsys.readouterr().err


def test_all_models_at_500_problems_are_made_unless_asked_otherwise(checkout, monkeypatch):
    made = []
    monkeypatch.setattr(make_models, "make", lambda *asked: made.append(asked))
    make_models.main([])
    assert made == [(name, 500) for name in NAMES]


def test_a_command_that_fails_ends_it_with_what_is_kept(checkout, monkeypatch):
    def fail(name):
        raise subprocess.CalledProcessError(3, ["train", Path(name)])

    monkeypatch.setattr(make_models, "train", fail)
    message = "error: train tiny-ar ended with 3; what is trained in runs/ is kept"
    with pytest.raises(SystemExit, match=message):
        make_models.main(["--models", "tiny-ar"])
    assert "old" in (checkout / "README.md").read_text()
