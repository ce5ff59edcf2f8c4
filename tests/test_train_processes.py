"""Two processes train what one does; a resume continues on another number of them; SIGTERM reaches
all through one; kill -9 costs what was not saved and nothing else."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_train import settings
from tiny import random_model

from d2f.errors import InputError
from d2f.saving import save_model
from distill import checkpoint
from distill.train import train

pytestmark = pytest.mark.xdist_group("train processes")  # one worker, one set of its fixtures

ROOT = Path(__file__).parent.parent
ROWS = {"data": {"tasks": {"countdown": 1.0, "sudoku": 1.0}, "row_length": 96, "rows": 4}}
STILL = {"lora": {"dropout": 0.0}}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the system (and gloo) takes unasked."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as one:
            if port not in ports and one.connect_ex(("127.0.0.1", port)) != 0:
                ports.append(port)
    return ports


def start(arguments: list[str], processes: int, ports: list[int]) -> list[subprocess.Popen]:
    """The same command in several processes, as torchrun starts them, on the CPU."""
    shared = {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]), "PORTS": ",".join(map(str, ports)),
    }  # fmt: skip
    running = []
    for rank in map(str, range(processes)):
        own = {}
        if processes > 1:
            own = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
            own |= {"RANK": rank, "LOCAL_RANK": rank}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, *arguments]
        running.append(subprocess.Popen(command, env=os.environ | shared | own, **pipes))
    return running


def finish(running: list[subprocess.Popen]) -> str:
    """Their output, once all have ended with 0. One that fails ends the others, which would wait
    for it."""
    limit = time.monotonic() + 100
    while any(process.poll() is None for process in running):
        failed = any(process.poll() not in (None, 0) for process in running)
        if failed or time.monotonic() > limit:
            for process in running:
                process.kill()
        time.sleep(0.05)
    output = "\n".join(process.communicate()[0] for process in running)
    assert [process.returncode for process in running] == [0] * len(running), output
    return output


def dump(config) -> dict:
    return config.model_dump(mode="json")


def curve(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "log.jsonl").open()]


def exported(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with each run as one process gave it (NAME) and as two did (NAME-ddp, NAME-fsdp)."""
    folder = tmp_path_factory.mktemp("runs")
    teacher = folder / "teacher"
    save_model(random_model("llada"), teacher, dtype=torch.float32, objective="masked_diffusion")
    d2f = {"init": str(teacher), **ROWS, "steps": 4, "save_every": 2}
    full = {"init": str(teacher), **ROWS, "steps": 4}
    parts = {"gradient_accumulation": 2, "gradient_checkpointing": True}

    jobs: list[dict] = []
    for kind, sharded in (("ddp", False), ("fsdp", True)):

        def job(name: str, objective: str, kind=kind, sharded=sharded, **changes):
            stop_after, nan_on = changes.pop("stop_after", None), changes.pop("nan_on", None)
            config = dump(settings(folder / f"{name}-{kind}", objective, **changes))
            jobs.append(
                {"config": config, "sharded": sharded, "stop_after": stop_after, "nan_on": nan_on}
            )

        job("d2f", "d2f", **d2f, **STILL)
        job("full", "masked_diffusion", **full, **parts)
        # Begun by one process, gone on with by two, ended by one; with dropout.
        begun = settings(folder / f"moved-{kind}", "d2f", **d2f, gradient_accumulation=2)
        train(begun, stop_after=1)
        job("moved", "d2f", **d2f, stop_after=2)
        job("nan", "masked_diffusion", **full, nan_on=3, save_every=2, log_every=100)

    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    script = str(ROOT / "tests" / "training_process.py")
    running = start([script, str(path)], 2, free_ports(len(jobs)))
    train(settings(folder / "d2f", "d2f", **d2f, **STILL))
    train(settings(folder / "full", "masked_diffusion", **full))
    train(settings(folder / "moved", "d2f", **d2f, gradient_accumulation=2))
    finish(running)
    for kind in ("ddp", "fsdp"):
        train(settings(folder / f"moved-{kind}", "d2f", **d2f, gradient_accumulation=2))
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["d2f", "full", "moved"])
def test_two_processes_give_the_curve_and_the_weights_of_one(trained, name, kind):
    """The teacher is the student without its adapter inside the wrapper; parts and gradient
    checkpointing change nothing; a resume moves between one process and two, and its dropout with
    it."""
    one, two = trained / name, trained / f"{name}-{kind}"
    assert len(curve(one)) == 4
    assert curve(two) == pytest.approx(curve(one), rel=1e-5)
    ours, theirs = exported(two), exported(one)
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_loss_that_is_nan_in_one_process_stops_all_and_saves_nothing(trained, kind):
    messages = [(trained / f"nan-{kind}.{rank}.error").read_text() for rank in (0, 1)]
    assert messages[0] == messages[1]
    assert messages[0].startswith("NonFiniteLossError") and "at step 3 (samples" in messages[0]
    assert checkpoint.steps(trained / f"nan-{kind}" / "checkpoints") == [2]


def wait_for(log: Path, lines: int, running: list[subprocess.Popen]) -> None:
    limit = time.monotonic() + 90
    while not log.is_file() or log.read_text().count("\n") < lines:
        assert all(process.poll() is None for process in running), running[0].communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.005)


def begin(tmp_path: Path, processes: int, **changes) -> tuple[dict, list[subprocess.Popen]]:
    teacher = tmp_path / "teacher"
    save_model(random_model("llada"), teacher, dtype=torch.float32, objective="masked_diffusion")
    changes = {"init": str(teacher), "steps": 40, "save_every": 1, "keep": 2} | changes
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(dump(settings(tmp_path / "run", **changes))))
    command = [str(ROOT / "distill" / "train.py"), "--config", str(path)]
    return changes, start(command, processes, free_ports(1))


def test_kill_9_resumes_bit_for_bit(tmp_path):
    """Each step is saved, so that most of the time of the killed run is saving."""
    changes, running = begin(tmp_path, 1)
    wait_for(tmp_path / "run" / "log.jsonl", 4, running)
    running[0].kill()
    running[0].communicate()
    assert 3 <= checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] < 40
    train(settings(tmp_path / "run", **changes))
    train(settings(tmp_path / "whole", **changes | {"save_every": 40}))
    ours, theirs = exported(tmp_path / "run"), exported(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_sigterm_to_one_process_saves_and_ends_all_with_0(tmp_path):
    _, running = begin(tmp_path, 2, steps=2000, save_every=2000)
    log = tmp_path / "run" / "log.jsonl"
    wait_for(log, 3, running)
    running[1].send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM after step" in finish(running)
    (step,) = checkpoint.steps(tmp_path / "run" / "checkpoints")
    assert step == len(curve(tmp_path / "run")) < 2000
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")["step"] == step
    assert not (tmp_path / "run" / "model").exists()


def test_rows_that_processes_and_parts_cannot_share_are_an_error(tmp_path):
    with pytest.raises(InputError, match="multiple of the 1 processes x 3 parts"):
        train(settings(tmp_path, gradient_accumulation=3))
