"""vLLM's side of the comparison: a process of its own, and what it found or why it did not run."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.at_shape.traces import Trace
from benchmarks.shapes import SHAPES
from d2f.device import users_environment

PROGRAM = Path(__file__).with_name("vllm_process.py")


def run_vllm(
    python: str, shape: str, dtype: str, traces: Mapping[str, Sequence[Trace]], limit: float
) -> dict[str, Any]:
    """Tokens a second of each task's traces as requests, one at a time, each with as many new
    tokens as it has visible ones and its end token; or `refused`, with the error of vLLM. limit:
    seconds that it may take."""
    config = SHAPES[shape]()
    config.architectures = ["LlamaForCausalLM"]
    requests = [[trace.prompt, trace.tokens + 1] for some in traces.values() for trace in some]
    more = {
        "PYTHONPATH": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an error is then this process's
    }
    with tempfile.TemporaryDirectory() as place:
        config.save_pretrained(place)
        asked = {"model": place, "dtype": dtype, "requests": requests}
        try:
            done = subprocess.run(
                [python, str(PROGRAM)], input=json.dumps(asked), text=True, capture_output=True,
                timeout=limit, env={**users_environment(), **more}, cwd=place,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"dtype": dtype, "refused": f"not done after {limit:g} s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"dtype": dtype, "refused": said[-1] if said else f"status {done.returncode}"}
    found = json.loads(done.stdout.splitlines()[-1])
    seconds = iter(found.pop("seconds"))
    speeds = {}
    for task, some in traces.items():
        taken = sum(next(seconds) for _ in some)
        speeds[task] = sum(trace.tokens for trace in some) / taken
    return {"dtype": dtype, **found, "tokens_per_second": speeds}
