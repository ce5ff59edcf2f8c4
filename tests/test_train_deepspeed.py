"""DeepSpeed's stages, as configs/accelerate has them, train what one process does; on two CPU
processes. Only where DeepSpeed is installed, which the tests' own environment leaves out."""

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
from test_train import settings
from test_train_processes import ROWS, free_ports
from tiny import random_model

from d2f.saving import save_model
from distill.train import train

pytest.importorskip("deepspeed")
ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero2", "zero2-offload", "zero3", "zero3-offload"])
def test_a_stage_trains_what_one_process_does(tmp_path, name):
    """To fp32 rounding: the losses, and the adapter that is exported."""
    save_model(random_model("llada"), tmp_path / "teacher", dtype=torch.float32)
    more = {"init": str(tmp_path / "teacher"), **ROWS, "steps": 4, "lora": {"dropout": 0.0}}
    train(settings(tmp_path / "one", "d2f", **more))
    config = settings(tmp_path / "two", "d2f", **more).model_dump(mode="json")
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(config))
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port"]
    launch += [str(free_ports(1)[0]), "--config_file", f"{ROOT}/configs/accelerate/{name}.yaml"]
    command = [sys.executable, *launch, f"{ROOT}/distill/train.py", "--config"]
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, str(tmp_path / "two.yaml")],
        env=os.environ | environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one, two = (
        [json.loads(line)["loss"] for line in (tmp_path / run / "log.jsonl").open()]
        for run in ("one", "two")
    )
    assert two == pytest.approx(one, rel=1e-5)
    one, two = (
        load_file(tmp_path / run / "adapter" / "adapter_model.safetensors")
        for run in ("one", "two")
    )
    for key, weight in one.items():
        torch.testing.assert_close(two[key], weight, rtol=1e-4, atol=1e-6)
