"""python tests/training_process.py JOBS.json

One of the processes of distributed trainings, started by test_train_processes.py with torchrun's
environment. JOBS.json: a list of {config, sharded, stop_after, nan_on, signals}, trained one after
another; nan_on: rank 1's forward whose loss is NaN; signals: what each rank gets in its third
forward. What a job raised is written beside its output, as `output.RANK.error`.
"""

from __future__ import annotations

import json
import os
import signal
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
    rank, nan_on = os.environ["RANK"], job.get("nan_on")
    signals = job.get("signals", {}).get(rank, [])
    calls = iter(range(1, 1000))

    def forward(self, batch):
        call, loss = next(calls), plain_forward(self, batch)
        if call == 3:
            for number in signals:
                signal.raise_signal(number)
        return loss * float("nan") if rank == "1" and call == nan_on else loss

    MaskedDiffusion.forward = forward
    try:
        train(parse_config(job["config"], "test"), stop_after=job.get("stop_after"))
    except (Exception, KeyboardInterrupt) as error:
        place = Path(job["config"]["output"] + f".{rank}.error")
        place.write_text(f"{type(error).__name__}: {error}")
        if nan_on is None and not signals:
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
