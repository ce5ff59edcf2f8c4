"""Two processes train what one does; a resume continues on another number of them; signals reach
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
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from test_train import curve, same, settings, weights
from tiny import random_model

from d2f.saving import save_model
from distill import checkpoint
from distill.objectives import OBJECTIVES
from distill.train import train
from distill.trainer import StopRequest

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
    limit = time.monotonic() + 200
    while any(process.poll() is None for process in running):
        failed = any(process.poll() not in (None, 0) for process in running)
        if failed or time.monotonic() > limit:
            for process in running:
                process.kill()
        time.sleep(0.05)
    output = "\n".join(process.communicate()[0] for process in running)
    assert [process.returncode for process in running] == [0] * len(running), output
    return output


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with each run as one process gave it (NAME) and as two did (NAME-ddp, NAME-fsdp)."""
    folder = tmp_path_factory.mktemp("runs")
    teacher = folder / "teacher"
    save_model(random_model("llada"), teacher, dtype=torch.float32, objective="masked_diffusion")
    full = {"init": str(teacher), **ROWS, "steps": 2}
    parts = {"gradient_accumulation": 2, "gradient_checkpointing": True}
    two = full | {"steps": 4}
    one = two | {"gradient_accumulation": 2}
    nan = two | {"save_every": 2, "log_every": 100}
    jobs = []
    for kind in ("ddp", "fsdp"):
        # Begun by one process, gone on with by two, ended by one; with dropout.
        train(settings(folder / f"d2f-{kind}", "d2f", **one), stop_after=1)
        for name, objective, changes, more in (
            ("full", "masked_diffusion", full | parts, {}),
            ("d2f", "d2f", two, {"stop_after": 2}),
            ("nan", "masked_diffusion", nan, {"nan_on": 3}),
        ):
            if (name, kind) != ("nan", "ddp"):
                config = settings(folder / f"{name}-{kind}", objective, **changes)
                job = {"config": config.model_dump(mode="json"), "sharded": kind == "fsdp"}
                jobs.append(job | more)
    # SIGTERM to one of two; Ctrl-C to both twice at once, as from a terminal and a launcher.
    for name, signals in (("15", {"1": [15]}), ("2", {"0": [2, 2], "1": [2, 2]})):
        config = settings(folder / name, init=str(teacher), steps=9, save_every=9)
        jobs.append({"config": config.model_dump(mode="json"), "signals": signals})
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    script = str(ROOT / "tests" / "training_process.py")
    running = start([script, str(path)], 2, free_ports(len(jobs)))
    train(settings(folder / "full", "masked_diffusion", **full))
    train(settings(folder / "d2f", "d2f", **one))
    (folder / "said").write_text(finish(running))
    for kind in ("ddp", "fsdp"):
        train(settings(folder / f"d2f-{kind}", "d2f", **one))
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["d2f", "full"])
def test_two_processes_give_the_curve_and_the_weights_of_one(trained, name, kind):
    """The teacher is the student without its adapter inside the wrapper; parts and gradient
    checkpointing change nothing; a resume moves between one process and two, and its dropout with
    it."""
    one, two = trained / name, trained / f"{name}-{kind}"
    assert len(curve(one)) == (4 if name == "d2f" else 2)
    assert curve(two) == pytest.approx(curve(one), rel=1e-5)
    ours, theirs = weights(two), weights(one)
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=2e-5)


def test_a_loss_that_is_nan_in_one_process_stops_all_and_saves_nothing(trained):
    messages = [(trained / f"nan-fsdp.{rank}.error").read_text() for rank in (0, 1)]
    assert messages[0] == messages[1]
    assert messages[0].startswith("NonFiniteLossError") and "at step 3 (samples" in messages[0]
    assert checkpoint.steps(trained / "nan-fsdp" / "checkpoints") == [2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_saves_and_ends_all(trained, number):
    run = trained / str(int(number))
    assert checkpoint.steps(run / "checkpoints") == [3] and len(curve(run)) == 3
    said = (trained / "said").read_text()
    assert said.count(f"stopped by {number.name} after step 3, which is saved") == 1
    assert "Traceback" not in said and not (run / "model").exists()
    raised = [path.read_text() for path in trained.glob(f"{int(number)}.*.error")]
    assert raised == (["KeyboardInterrupt: "] * 2 if number == signal.SIGINT else [])


# Killed and stopped from outside


def test_kill_9_resumes_bit_for_bit(tmp_path):
    """Each step is saved, so that most of the time of the killed run is saving."""
    changes = {"steps": 20, "save_every": 1, "keep": 2}
    settings(tmp_path / "run", **changes).save(tmp_path / "config.yaml")
    command = [str(ROOT / "distill" / "train.py"), "--config", str(tmp_path / "config.yaml")]
    (running,) = start(command, 1, free_ports(1))
    log, limit = tmp_path / "run" / "log.jsonl", time.monotonic() + 200
    while not log.is_file() or log.read_text().count("\n") < 4:
        assert running.poll() is None, running.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.005)
    running.kill()
    running.communicate()
    assert 3 <= checkpoint.steps(tmp_path / "run" / "checkpoints")[-1] < 20
    train(settings(tmp_path / "run", **changes))
    train(settings(tmp_path / "whole", **changes | {"save_every": 20}))
    assert same(tmp_path / "run", tmp_path / "whole")


# Stopped from within


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
    """The caller gets KeyboardInterrupt, so that what trains in a loop stops too. In the last step
    it ends nothing."""
    interrupt(monkeypatch, 6)
    train(settings(tmp_path / "whole", save_every=6))
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            train(settings(tmp_path / "run", save_every=6))
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [3]
    said = capfd.readouterr()
    assert "stopping after this step, which is saved" in said.err
    assert "stopped by SIGINT after step 3, which is saved\n" in said.out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (tmp_path / "run" / "loss.png").is_file()
    train(settings(tmp_path / "run", save_every=6))
    assert same(tmp_path / "run", tmp_path / "whole")


def test_a_second_ctrl_c_stops_at_once_and_what_a_launcher_passes_on_is_none(
    tmp_path, monkeypatch, capfd
):
    stop = StopRequest(1)
    with stop.listening():
        assert stop.asked() == 0
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.asked() == signal.SIGINT
    assert capfd.readouterr().err.count("stopping after this step") == 1
    monkeypatch.setattr(StopRequest, "PASSED_ON", -1.0)
    interrupt(monkeypatch, 3, times=2)
    with pytest.raises(KeyboardInterrupt):
        train(settings(tmp_path, save_every=2))
    assert checkpoint.steps(tmp_path / "checkpoints") == [2]


def test_a_lost_terminal_saves_the_step(tmp_path, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have set it
    try:
        interrupt(monkeypatch, 3, number=signal.SIGHUP)
        train(settings(tmp_path, save_every=6))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert checkpoint.newest(tmp_path / "checkpoints")["step"] == 3


# What `accelerate launch --config_file` takes

FOLDER = ROOT / "configs" / "accelerate"
KINDS = {
    "one-gpu": DistributedType.NO,
    "ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "zero2": DistributedType.DEEPSPEED,
    "zero2-offload": DistributedType.DEEPSPEED,
    "zero3": DistributedType.DEEPSPEED,
    "zero3-offload": DistributedType.DEEPSPEED,
}


def launched(name: str) -> Namespace:
    """The arguments that accelerate's own launcher makes of a file."""
    words = ["--config_file", str(FOLDER / f"{name}.yaml"), "distill/train.py", "--config", "x"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return arguments


def test_each_of_accelerates_files_is_what_its_name_says():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == KINDS.keys()
    for name, kind in KINDS.items():
        config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
        assert config.distributed_type == kind
        assert config.mixed_precision == "no"  # what the run's configuration says is not overruled
    sharded = launched("fsdp2")
    assert sharded.use_fsdp and int(sharded.fsdp_version) == 2
    assert sharded.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    assert sharded.fsdp_transformer_layer_cls_to_wrap is None  # from the model
    for name in (name for name in KINDS if name.startswith("zero")):
        stage, device = int(name[4]), "cpu" if name.endswith("offload") else "none"
        arguments = launched(name)
        assert arguments.use_deepspeed and arguments.zero_stage == stage
        assert arguments.offload_optimizer_device == device
        assert arguments.offload_param_device == (device if stage == 3 else "none")
        assert arguments.gradient_clipping is None  # the run's own


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2", "zero2-offload", "zero3", "zero3-offload"])
def test_a_stage_of_deepspeed_trains_what_one_process_does(tmp_path, name):
    """To fp32 rounding: the losses, and the adapter that is exported. Only where DeepSpeed is
    installed, which the tests' own environment leaves out."""
    pytest.importorskip("deepspeed")
    save_model(random_model("llada"), tmp_path / "teacher", dtype=torch.float32)
    more = {"init": str(tmp_path / "teacher"), **ROWS, "steps": 4, **STILL}
    train(settings(tmp_path / "one", "d2f", **more))
    config = settings(tmp_path / "two", "d2f", **more).model_dump(mode="json")
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(config))
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port"]
    launch += [str(free_ports(1)[0]), "--config_file", f"{FOLDER}/{name}.yaml"]
    command = [sys.executable, *launch, f"{ROOT}/distill/train.py", "--config"]
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, str(tmp_path / "two.yaml")],
        env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "one"), rel=1e-5)
    one, two = (
        load_file(tmp_path / run / "adapter" / "adapter_model.safetensors")
        for run in ("one", "two")
    )
    for key, weight in one.items():
        torch.testing.assert_close(two[key], weight, rtol=1e-4, atol=1e-6)
