"""The folder of a run: what it is taken for, its checkpoints, log and card, what a full disk or a
kill leaves, and how a run is started again."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from data_rows import pairs, run_settings, stream, write
from huggingface_hub import ModelCard
from test_train import curve, same, settings, weights
from tiny import random_model

import d2f
from d2f.command import main as d2f_command
from d2f.errors import InputError
from d2f.noise import PipelineStates
from d2f.saving import save_model
from distill import checkpoint
from distill.checkpoint import RunFolder, digests
from distill.export import card, data_name
from distill.log import Log, Progress, read_log, result_text
from distill.objectives import OBJECTIVES
from distill.train import train
from distill.trainer import learning_rate

TASKS = {"tasks": {"countdown": 1.0, "story": 1.0}}


# What a run shows


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_first_last_and_apart(capsys):
    """Ten seconds a step: the first, those at least 30 s after the one before, the last."""
    clock = Clock()
    progress = Progress(100, 110, shown=True, clock=clock)
    for step in range(101, 111):
        clock.now += 10
        progress.report(step, 0.5, 3, 1e-3, last=step == 110)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["101", "104", "107", "110"]
    assert lines[1] == (
        "step 104 of 110: loss 0.5000 (mean of 3 steps), lr 1.00e-03, 0.1 steps/s, 01:00 left"
    )
    Progress(0, 1, shown=False).report(1, 0.5, 1, 1e-3, last=True)
    assert capsys.readouterr().out == ""


def test_a_terminal_has_a_bar_and_no_lines(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = Progress(3, 5, shown=True)
    progress.bar.update()
    progress.report(4, 0.5, 2, 1e-3, last=False)
    progress.bar.close()
    said = capsys.readouterr()
    assert said.out == "" and "4/5" in said.err and "loss=0.5000 (mean of 2)" in said.err


def test_a_run_says_its_loss_and_ends_with_a_line_that_decodes(tmp_path, capsys):
    """log_every larger than the run: the first and the last step are printed all the same; the log
    has no line more for that. The line is run as it is printed."""
    train(settings(tmp_path / "my run", log_every=100))
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in said if line.startswith("step ")] == ["1", "6"]
    assert len(curve(tmp_path / "my run")) == 1
    assert said[-2] == f"finished after 6 steps: {tmp_path}/my run/model"
    start, command = said[-1].split(": ", 1)
    assert start == "to decode with it" and command.startswith("d2f decode --model '")
    assert not d2f_command([*shlex.split(command)[1:], "--problems", "1"])
    own = run_settings(Path("a run"), {"file": "d.jsonl"}, steps=1000)
    assert result_text(own, ["adapter", "model", "official"]) == (
        "finished after 1,000 steps: a run/model, a run/adapter, a run/official\n"
        "to decode with it: d2f decode --model 'a run/model' --prompt \"...\""
    )


# The log and the card


def test_a_log_goes_on_after_a_resume_and_is_cut_after_a_step(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": NaN}\n{"step": 3, "seconds": 100.0}\n{"step": 4}\n{"st')
    log = Log(path, 3)
    log.write({"step": 4})
    lines = read_log(path)
    assert [line["step"] for line in lines] == [1, 3, 4]
    assert 100.0 <= lines[-1]["seconds"] < 110.0


def test_a_card_says_what_made_a_result(tmp_path):
    path = write(tmp_path / "d.jsonl", pairs(3))
    config = run_settings(tmp_path / "my-run", {"file": str(path)})
    lines = [
        {"step": 1, "loss": 2, "samples": 3},
        {"step": 3, "loss": 1, "samples": 4, "evaluation/kl": 0.25},
        {"step": 2000, "loss": 0.5, "samples": 4567},
    ]
    data = stream(file=str(path))
    text = card(config, data, lines, [{"step": 2, "from": 2, "to": 2000}])
    assert ModelCard(text).data.tags == ["d2f", "diffusion-language-model", "masked_diffusion"]
    for line in (
        "# my-run",
        "Trained by the objective `masked_diffusion`.",
        f"| made by | d2f-toolkit {d2f.__version__} |",
        "| starts from | random weights |",
        f"| SHA-256 of d.jsonl | `{hashlib.sha256(path.read_bytes()).hexdigest()}` |",
        "| steps | 2,000, 4,567 samples |",
        "|  | extended at step 2 from 2 to 2,000 steps: from there on the learning rate is the "
        "cosine of 2,000 steps |",
        "| step | loss | kl |",
        "| 1 | 2.0000 |  |",
        "| 3 | 1.0000 | 0.250 |",
    ):
        assert f"\n{line}\n" in text, line
    config.save(tmp_path / "config.yaml")
    assert text.endswith(f"```yaml\n{(tmp_path / 'config.yaml').read_text()}```\n")
    named = run_settings(tmp_path, TASKS, seed=4)
    assert data_name(named) == "generated countdown, story problems, split train, seed 4"


# What a folder is taken for


def begun(config, **changes) -> RunFolder:
    """The folder of a run that has begun and kept something."""
    RunFolder(config).begin(0)
    (Path(config.output) / "checkpoints" / "step-0000001").mkdir(parents=True)
    return RunFolder(config.model_copy(update=changes))


@pytest.mark.parametrize("name", ["model", "best", "checkpoints/step-0000001"])
def test_whatever_a_run_has_kept_is_not_mixed_with_another(tmp_path, name):
    config = run_settings(tmp_path / "run", TASKS)
    RunFolder(config).begin(0)
    other = config.model_copy(update={"seed": 1})
    RunFolder(other)  # nothing was kept
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(InputError, match=r"holds another run \(seed: 0 there, 1 now\): expected"):
        RunFolder(other)
    RunFolder(config)
    fewer = run_settings(tmp_path / "run", {"tasks": {"countdown": 1.0}})
    with pytest.raises(InputError, match=r"data.tasks.story: 1.0 there, None now"):
        RunFolder(fewer)


def test_what_changes_no_weights_may_change_under_way(tmp_path):
    config = run_settings(tmp_path, TASKS)
    free = {"tracker": "wandb", "wandb_mode": "online", "log_every": 3, "save_every": 3, "keep": 3,
            "export_official": True, "gradient_accumulation": 2,
            "gradient_checkpointing": True}  # fmt: skip
    begun(config, **free)
    with pytest.raises(InputError, match="mixed_precision: 'no' there, 'bf16' now; eval_every: "):
        RunFolder(config.model_copy(update={"eval_every": 1, "mixed_precision": "bf16"}))


def test_a_folder_of_an_earlier_version_is_the_same_run(tmp_path):
    """Without a record; without a key that came later. A key that is unknown now is told."""
    config = run_settings(tmp_path, TASKS)
    begun(config)
    (tmp_path / "run.json").unlink()
    there = config.model_dump(mode="json")
    del there["attention"]
    (tmp_path / "config.yaml").write_text(json.dumps(there))
    assert RunFolder(config).record == {}
    (tmp_path / "config.yaml").write_text(json.dumps(there | {"flavour": "sweet"}))
    with pytest.raises(InputError, match=r"another run \(.*flavour: 'sweet' there, None now\)"):
        RunFolder(config)


def test_an_output_that_cannot_be_made_is_known_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("distill.trainer.prepare_model", None)
    with pytest.raises(InputError, match=r"expected a folder that can be written: .*/file$"):
        train(settings(tmp_path / "file" / "run"))


# What a run reads


ROWS = '{"prompt": "2+3?", "response": "5"}\n' * 20


def test_a_resume_refuses_an_input_that_changed(tmp_path):
    """With what it was and what it is; a run of an earlier version, which did not note what it
    read, goes on."""

    def put(number: int) -> dict[str, Path]:
        place = {"data.file": tmp_path / "d.jsonl", "objective.noise.states": tmp_path / "s.json"}
        place["data.file"].write_text(ROWS * number)
        PipelineStates({8: [(0.5, 1.0)] * number}).save(place["objective.noise.states"])
        model = random_model("llada", number)
        save_model(model, tmp_path / "base", dtype=torch.float32, objective="masked_diffusion")
        return place | {"init": tmp_path / "base", "init_adapter": tmp_path / "before" / "adapter"}

    place = {key: str(path) for key, path in put(1).items()}
    train(settings(tmp_path / "before", "d2f", init=place["init"], steps=1))
    inputs = {
        "init": place["init"], "init_adapter": place["init_adapter"], "block_size": 8,
        "data": {"file": place["data.file"], "rows": 2},
        "noise": {"schedule": "pipeline", "states": place["objective.noise.states"]},
    }  # fmt: skip
    config = settings(tmp_path / "run", "d2f", steps=3, **inputs)
    train(config, stop_after=1)
    record = tmp_path / "run" / "run.json"
    there = json.loads(record.read_text())["inputs"]
    assert there.keys() == place.keys()
    put(2)
    weights = tmp_path / "before" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    with pytest.raises(InputError, match="holds another run") as caught:
        train(config)
    for key, digest in there.items():
        assert (
            f"{key}: '{place[key]}' there, '{place[key]}' now, SHA-256 {digest[:16]}..., then"
            in (str(caught.value))
        )
    record.unlink()
    RunFolder(config)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [1]


def test_the_same_data_by_another_path_is_the_same_run(tmp_path, monkeypatch):
    """Relative, absolute, through a link, and moved elsewhere: what counts is the content."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/d.jsonl").write_text(ROWS)
    Path("link.jsonl").symlink_to("data/d.jsonl")
    shutil.copy("data/d.jsonl", "moved.jsonl")

    def run(path: str):
        return run_settings(tmp_path / "run", {"file": path})

    begun(run("data/d.jsonl"))
    for path in (
        "./data/../data/d.jsonl",
        str(tmp_path / "data/d.jsonl"),
        "link.jsonl",
        "moved.jsonl",
    ):
        RunFolder(run(path))
    Path("other.jsonl").write_text('{"prompt": "2+3?", "response": "6"}\n')
    with pytest.raises(InputError, match=r"data\.file: 'data/d\.jsonl' there, 'other\.jsonl' now"):
        RunFolder(run("other.jsonl"))


def test_digests_are_of_names_and_contents_but_not_of_caches(tmp_path):
    assert digests(run_settings(tmp_path, TASKS)) == {}
    assert digests(run_settings(tmp_path, {"dataset": "nobody/nothing"})) == {}
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read: No such file"):
        digests(run_settings(tmp_path, {"file": str(tmp_path / "none.jsonl")}))
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)

    def digest() -> str:
        return digests(run_settings(tmp_path, {"dataset": str(folder.parent)}))["data.dataset"]

    (folder / "a.arrow").write_text("1")
    first = digest()
    (folder / "cache-1.arrow").write_text("x")
    assert digest() == first
    (folder / "a.arrow").write_text("2")
    second = digest()
    (folder / "a.arrow").rename(folder / "b.arrow")
    assert len({first, second, digest()}) == 3


# How a run is started again


def test_a_finished_run_says_so_and_loads_nothing(tmp_path, capsys, monkeypatch):
    config = settings(tmp_path)
    train(config)
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr("distill.trainer.prepare_model", None)
        train(config)
    said = capsys.readouterr().out
    assert said.startswith(f"nothing is left to do: finished after 6 steps: {tmp_path}/model")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    # A result that is gone, or newly asked for, is written again from the checkpoint.
    kept = weights(tmp_path)
    (tmp_path / "model").rename(tmp_path / "moved")
    train(settings(tmp_path, export_official=True))
    assert all(torch.equal(weights(tmp_path)[name], value) for name, value in kept.items())
    assert (tmp_path / "official" / "config.json").is_file()
    with pytest.raises(InputError, match="steps: 6 there, 5 now"):
        train(settings(tmp_path, steps=5))


def test_a_finished_run_goes_on_with_more_steps(tmp_path, capsys):
    """At a constant rate it is the longer run to the bit. It is said once, in the record and on the
    card."""
    optimizer = {"lr": 0.003, "warmup": 2, "schedule": "constant"}
    long = settings(tmp_path / "run", steps=9, optimizer=optimizer)
    short = settings(tmp_path / "run", optimizer=optimizer)
    train(short, stop_after=3)
    with pytest.raises(InputError, match=r"6 there, 9 now.*more steps are for a run that has come"):
        train(long)
    train(short)
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
    assert same(tmp_path / "run", tmp_path / "whole")


# What a kill, a full disk or a damaged file leaves


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that was stopped after four of six steps, and beside it one that was not."""
    folder = tmp_path_factory.mktemp("stopped")
    train(settings(folder / "whole"))
    train(settings(folder / "run"), stop_after=4)
    return folder


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path, stopped):
    run = shutil.copytree(stopped / "run", tmp_path / "run")
    file = run / "checkpoints" / "step-0000004" / "state.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.warns(UserWarning, match=r"damaged checkpoint passed over: .*step-0000004"):
        train(settings(run))
    assert same(run, stopped / "whole")


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_code_under_a_right_checksum_is_not_run_but_passed_over(tmp_path, stopped, monkeypatch):
    """torch.save writes the checksum of whatever it is given."""
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(stopped / "run", tmp_path / "run")
    torch.save(Runs(), run / "checkpoints" / "step-0000004" / "state.pt")
    with pytest.warns(UserWarning, match=r"damaged .*0000004/state.pt: it is no checkpoint of"):
        found = checkpoint.newest(run / "checkpoints")
    assert found is not None and found["step"] == 2
    shutil.rmtree(run / "checkpoints" / "step-0000002")
    with pytest.warns(UserWarning), pytest.raises(InputError, match="no whole checkpoint") as error:
        train(settings(run))
    assert "\n" not in str(error.value) and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["torch.save", "distill.export.save_model"])
def test_a_full_disk_keeps_what_was_there_and_the_same_command_goes_on(
    tmp_path, stopped, monkeypatch, name
):
    run = shutil.copytree(stopped / "run", tmp_path / "run")

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(name, no_room)
        with pytest.raises(InputError, match=r"could not be written: .*No space left.* kept"):
            train(settings(run))
    assert not list(run.rglob("*.writing"))
    train(settings(run))
    assert same(run, stopped / "whole")


def test_a_folder_that_is_removed_under_way_is_said_in_a_line(tmp_path, monkeypatch):
    kind = OBJECTIVES["masked_diffusion"]
    plain, calls = kind.forward, iter(range(1, 9))

    def forward(self, batch):
        if next(calls) == 3:
            shutil.rmtree(tmp_path / "run")
        return plain(self, batch)

    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(InputError, match=r"/run/.* could not be written: .*No such file") as said:
        train(settings(tmp_path / "run", log_every=9))
    assert "\n" not in str(said.value) and not (tmp_path / "run").exists()
