"""What a run must notice (its inputs changed, its weights are no numbers, its folder is not what it
left), and what an error on the disk leaves."""

from __future__ import annotations

import errno
import json
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from test_train import settings, weights
from tiny import fresh_model, random_model

from benchmarks import make_models
from d2f import files
from d2f.data import JsonLines
from d2f.errors import CheckpointError, InputError
from d2f.noise import PipelineStates
from d2f.saving import save_model
from decode import record_states as states_command
from distill import checkpoint, export
from distill.log import Log, keep_lines
from distill.rollouts import Rollout, RolloutLedger
from distill.train import train
from distill.trainer import FiniteWatch, NonFiniteLossError

ROWS = '{"prompt": "2+3?", "response": "5"}\n' * 20


def base(folder: Path, seed: int = 0) -> Path:
    save_model(
        random_model("llada", seed), folder, dtype=torch.float32, objective="masked_diffusion"
    )
    return folder


# Inputs that changed


@pytest.fixture
def inputs(tmp_path) -> dict:
    """A D2F run that reads a file of rows, recorded states, a base and an adapter of it."""
    (tmp_path / "d.jsonl").write_text(ROWS)
    PipelineStates({8: [(0.5, 1.0)]}).save(tmp_path / "states.json")
    init = str(base(tmp_path / "base"))
    train(settings(tmp_path / "before", "d2f", init=init, steps=1))
    return {
        "objective": "d2f", "init": init, "init_adapter": str(tmp_path / "before" / "adapter"),
        "block_size": 8, "steps": 3, "data": {"file": str(tmp_path / "d.jsonl"), "rows": 2},
        "noise": {"schedule": "pipeline", "states": str(tmp_path / "states.json")},
    }  # fmt: skip


def other_adapter(place: Path) -> None:
    train(settings(place, "d2f", init=str(place / "base"), steps=2, seed=5))
    for name in ("adapter_model.safetensors",):
        (place / "before" / "adapter" / name).write_bytes((place / "adapter" / name).read_bytes())


CHANGES = {
    "data.file": lambda place: (place / "d.jsonl").write_text(ROWS + ROWS),
    "noise.states": lambda place: PipelineStates({8: [(1.0,)]}).save(place / "states.json"),
    "init": lambda place: base(place / "base", seed=1),
    "init_adapter": other_adapter,
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_resume_refuses_an_input_that_changed(tmp_path, inputs, key):
    """With what it was and what it is; put back, the run goes on; a run of an earlier version,
    which did not note what it read, goes on as before."""
    config = settings(tmp_path / "run", **inputs)
    train(config, stop_after=1)
    there = json.loads((tmp_path / "run" / "run.json").read_text())["inputs"]
    assert there.keys() == CHANGES.keys()
    CHANGES[key](tmp_path)
    with pytest.raises(InputError, match=rf"\({key} had SHA-256 {there[key][:16]}\.\.\., has (?!"
                       rf"{there[key][:16]})[0-9a-f]{{16}}\.\.\. now\)"):  # fmt: skip
        train(config)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [1]
    if key == "init":  # of which the adapter is no longer one
        return
    (tmp_path / "run" / "run.json").unlink()
    train(config)
    now = json.loads((tmp_path / "run" / "run.json").read_text())["inputs"]
    assert [k for k in there if now[k] != there[k]] == [key]


def test_a_file_that_shrinks_is_an_error_that_names_it(tmp_path):
    """Mapped into memory it would end the process."""
    path = tmp_path / "d.jsonl"
    path.write_text(ROWS * 1000)
    source = JsonLines(path)
    assert source.record(19_999)["response"] == "5"
    path.write_text(ROWS)
    assert source.record(3)["response"] == "5"
    with pytest.raises(InputError, match=r"d\.jsonl has become shorter while it is read"):
        source.record(19_999)


# Weights that are not finite


@pytest.fixture
def overflowing(monkeypatch):
    """Sets the step, counted from 0, from which the rate is beyond what weights can take."""

    def begin(first: int) -> None:
        rate = lambda _, step: 1e39 if step >= first else 1e-3  # noqa: E731
        monkeypatch.setattr("distill.trainer.learning_rate", rate)

    return begin


def test_the_last_step_is_checked_too(tmp_path, overflowing):
    """Loss and gradient of the step are finite; what they do to the weights is not."""
    overflowing(0)
    with pytest.raises(NonFiniteLossError, match=r"\(weight\) is not finite after step 1"):
        train(settings(tmp_path, steps=1))
    assert checkpoint.steps(tmp_path / "checkpoints") == []
    assert not (tmp_path / "model").exists()


def test_they_are_neither_decoded_with_nor_saved_over_what_was_good(tmp_path, overflowing):
    """The rate is too high from step 3 on, where it is evaluated as well."""
    overflowing(2)
    train(settings(tmp_path, steps=2))
    saved = checkpoint.newest(tmp_path / "checkpoints")
    before = load_file(tmp_path / "model" / "model.safetensors")
    with pytest.raises(NonFiniteLossError, match="after step 3"):
        train(settings(tmp_path, steps=3))
    now = checkpoint.newest(tmp_path / "checkpoints")
    assert now["step"] == saved["step"] == 2
    assert all(torch.equal(weights(tmp_path)[name], value) for name, value in before.items())
    overflowing(0)
    with pytest.raises(NonFiniteLossError, match="after step 1"):
        evaluated = {"eval_every": 1, "evaluation": {"problems": 1}}
        train(settings(tmp_path / "evaluated", **evaluated))
    assert not (tmp_path / "evaluated" / "best").exists()


def test_moments_are_checked_by_name():
    from accelerate import Accelerator

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    watch = FiniteWatch(Accelerator(cpu=True))
    watch.check_state(7, {"w": weight}, optimizer)
    optimizer.state[weight]["exp_avg_sq"][1] = float("inf")
    with pytest.raises(NonFiniteLossError, match=r"w \(exp_avg_sq\) is not finite after step 7"):
        watch.check_state(7, {"w": weight}, optimizer)


@pytest.mark.parametrize("value", [float("nan"), 1e5])
def test_no_model_is_written_that_is_not_finite_in_its_dtype(tmp_path, value):
    """1e5 is a number in fp32 and none in fp16."""
    model = fresh_model("llada")
    with torch.no_grad():
        model.backbone.lm_head.weight[3, 4] = value
    with pytest.raises(CheckpointError, match=r"1 of \d+ tensors in float16, first lm_head"):
        save_model(model, tmp_path, dtype=torch.float16)
    assert not (tmp_path / "model.safetensors").exists()


# A folder that is not what a run left


def test_a_run_that_failed_at_its_start_does_not_refuse_the_corrected_one(tmp_path):
    """A sample that is too long for its row: the configuration lies there, nothing else does."""
    short = {"tasks": {"sudoku": 1.0}, "row_length": 30, "rows": 2}
    with pytest.raises(InputError, match="sample 0 has"):
        train(settings(tmp_path, data=short))
    assert (tmp_path / "config.yaml").is_file()
    train(settings(tmp_path))
    assert (tmp_path / "model" / "config.json").is_file()


def test_strays_among_the_checkpoints_are_left_alone(tmp_path):
    train(settings(tmp_path), stop_after=4)
    folder = tmp_path / "checkpoints"
    strays = ["step-9", "step-0000006.bak1", "step-0000004 (copy)", "step-٣"]
    for name in strays:
        (folder / name).mkdir()
    (folder / "step-0000009").write_text("a file")
    train(settings(tmp_path))
    assert checkpoint.steps(folder) == [4, 6]
    assert all((folder / name).is_dir() for name in strays)


@pytest.mark.parametrize("content", ["", "[1, 2", None, "[1]"])
def test_a_configuration_that_is_gone_or_emptied_is_said(tmp_path, content):
    why = "missing" if content is None else "no mapping of keys"
    train(settings(tmp_path), stop_after=2)
    path = tmp_path / "config.yaml"
    path.write_text(content) if content is not None else path.unlink()
    with pytest.raises(InputError, match=r"holds checkpoints or a result, but its config\.yaml, "
                       rf"which says of which run, is {why}: put it back"):  # fmt: skip
        train(settings(tmp_path))


def test_a_damaged_record_is_said(tmp_path):
    train(settings(tmp_path), stop_after=2)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json cannot be read"):
        train(settings(tmp_path))


def test_torn_lines_of_a_log_are_dropped(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"step": 1}\n{"step": 2, "a": {}\n[3]\n{"loss": 1}\n\xff\n{"step": 9}\n')
    keep_lines(log, 5)
    assert log.read_text() == '{"step": 1}\n'


# Errors of the disk


def full(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_output_that_cannot_be_made_is_known_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("distill.export.prepare_model", None)
    with pytest.raises(InputError, match=r"expected a folder, .*/file is a file"):
        train(settings(tmp_path / "file" / "run"))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match=r"the folder .* cannot be written"):
        train(settings(tmp_path / "run"))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), SafetensorError("full")])
def test_an_export_without_room_keeps_what_was_there(tmp_path, monkeypatch, error):
    train(settings(tmp_path))
    before = weights(tmp_path)

    def no_room(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("d2f.checkpoint._write", no_room)
        with pytest.raises(InputError, match=r"/model could not be written: .*results are kept"):
            train(settings(tmp_path, steps=7))
    assert all(torch.equal(weights(tmp_path)[name], value) for name, value in before.items())
    assert not list(tmp_path.glob("*.writing"))
    train(settings(tmp_path, steps=7))
    assert not torch.equal(weights(tmp_path)["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.parametrize("call", ["rename", "rmtree"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_kill_while_a_result_is_replaced_leaves_one(tmp_path, monkeypatch, call, nth):
    place = tmp_path / "best"
    with export.replacing(place) as beside:
        (beside / "it").write_text("old")
    owner = {"rename": Path, "rmtree": files.shutil}[call]
    plain, left = getattr(owner, call), [nth]

    def kill(*arguments, **more):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return plain(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, kill)
        try:
            with export.replacing(place) as beside:
                (beside / "it").write_text("new")
        except KeyboardInterrupt:
            pass
    files.put_back(place)
    assert (place / "it").read_text() in ("old", "new")


def test_a_log_without_room_says_what_goes_on(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    log._file.close()
    log._file = type("Full", (), {"write": full})()
    with pytest.raises(InputError, match=r"log\.jsonl could not be written: No space left on "
                       r"device; the same command goes on from the newest"):  # fmt: skip
        log.write({"step": 1})


def test_rollouts_without_room_keep_those_before(tmp_path, monkeypatch):
    rollout = Rollout(
        unique_id="story-1", source="story", prompt_ids=(5,), generated_ids=(6, 7),
        trajectory_accepted=(0, 1), trajectory_proposed=(0, 1), append_steps=(0,), block_size=2,
        decoding_steps=2, used_temperature=0.0, text="a b",
    )  # fmt: skip
    path = tmp_path / "rollouts.jsonl"
    file = RolloutLedger(path, {"seed": 0})
    file.add_rollout(rollout)
    monkeypatch.setattr("os.fsync", full)
    file._sync = True
    with pytest.raises(InputError, match=r"No space left.*; what it had before is kept"):
        file.add_rollout(rollout.model_copy(update={"unique_id": "story-2"}))
    file.close()
    again = RolloutLedger(path, {"seed": 0})
    assert list(again.rows) == ["story-1"] and not again.torn


def test_states_know_their_place_before_they_decode(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("d2f.load", None)
    assert states_command.main(["--output", str(tmp_path / "file" / "states.json")]) == 2
    assert "file cannot be made: File exists" in capsys.readouterr().err


def test_a_model_that_cannot_be_made_is_one_line(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(1, ["train", "it"])

    monkeypatch.setattr("subprocess.run", fail)
    monkeypatch.setattr("os.chdir", lambda _: None)
    monkeypatch.setattr(make_models, "train", lambda name: subprocess.run(["train"], check=True))
    with pytest.raises(SystemExit, match=r"error: train it ended with 1; what is trained"):
        make_models.main(["--models", "tiny-ar"])


@pytest.mark.parametrize("scaled", [False, True])
def test_a_gradient_that_overflows_is_a_failure_unless_a_scaler_skips_its_step(scaled):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = object() if scaled else None  # as under fp16, which needs a GPU
    watch, fine, bad = FiniteWatch(accelerator), torch.tensor(1.0), torch.tensor(float("inf"))
    watch.see(3, [8, 9], fine, bad)
    with nullcontext() if scaled else pytest.raises(NonFiniteLossError, match="at step 3"):
        watch.check()
    watch.see(4, [10], bad, fine)
    with pytest.raises(NonFiniteLossError, match=f"at step {4 if scaled else 3}"):
        watch.check()
