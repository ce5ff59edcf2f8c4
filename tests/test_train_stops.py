"""Ctrl-C: the step is finished and saved, a second one stops at once, a launcher's echo of the
first is none."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from test_train import settings, weights
from test_train_processes import begin, wait_for

from distill import checkpoint
from distill.objectives import OBJECTIVES
from distill.train import main, train
from distill.trainer import StopRequest


def interrupt(monkeypatch, call: int, times: int = 1, number: int = signal.SIGINT) -> None:
    """Ctrl-C, or another signal, during one forward of masked_diffusion."""
    kind = OBJECTIVES["masked_diffusion"]
    plain, calls = kind.forward, iter(range(1, 100))

    def forward(self, batch):
        if next(calls) == call:
            for _ in range(times):
                signal.raise_signal(number)
        return plain(self, batch)

    monkeypatch.setattr(kind, "forward", forward)


def test_ctrl_c_saves_the_step_and_the_same_command_goes_on(tmp_path, monkeypatch, capfd):
    """The caller gets KeyboardInterrupt, so that what trains in a loop stops too."""
    train(settings(tmp_path / "whole", save_every=6))
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            train(settings(tmp_path / "run", save_every=6))
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [3]
    said = capfd.readouterr()
    assert "stopping after this step, which is saved" in said.err
    assert "stopped by SIGINT after step 3, which is saved: the same command goes on" in said.out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train(settings(tmp_path / "run", save_every=6))
    ours, whole = weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_lost_terminal_saves_the_step_and_nohup_goes_on(tmp_path, monkeypatch, ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        interrupt(monkeypatch, 3, number=signal.SIGHUP)
        train(settings(tmp_path / "run", save_every=6))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")["step"] == (6 if ignored else 3)


def test_it_goes_on_where_nobody_reads_what_it_says(tmp_path, monkeypatch):
    """As `| head -1` has it."""
    config = settings(tmp_path / "run", steps=6, log_every=1)
    (tmp_path / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        monkeypatch.setattr("sys.argv", ["train", "--config", str(tmp_path / "config.yaml")])
        main()
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 6
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_second_ctrl_c_stops_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(StopRequest, "PASSED_ON", -1.0)
    interrupt(monkeypatch, 3, times=2)
    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path, save_every=2))
    assert checkpoint.steps(tmp_path / "checkpoints") == [2]


def test_what_a_launcher_passes_on_is_the_same_ctrl_c(capfd):
    """The terminal signals every process, and the launcher its workers once more."""
    stop = StopRequest(1)
    with stop.listening():
        assert stop.asked() == 0
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.asked() == signal.SIGINT
    assert capfd.readouterr().err.count("stopping after this step") == 1


def test_the_last_step_ends_the_run_all_the_same(tmp_path, monkeypatch):
    interrupt(monkeypatch, 6)
    train(settings(tmp_path))
    assert (tmp_path / "model" / "config.json").is_file()


@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_ends_with_130_and_no_traceback(tmp_path, processes):
    """Both processes get the signal twice at once, as from a terminal and from a launcher."""
    _, running = begin(tmp_path, processes, steps=2000, save_every=2000)
    wait_for(tmp_path / "run" / "log.jsonl", 2, running)
    for _ in range(2):
        for process in running:
            process.send_signal(signal.SIGINT)
    said = [process.communicate(timeout=100)[0] for process in running]
    assert [process.returncode for process in running] == [130] * processes, said
    assert "stopped by SIGINT after step" in said[0] and "Traceback" not in "".join(said)
    (step,) = checkpoint.steps(tmp_path / "run" / "checkpoints")
    assert step == (tmp_path / "run" / "log.jsonl").read_text().count("\n") < 2000
