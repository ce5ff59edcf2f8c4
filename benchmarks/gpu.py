"""python -m benchmarks.gpu --output benchmarks/results/gpu.json [--vllm-python PYTHON]

Runs every GPU measurement of the project on this machine's NVIDIA GPU and writes one JSON with the
device's name: the kernels' tests and benchmarks, a decoding forward of LLaDA-8B's and Dream-7B's
shapes against the memory's speed, a training step of LLaDA-8B's shape, the parts of a decoding
forward of the bundled models, and their comparison with vLLM (whose environment `--vllm-python`
names; without one the comparison has no served entry and says so). `--only` takes some of them.
What is measured is kept if a later part fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from d2f.configuration import read_mapping
from d2f.files import write_beside

ROOT = Path(__file__).parent.parent
PARTS = ("kernels", "decode_step", "training", "forward", "compare")
CONFIG = ROOT / "configs" / "comparison" / "compare-tiny.yaml"


def forward(model: str) -> dict[str, Any]:
    """The report of benchmarks.forward on the GPU."""
    return _written("benchmarks.forward", "--model", model, "--device", "cuda")


def kernels() -> dict[str, Any]:
    """Whether the kernels' tests pass on the GPU, and the report of each kernel's benchmark."""
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/kernels"], cwd=ROOT, capture_output=True, text=True
    )
    found: dict[str, Any] = {"tests": {"status": tests.returncode, "tail": tests.stdout[-4000:]}}
    for name in ("span_attention", "confidence", "masked_kl"):
        found[name] = _written(f"benchmarks.{name}")
    return found


def training() -> dict[str, Any]:
    """A training step of LLaDA-8B's shape at 1,024 tokens, and ours at 4,096 with gradient
    checkpointing."""
    long = ("--length", "4096", "--checkpointing", "--ways", "ours")
    return {
        "1024": _written("benchmarks.train_step"),
        "4096": _written("benchmarks.train_step", *long),
    }


def compare(vllm_python: str | None) -> dict[str, Any]:
    """The report of decode.compare with its local entries on the GPU."""
    values = read_mapping(CONFIG)
    entries = [e for e in values["entries"] if e["kind"] != "vllm" or vllm_python]
    for entry in entries:
        if entry["kind"] == "vllm":
            entry.pop("env", None)  # it is for CPUs
        else:
            entry["device"] = "cuda"
    names = [entry["name"] for entry in entries]
    baseline = values["baseline"] if values["baseline"] in names else "autoregressive"
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "output": str(Path(folder) / "compare"),
            "entries": json.dumps(entries),
            "baseline": baseline,
            "figures": "false",
        }
        if vllm_python:
            given["vllm-python"] = vllm_python
        flags = [part for key, value in given.items() for part in (f"--{key}", value)]
        _run("decode.compare", "--config", str(CONFIG), *flags)
        return dict(json.loads((Path(folder) / "compare" / "report.json").read_text()))


def _written(module: str, *arguments: str) -> dict[str, Any]:
    """What a benchmark writes with --json."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        _run(module, *arguments, "--json", str(path))
        return dict(json.loads(path.read_text()))


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM for this GPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some of the parts")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("error: expected an NVIDIA GPU, torch finds none", file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "served": options.vllm_python is not None,
    }
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "kernels": kernels,
        "decode_step": lambda: _written("benchmarks.decode_step"),
        "training": training,
        "forward": lambda: {model: forward(model) for model in ("tiny-d2f", "tiny-ar")},
        "compare": lambda: compare(options.vllm_python),
    }
    for name in options.only or parts:
        try:
            results[name] = parts[name]()
        except subprocess.CalledProcessError as error:
            results[name] = {"failed": f"{error.cmd[2]} ended with status {error.returncode}"}
        write_beside(options.output, json.dumps(results) + "\n")
    failed = [name for name in parts if "failed" in results.get(name, {})]
    if failed:
        print(f"error: {', '.join(failed)} failed, see above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
