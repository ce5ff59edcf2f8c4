"""A run's progress without a terminal, its end, and how it is started again: finished, extended,
with its data by another path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_train import settings, weights

from d2f.errors import InputError
from distill import checkpoint
from distill.checkpoint import RunFolder
from distill.log import Progress, duration, result_text
from distill.train import train
from distill.trainer import learning_rate

ROOT = Path(__file__).parent.parent


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_first_last_and_apart(capsys):
    """Ten seconds a step: the first, those at least 30 s after the one before, the last."""
    clock = Clock()
    progress = Progress(100, 110, shown=True, clock=clock)
    for step in range(101, 111):
        clock.now += 10
        progress.step()
        progress.report(step, 0.5, 1e-3, last=step == 110)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["101", "104", "107", "110"]
    assert lines[1] == "step 104 of 110: loss 0.5000, lr 1.00e-03, 0.1 steps/s, 60 s left"


def test_a_process_that_is_not_shown_prints_nothing(capsys):
    progress = Progress(0, 1, shown=False)
    progress.report(1, 0.5, 1e-3, last=True)
    assert capsys.readouterr().out == ""


def test_a_terminal_has_a_bar_and_no_lines(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = Progress(3, 5, shown=True)
    progress.step()
    progress.report(4, 0.5, 1e-3, last=False)
    progress.bar.refresh()
    said = capsys.readouterr()
    assert said.out == "" and "4/5" in said.err and "loss=0.5000" in said.err
    progress.close()
    assert progress.bar.disable, "a bar that is closed is not drawn again"
    hidden = Progress(3, 5, shown=False)
    hidden.step()
    hidden.report(4, 0.5, 1e-3, last=True)
    assert capsys.readouterr().out == ""


def test_a_first_step_that_took_no_time_is_shown_all_the_same(capsys):
    Progress(0, 2, shown=True, clock=Clock()).report(1, 0.5, 1e-3, last=False)
    assert capsys.readouterr().out.endswith(", 1e+09 steps/s, 0 s left\n")


def test_durations_are_as_people_say_them():
    said = {
        12.4: "12 s", 89: "89 s", 90: "2 min", 600: "10 min", 5_340: "89 min",
        5_400: "1 h 30 min", 7_200: "2 h 00 min", 11_100: "3 h 05 min",
    }  # fmt: skip
    assert {seconds: duration(seconds) for seconds in said} == said


def test_a_run_says_its_loss_and_ends_with_a_line_that_decodes(tmp_path, capsys):
    """log_every larger than the run: the first and the last step are printed all the same; the log
    has no line more for that. The line is run as it is printed."""
    train(settings(tmp_path / "my run", log_every=100))
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said if line.startswith("step ")] == ["1", "6"]
    assert len((tmp_path / "my run" / "log.jsonl").read_text().splitlines()) == 1
    assert said[-2] == f"finished after 6 steps: {tmp_path}/my run/model"
    start, command = said[-1].split(": ", 1)
    assert start == "to decode with it" and command.startswith("python -m decode.pipeline --model")
    done = subprocess.run(
        ["sh", "-c", command.replace("python", sys.executable, 1) + " --problems 1"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_what_is_trained_on_own_data_is_decoded_with_a_prompt(tmp_path):
    data = {"file": "d.jsonl", "row_length": 48, "rows": 2}
    assert result_text(settings(tmp_path, data=data), ["model"]).endswith(' --prompt "..."')
    own, place = settings("a run", steps=1000), "a run"
    assert result_text(own, ["adapter", "model", "official"]) == (
        f"finished after 1,000 steps: {place}/model, {place}/adapter, {place}/official\n"
        f"to decode with it: python -m decode.pipeline --model '{place}/model'"
    )


def test_a_finished_run_says_so_and_loads_nothing(tmp_path, capsys, monkeypatch):
    config = settings(tmp_path)
    train(config)
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr("distill.export.prepare_model", None)
        train(config)
    said = capsys.readouterr().out
    assert said.startswith(f"nothing is left to do: finished after 6 steps: {tmp_path}/model")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_result_that_is_gone_or_newly_asked_for_is_written(tmp_path):
    config = settings(tmp_path)
    train(config)
    kept = weights(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model").rename(tmp_path / "moved")
    train(config)
    assert all(torch.equal(weights(tmp_path)[name], value) for name, value in kept.items())
    train(settings(tmp_path, export_official=True))
    assert (tmp_path / "official" / "config.json").is_file()


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_finished_run_goes_on_with_more_steps(tmp_path, capsys, schedule):
    """At a constant rate it is the longer run to the bit. Of a cosine the new length holds from
    there on, which is said, in the record and on the card."""
    optimizer = {"lr": 0.003, "warmup": 2, "schedule": schedule}
    long = settings(tmp_path / "run", steps=9, optimizer=optimizer)
    train(settings(tmp_path / "run", optimizer=optimizer))
    train(long, stop_after=1)  # killed on the way
    train(long)
    said = capsys.readouterr().out
    assert said.count("extended at step 6 from 6 to 9 steps: from there on the learning rate") == 1
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["extended"] == [{"step": 6, "from": 6, "to": 9}]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["steps"] == 9
    assert "extended at step 6" in (tmp_path / "run" / "model" / "README.md").read_text()
    rates = [json.loads(line)["lr"] for line in (tmp_path / "run" / "log.jsonl").open()]
    assert rates[6:] == [learning_rate(long, step) for step in (6, 7, 8)] and len(rates) == 9
    train(settings(tmp_path / "whole", steps=9, optimizer=optimizer))
    ours, whole = weights(tmp_path / "run"), weights(tmp_path / "whole")
    same = all(torch.equal(ours[name], whole[name]) for name in whole)
    assert same == (schedule == "constant")


def test_fewer_steps_are_another_run(tmp_path):
    train(settings(tmp_path))
    with pytest.raises(InputError, match="steps: 6 there, 5 now"):
        train(settings(tmp_path, steps=5))
    with pytest.raises(InputError, match="steps: 6 there, 7 now"):  # an ablation's folder
        RunFolder(settings(tmp_path, steps=7), extend=False)


def test_the_same_data_by_another_path_is_the_same_run(tmp_path, monkeypatch):
    """Relative, absolute, through a link, and moved elsewhere: what counts is the content."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/d.jsonl").write_text('{"prompt": "2+3?", "response": "5"}\n' * 3)
    Path("link.jsonl").symlink_to("data/d.jsonl")
    Path("moved").mkdir()
    Path("moved/d.jsonl").write_bytes(Path("data/d.jsonl").read_bytes())

    def run(path: str, output: str = "run"):
        data = {"file": path, "row_length": 48, "rows": 2}
        return settings(tmp_path / output, data=data, steps=5, save_every=1)

    paths = ["data/d.jsonl", "./data/../data/d.jsonl", str(tmp_path / "data/d.jsonl"),
             "link.jsonl", "moved/d.jsonl"]  # fmt: skip
    for done, path in enumerate(paths, 1):
        train(run(path), stop_after=1)
        assert checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] == done
    train(run("data/d.jsonl", "whole"))
    ours, whole = (load_file(tmp_path / o / "model/model.safetensors") for o in ("run", "whole"))
    assert all(torch.equal(ours[name], whole[name]) for name in whole)
    Path("other.jsonl").write_text('{"prompt": "2+3?", "response": "6"}\n')
    with pytest.raises(InputError, match=r"data\.file: 'moved/d\.jsonl' there, 'other\.jsonl' now"):
        train(run("other.jsonl"))
