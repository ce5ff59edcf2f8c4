"""python tests/memory_process.py CONFIG.json

A training in a process of its own, and what it needed of memory: prints, in bytes, what `--check`
estimates and what the system counted, beyond what Python and its libraries take.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch

import distill.trainer as training
from distill.check import check
from distill.config import parse_config
from distill.train import train

marks: dict[str, int] = {}


def resident(name: str = "VmRSS") -> int:
    """What the process has in memory, or as ``VmHWM`` the most that it had."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if name in x)
    return int(line.split()[1]) * 1024


def begin() -> int:
    """Give back what is free and forget the peak; what is left."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    return resident()


def loading(*arguments, **options):
    model = prepare_model(*arguments, **options)
    marks["load"] = resident("VmHWM")
    return model


def exporting(*arguments) -> None:
    marks["train"] = resident("VmHWM")
    marks["held"] = begin()
    export_run(*arguments)
    marks["export"] = resident("VmHWM")


if __name__ == "__main__":
    torch.set_num_threads(1)
    values = json.loads(Path(sys.argv[1]).read_text())
    # Libraries that a training is the first to need.
    small = {"init": "tiny-teacher", "output": values["output"] + "-small", "steps": 1}
    train(parse_config(values | small, "small"))
    prepare_model, training.prepare_model = training.prepare_model, loading
    export_run, training.export_run = training.export_run, exporting
    config = parse_config(values, "test")
    memory = check(config).memory
    base = begin()
    train(config)
    found = {name: value - base for name, value in marks.items()}
    estimated = {
        "load": memory.load,
        "train": memory.total(config.gradient_checkpointing),
        "export": memory.export,
    }
    print(json.dumps({"found": found, "estimated": estimated}))
