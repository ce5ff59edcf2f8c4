"""python tests/training_process.py JOBS.json

One of the processes of distributed trainings, started by test_train_processes.py with torchrun's
environment. JOBS.json: a list of {config, sharded, stop_after, nan_on}, trained one after another.
What a job raised is written beside its output, as `output.RANK.error`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from distill.config import parse_config
from distill.objectives.masked_diffusion import MaskedDiffusion
from distill.train import train

plain_accelerator = accelerate.Accelerator
plain_forward = MaskedDiffusion.forward


class ShardedOnTheCpu(plain_accelerator):  # type: ignore[valid-type,misc]
    """accelerate turns FSDP on for accelerators only: on a CPU its state takes no notice of the
    plugin. What it does with FSDP2 then works on a CPU too, so the state is told."""

    def __init__(self, **more):
        super().__init__(**more)
        self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
        )
        for state in (self.state, PartialState()):
            state.distributed_type = DistributedType.FSDP


def run(job: dict) -> None:
    accelerate.Accelerator = ShardedOnTheCpu if job.get("sharded") else plain_accelerator
    calls = iter(range(1, 1000))

    def forward(self, batch):
        loss = plain_forward(self, batch)
        return loss * float("nan") if next(calls) == job["nan_on"] else loss

    spoiled = job.get("nan_on") is not None and os.environ["RANK"] == "1"
    MaskedDiffusion.forward = forward if spoiled else plain_forward
    try:
        train(parse_config(job["config"], "test"), stop_after=job.get("stop_after"))
    except Exception as error:
        place = Path(job["config"]["output"] + f".{os.environ['RANK']}.error")
        place.write_text(f"{type(error).__name__}: {error}")
        if job.get("nan_on") is None:
            raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, job in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        os.environ["MASTER_PORT"] = os.environ["PORTS"].split(",")[number]
        run(job)
